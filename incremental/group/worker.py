"""Runs one task in a capture: feed, sorter and sink of its sub-span, fenced by the capture's lease.

The checkpoint of a task in etcd, which only the capture that has the task may save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.etcd import LeaseHolder
from tikv_br.cluster.etcd_values import Compare, Get, KeyValue, Put, absent, unchanged
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.errors import EtcdLeaseExpired, EtcdUnreachable, SyncFenced, SyncStateDamaged, TikvBrError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.group.model import (
    MAX_POLL_SECONDS,
    MAX_WRITE_MS,
    ChangefeedInfo,
    ChangefeedStatus,
    ChangefeedTask,
    GroupState,
    Progress,
    load,
)
from tikv_br.incremental.group.store import GroupStore, load_progress
from tikv_br.incremental.handover import CHANGEFEED_STATE, service_id
from tikv_br.incremental.pipeline import NoSafePoint, PipelineOptions, Replicator, pipeline
from tikv_br.incremental.sinks.open import Origin, SinkOptions, open_sink
from tikv_br.incremental.sinks.url import check_shared, parse
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.status import SyncStatus
from tikv_br.incremental.watch.status import NamedStatus
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
        progress = structs.replace(
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
        return structs.replace(
            progress,
            events=status.events,
            written=status.written,
            events_per_second=round(status.events_per_second),
            regions=status.feed.regions,
            sorter_bytes=status.sorter_memory_bytes + status.sorter_disk_bytes,
            error=redact(error or status.last_error),
        )


LEASE_SECONDS = 10
POLLS_PER_LEASE = 10


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options of a process that joins a group."""

    scratch: Path
    """A local directory for changes that do not fit into memory."""
    lease: int = LEASE_SECONDS
    """TTL in seconds of the capture's lease: how long the group waits for a capture that has died, before it also waits for
    the writes that may still be in flight."""
    sink_tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def write_timeout(self) -> float:
        """Seconds that a request to a sink may take, and that one may go on arriving after the end of the lease."""
        return min(self.lease, MAX_WRITE_MS / 1000)

    @property
    def poll_seconds(self) -> float:
        """Seconds between two reads of the group's state."""
        return min(MAX_POLL_SECONDS, self.lease / POLLS_PER_LEASE)


@dataclass(frozen=True, slots=True)
class Membership:
    """A capture's state while it is a member of the group."""

    id: str
    """Id of the capture."""
    store: GroupStore
    source: Cluster
    lease: LeaseHolder
    present: Compare
    """Condition: the capture's key still exists, as it was created."""
    options: CaptureOptions


