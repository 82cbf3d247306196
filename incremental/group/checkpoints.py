"""The checkpoint of a task, kept in etcd as its `Progress`, by the one capture that the task is given to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from incremental.checkpoint import Checkpoint, CheckpointStore
from incremental.group.model import Progress, Task, dump, load_progress
from incremental.group.store import GroupStore
from incremental.replicate import SyncStatus
from tikv_br.cluster.etcd_values import Compare, Get, KeyValue, Put, absent, unchanged
from tikv_br.errors import SyncFenced
from tikv_br.redaction import redact


class TaskCheckpoints(CheckpointStore):
    """Saves only while the capture is a member, and only onto what it has itself written last.

    A task goes to another capture only after this one has let go of it or is no member any more: so what is saved here can
    never follow what another has saved.
    """

    def __init__(self, store: GroupStore, task: Task, start_ts: int, *, present: Compare, assigned: Compare) -> None:
        """`present`: the capture's key is there, as it was made; `assigned`: the task is as it was given to us."""
        self._etcd = store.etcd
        self._key = store.keys.progress(task.id)
        self._task = task
        self._start_ts = start_ts
        self._present, self._assigned = present, assigned
        self._expected = absent(self._key)
        self.status: Callable[[], SyncStatus] | None = None
        """Gives figures to save beside the checkpoint."""
        self.moved_at = time.monotonic()
        """When the checkpoint last moved."""

    def claim(self) -> int:
        """See `CheckpointStore.claim`; nobody is fenced off but the former holder, which has let go."""
        item = self._etcd.get(self._key)
        self._expected = absent(self._key) if item is None else unchanged(item)
        found = self._parsed(item)
        self._write(found.checkpoint_ts, found.resolved_ts, "", self._assigned)
        return self._task.epoch

    def load(self) -> Checkpoint:
        """See `CheckpointStore.load`; before the first it is the changefeed's start."""
        found = self._parsed(self._etcd.get(self._key))
        return Checkpoint(str(self._task.id), found.checkpoint_ts, found.resolved_ts, self._task.epoch, found.saved_ms)

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`. Raises `EtcdError`."""
        self._write(checkpoint.checkpoint_ts, checkpoint.resolved_ts, "")
        self.moved_at = time.monotonic()

    def tell(self, error: str) -> None:
        """Say beside the checkpoint what ended the work on it. Raises as `save` does."""
        found = self._parsed(self._etcd.get(self._key))
        self._write(found.checkpoint_ts, found.resolved_ts, error)

    def _write(self, checkpoint_ts: int, resolved_ts: int, error: str, *conditions: Compare) -> None:
        data = dump(self._progress(checkpoint_ts, resolved_ts, error))
        while True:
            done = self._etcd.transact(
                [self._present, self._expected, *conditions],
                [Put(self._key, data)],
                [Get(self._key)],
                repeatable=True,
            )
            if done.succeeded:
                self._expected = unchanged(KeyValue(self._key, data, 0, done.revision))
                return
            self._adopt(next(iter(done.listings[0].items), None))

    def _adopt(self, item: KeyValue | None) -> None:
        """Go on from what is there if it is ours: an answer to an earlier write was lost. Raises `SyncFenced` if not."""
        if item is None or unchanged(item) == self._expected or not self._is_ours(load_progress(item)):
            raise SyncFenced(f"task {self._task.id} is no longer that of capture {self._task.capture}")
        self._expected = unchanged(item)

    def _is_ours(self, progress: Progress) -> bool:
        return (progress.capture, progress.epoch) == (self._task.capture, self._task.epoch)

    def _parsed(self, item: KeyValue | None) -> Progress:
        if item is None:
            return self._bare(self._start_ts, self._start_ts, 0)
        return load_progress(item)

    def _bare(self, checkpoint_ts: int, resolved_ts: int, saved_ms: int) -> Progress:
        task = self._task
        return Progress(task.changefeed, task.number, checkpoint_ts, resolved_ts, task.epoch, task.capture, saved_ms)

    def _progress(self, checkpoint_ts: int, resolved_ts: int, error: str) -> Progress:
        status = self.status() if self.status is not None else None
        bare = replace(self._bare(checkpoint_ts, resolved_ts, time.time_ns() // 1_000_000), error=redact(error))
        if status is None:
            return bare
        return replace(
            bare,
            events=status.events,
            written=status.written,
            events_per_second=round(status.events_per_second),
            regions=status.feed.regions,
            sorter_bytes=status.sorter_memory_bytes + status.sorter_disk_bytes,
            error=redact(error or status.last_error),
        )
