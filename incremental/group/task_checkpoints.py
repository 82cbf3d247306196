"""The checkpoint of a task in etcd, which only the capture that has the task may save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tikv_br.cluster.etcd_values import Compare, Get, KeyValue, Put, absent, unchanged
from tikv_br.errors import SyncFenced
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.group.model import ChangefeedTask, Progress
from tikv_br.incremental.group.store import GroupStore, load_progress
from tikv_br.incremental.status import SyncStatus
from tikv_br.records import dump
from tikv_br.redaction import redact


class TaskCheckpoints(CheckpointStore):
    """Checkpoints of one task. Saves only if the capture is still a member and the last save was this capture's own.

    A task is assigned to another capture only after this one has freed it or has left the group. So a save can never overwrite
    another capture's.
    """

    def __init__(
        self, store: GroupStore, task: ChangefeedTask, start_ts: int, *, present: Compare, assigned: Compare
    ) -> None:
        """`present`: the capture's key still exists; `assigned`: the task is unchanged since it was assigned to us."""
        self._etcd = store.etcd
        self._key = store.keys.of("progress", task.id)
        self._start = Progress(task.changefeed, task.number, start_ts, start_ts, task.epoch, task.capture, 0)
        self._present, self._assigned = present, assigned
        self._expected = absent(self._key)
        self.status: Callable[[], SyncStatus] | None = None
        """Gives figures to save beside the checkpoint."""
        self.moved_at = time.monotonic()
        """Time of the checkpoint's last advance, on the monotonic clock."""

    def claim(self) -> int:
        """See `CheckpointStore.claim`; fences the previous capture, which has freed the task."""
        item = self._etcd.get(self._key)
        self._expected = absent(self._key) if item is None else unchanged(item)
        self._write(self._parsed(item), "", self._assigned)
        return self._start.epoch

    def load(self) -> Checkpoint:
        """See `CheckpointStore.load`; before the first save, the changefeed's start-ts."""
        found = self._parsed(self._etcd.get(self._key))
        return Checkpoint(
            str(self._start.id),
            found.checkpoint_ts,
            found.resolved_ts,
            self._start.epoch,
            found.saved_ms,
            missed=found.missed,
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`. Raises `EtcdError`."""
        self._write(checkpoint, "")
        self.moved_at = time.monotonic()

    def save_error(self, error: str) -> None:
        """Save why the task ended, with an unchanged checkpoint. Raises as `save`."""
        self._write(self._parsed(self._etcd.get(self._key)), error)

    def _write(self, reached: Checkpoint | Progress, error: str, *conditions: Compare) -> None:
        data = dump(self._progress(reached, error))
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
        """Continue from the stored value if it is ours (the answer to an earlier write was lost). Raises `SyncFenced` if not."""
        found = None if item is None or unchanged(item) == self._expected else load_progress(item)
        if item is None or found is None or (found.capture, found.epoch) != (self._start.capture, self._start.epoch):
            raise SyncFenced(f"task {self._start.id} is no longer assigned to capture {self._start.capture}")
        self._expected = unchanged(item)

    def _parsed(self, item: KeyValue | None) -> Progress:
        return self._start if item is None else load_progress(item)

    def _progress(self, reached: Checkpoint | Progress, error: str) -> Progress:
        progress = replace(
            self._start,
            checkpoint_ts=reached.checkpoint_ts,
            resolved_ts=reached.resolved_ts,
            missed=reached.missed,
            saved_ms=time.time_ns() // 1_000_000,
            error=redact(error),
        )
        if self.status is None:
            return progress
        status = self.status()
        return replace(
            progress,
            events=status.events,
            written=status.written,
            events_per_second=round(status.events_per_second),
            regions=status.feed.regions,
            sorter_bytes=status.sorter_memory_bytes + status.sorter_disk_bytes,
            error=redact(error or status.last_error),
        )