class Worker:
    """Runs one task in a background thread until it is stopped or fails."""

    def __init__(
        self, membership: Membership, state: GroupState, task: ChangefeedTask, before: Worker | None = None
    ) -> None:
        """`state` has the task assigned to us; `before` is an earlier attempt, whose time without progress counts on."""
        self.task = task
        self.changefeed: ChangefeedInfo = state.changefeeds[task.changefeed]
        self.replicator: Replicator | None = None
        """The running replication; None before it starts."""
        self.checkpoints = TaskCheckpoints(
            membership.store,
            task,
            self.changefeed.start_ts,
            present=membership.present,
            assigned=state.unchanged(membership.store.keys.of("task", task.id)),
        )
        if before is not None:
            self.checkpoints.moved_at = before.checkpoints.moved_at
        self._membership = membership
        self._stop = threading.Event()
        self._future: Future[None] | None = None
        self._ended_at = 0.0

    def start(self, pool: Executor) -> None:
        self._future = pool.submit(self._run)

    def stop(self) -> None:
        """Ask it to save its checkpoint and end, between two batches."""
        self._stop.set()

    @property
    def status(self) -> NamedStatus:
        """The current status. Thread-safe."""
        error, replicator = self.error, self.replicator
        message = "" if error is None else error.message
        status = None if replicator is None else replicator.status()
        source, sink = ",".join(self._membership.source.config.pd), self.changefeed.sink
        return NamedStatus(str(self.task.id), status, message, source=source, sink=sink)

    @property
    def ended(self) -> bool:
        return self._future is not None and self._future.done()

    @property
    def settled(self) -> bool:
        """Return whether it has ended and none of its writes can still arrive; failed ones may until they time out."""
        if not self.ended:
            return False
        unanswered = None if self.replicator is None else self.replicator.writer.unanswered_at
        since = max(self._ended_at if self.error is not None else 0.0, unanswered or 0.0)
        return not since or time.monotonic() >= since + self._membership.options.write_timeout

    @property
    def error(self) -> TikvBrError | None:
        """The error that ended it. Raises errors other than `TikvBrError`, which are defects."""
        error = self._future.exception() if self._future is not None and self._future.done() else None
        if error is None or isinstance(error, TikvBrError):
            return error
        raise error

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended with a permanent error, or without progress for longer than the patience."""
        error = self.error
        if error is None or isinstance(error, SyncFenced | EtcdLeaseExpired):
            return False
        if not error.retryable:
            return True
        return time.monotonic() - self.checkpoints.moved_at > self.changefeed.patience_ms / 1000

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._ended_at = time.monotonic()

    def _follow(self) -> None:
        membership, changefeed = self._membership, self.changefeed
        self.checkpoints.claim()
        start = self.checkpoints.load()
        codec = KeyCodec(membership.source.api_version, changefeed.keyspace_id)
        options = PipelineOptions(
            scratch=membership.options.scratch,
            sorter_bytes=changefeed.sorter_bytes,
            feed=FeedOptions(hold_back=changefeed.hold_back_ms / 1000),
            replicate=ReplicateOptions(
                patience=changefeed.patience_ms / 1000,
                longest_wait=changefeed.backoff_ms / 1000,
                rate_limit=-(-changefeed.rate_limit // changefeed.spans),
            ),
        )
        target = parse(changefeed.sink)
        check_shared(target)
        origin = self._origin()
        changefeed.check_keyspace(origin.keyspace_name)
        with open_sink(target, origin, self._sink_options()) as sink:
            changefeed.check_place(sink.place)
            membership.source.ingests.register_follower(
                service_id(changefeed.id), origin.follower(CHANGEFEED_STATE, sink)
            )
            with pipeline(
                membership.source,
                codec,
                [KeyRange(self.task.start, self.task.end)],
                start,
                options,
                sink=sink,
                checkpoints=self.checkpoints,
                safe_point=NoSafePoint(membership.lease.check),
                stop=self._stop,
            ) as replicator:
                self.replicator = replicator
                self.checkpoints.status = replicator.status
                replicator.run()

    def _origin(self) -> Origin:
        return Origin(
            self._membership.source.cluster_id,
            self.changefeed.keyspace_id,
            self.changefeed.id,
            whole=self.changefeed.range,
            span=KeyRange(self.task.start, self.task.end),
            start_ts=self.changefeed.start_ts,
            keyspace_name=keyspace_names(self._membership.source, [self.changefeed.keyspace_id]).get(
                self.changefeed.keyspace_id, ""
            ),
            resumes=True,
        )

    def _sink_options(self) -> SinkOptions:
        return SinkOptions(
            tls=self._membership.options.sink_tls,
            skip_version_check=self._membership.source.config.skip_version_check,
            drop_ttls=self.changefeed.drop_ttls,
            concurrency=self.changefeed.concurrency,
            batch_rows=self.changefeed.batch_rows,
            request_timeout=self._membership.options.write_timeout,
            fence=self._membership.lease.check,
            complete_ts=self._complete_ts,
        )

    def _complete_ts(self, ts: int) -> int:
        """The ts that this task's sink announces, once for all tasks: the changefeed's checkpoint, which the owner publishes."""
        if self.changefeed.range == KeyRange(self.task.start, self.task.end):
            return ts
        if self.task.number:
            return 0
        store = self._membership.store
        try:
            item = store.etcd.get(store.keys.of("status", self.changefeed.id))
            return 0 if item is None else load(ChangefeedStatus, item).checkpoint_ts
        except (EtcdUnreachable, SyncStateDamaged):
            return 0
