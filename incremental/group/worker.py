"""One task at work in a capture: feed, sorter and sink of its sub-span, under the capture's lease."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from formats.keys import KeyCodec
from incremental.feed import FeedOptions
from incremental.group.checkpoints import TaskCheckpoints
from incremental.group.model import ChangefeedInfo, GroupState, Task
from incremental.group.store import GroupStore
from incremental.pipeline import PipelineOptions, Source, pipeline
from incremental.replicate import ReplicateOptions, Replicator
from incremental.sinks.open import Origin, SinkOptions, open_sink
from incremental.sinks.url import check_shared, parse
from incremental.span import Span
from incremental.watch.named import NamedStatus
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.etcd_lease import LeaseHolder
from tikv_br.cluster.etcd_values import Compare
from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import EtcdLeaseExpired, SyncFenced, TikvBrError


@dataclass(frozen=True, slots=True)
class Membership:
    """What a capture works with while it is a member of the group."""

    id: str
    """Of the capture."""
    store: GroupStore
    source: Cluster
    lease: LeaseHolder
    present: Compare
    """Its key is there, as it was made."""
    scratch: Path
    sink_tls: TlsFiles
    write_timeout: float
    """Seconds that a request to a sink may take, and that one may go on arriving after the end of the lease."""


class LeaseGuard:
    """In the place of a safe point, which is the owner's business: says whether we may go on."""

    def __init__(self, lease: LeaseHolder) -> None:
        self._lease = lease

    def check(self) -> None:
        """Raise `EtcdLeaseExpired` once others may have taken over."""
        self._lease.check()

    def advance(self, safe_point: int) -> None:
        """Nothing: the owner reads the checkpoint from etcd."""


class Worker:
    """Follows one sub-span in a thread of its own, until it is told to stop or fails."""

    def __init__(self, membership: Membership, state: GroupState, task: Task, before: Worker | None = None) -> None:
        """`state` is where the task was found to be ours; `before` is an earlier try, with whose troubles ours count on."""
        self.task = task
        self.changefeed: ChangefeedInfo = state.changefeeds[task.changefeed]
        self.replicator: Replicator | None = None
        """Once it runs."""
        self.checkpoints = TaskCheckpoints(
            membership.store,
            task,
            self.changefeed.start_ts,
            present=membership.present,
            assigned=state.unchanged(membership.store.keys.task(task.id)),
        )
        if before is not None:
            self.checkpoints.moved_at = before.checkpoints.moved_at
        self._membership = membership
        self._stop = threading.Event()
        self._future: Future[None] | None = None
        self._ended_at = 0.0

    def start(self, pool: Executor) -> None:
        """Begin."""
        self._future = pool.submit(self._run)

    def stop(self) -> None:
        """Have it save its checkpoint and end, between two batches."""
        self._stop.set()

    @property
    def status(self) -> NamedStatus:
        """How it is doing; from any thread."""
        error, replicator = self.error, self.replicator
        told = "" if error is None else error.message
        return NamedStatus(str(self.task.id), None if replicator is None else replicator.status(), told)

    @property
    def ended(self) -> bool:
        """Whether its thread has ended."""
        return self._future is not None and self._future.done()

    @property
    def settled(self) -> bool:
        """Whether it has ended, and nothing that it has sent can still arrive.

        A write that was given up may be under way for as long as requests may take.
        """
        if not self.ended:
            return False
        unanswered = None if self.replicator is None else self.replicator.unanswered_at
        since = max(self._ended_at if self.error is not None else 0.0, unanswered or 0.0)
        return not since or time.monotonic() >= since + self._membership.write_timeout

    @property
    def error(self) -> TikvBrError | None:
        """What ended it, if it has ended; a defect is raised as it is."""
        error = self._future.exception() if self._future is not None and self._future.done() else None
        if error is None or isinstance(error, TikvBrError):
            return error
        raise error

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by what another try does not cure, or has not cured for too long."""
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
        begun = self.checkpoints.load()
        codec = KeyCodec(membership.source.api_version, changefeed.keyspace_id)
        source = Source(membership.source, codec, Span(self.task.start, self.task.end))
        options = PipelineOptions(
            scratch=membership.scratch,
            sorter_bytes=changefeed.sorter_bytes,
            feed=FeedOptions(hold_back=changefeed.hold_back_ms / 1000),
            replicate=ReplicateOptions(
                patience=changefeed.patience_ms / 1000, longest_wait=changefeed.backoff_ms / 1000
            ),
        )
        target = parse(changefeed.sink)
        check_shared(target)
        with open_sink(target, self._origin(), self._sink_options()) as sink:
            changefeed.check_place(sink.place)
            with pipeline(
                source,
                begun,
                options,
                sink=sink,
                checkpoints=self.checkpoints,
                safe_point=LeaseGuard(membership.lease),
                stop=self._stop,
            ) as replicator:
                self.replicator = replicator
                self.checkpoints.status = replicator.status
                replicator.run()

    def _origin(self) -> Origin:
        return Origin(self._membership.source.cluster_id, self.changefeed.keyspace_id)

    def _sink_options(self) -> SinkOptions:
        return SinkOptions(
            tls=self._membership.sink_tls,
            drop_ttls=self.changefeed.drop_ttls,
            concurrency=self.changefeed.concurrency,
            batch_rows=self.changefeed.batch_rows,
            request_timeout=self._membership.write_timeout,
            fence=self._membership.lease.check,
        )
