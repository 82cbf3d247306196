"""The loop of a sync: feed, sorter, sink, checkpoint, safe point. The checkpoint advances only after the sink has confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.timestamps import physical_ms, show_ts
from tikv_br.cluster.topology import DEFAULT_TIMESTAMP_AGE
from tikv_br.errors import StorageUnreachable, SyncFenced, TikvBrError
from tikv_br.formats import columns
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.feed.events import Event, FeedOptions, FeedStatus, Missed, Resolved, Rows, Scanned
from tikv_br.incremental.feed.feed import Feed, JoinedFeeds
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.writer import ReplicateOptions, SinkStopped, SinkWriter
from tikv_br.incremental.sorter import Sorter
from tikv_br.incremental.status import Rate, SyncStatus, WriteLag
from tikv_br.retry import Patience
from tikv_br.tasks.task import keep_freed_memory

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

SAVE_RETRY_SECONDS = 1.0
"""Seconds between two attempts to save, in addition to the storage's own retries."""
POLL_SECONDS = 0.5
"""Interval at which an idle sync checks for a stop."""
SORTER_BYTES = 256 << 20


class SafePoint(Protocol):
    """The methods of `SafePointKeeper` that the loop uses."""

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the source's PD stopped answering; 0 while it answers."""
        return 0.0

    def check(self) -> None:
        """Raise `SafePointError` if the safe point is lost."""

    def advance(self, safe_point: int) -> None:  # noqa: ARG002 - for processes that have one
        return


@dataclass(frozen=True)
class NoSafePoint(SafePoint):
    """For a process whose safe point another one keeps, or that needs none."""

    check_membership: Callable[[], object]
    """Raises if another process may have taken over."""

    def check(self) -> None:
        self.check_membership()


class Replicator:
    """Runs one sync in the thread that calls `run`; `status` is thread-safe."""

    def __init__(
        self,
        start: Checkpoint,
        *,
        feed: Iterable[Event],
        sorter: Sorter,
        sink: Sink,
        checkpoints: CheckpointStore,
        safe_point: SafePoint,
        options: ReplicateOptions,
        stop: threading.Event,
        feed_status: Callable[[], FeedStatus] = FeedStatus,
        timestamp_age: float = DEFAULT_TIMESTAMP_AGE,
        clock: Callable[[], float],
    ) -> None:
        """`start` is where the feed starts; `checkpoints` must be claimed. `clock` returns PD's time, in seconds since the epoch, for lags. `stop` ends `run` at the next event or between two batches."""
        self.changefeed_id = start.changefeed_id
        self._start, self._options, self._stop = start, options, stop
        self._feed, self._sorter, self._sink = feed, sorter, sink
        self._checkpoints, self._safe_point = checkpoints, safe_point
        self._feed_status = feed_status
        self._checkpoint_ts = self._saved_ts = self._resolved_ts = start.checkpoint_ts
        self._complete_ts = start.checkpoint_ts  # the sink was given all changes up to this
        self._missed, self._saved_at = start.missed, time.monotonic()
        self._events = self._written = 0
        self.writer = SinkWriter(sink, options, stop, safe_point.check)
        self._rate = Rate()
        self._write_lag, self._clock = WriteLag(timestamp_age, clock=clock), clock

    def run(self) -> None:
        """Replicate until `stop` is set, or until the feed ends; then save the checkpoint, also after an error.

        Raises `SafePointError`, `SyncFenced`, and the errors of feed, sorter, sink and checkpoint storage.
        """
        try:
            with suppress(SinkStopped):
                self._confirm(self._complete_ts)
                for event in self._feed:
                    match event:
                        case Rows():
                            self._add_rows(event.batch)
                        case Resolved():
                            self._resolve(event.ts)
                        case Scanned():
                            self._sink.mark_inexact(event)
                        case Missed():
                            self._mark_missed(event)
                    if self._stop.is_set():
                        break
            self._checkpoint_ts = max(self._checkpoint_ts, self.writer.flush(self._complete_ts))
        except SyncFenced:
            raise
        except Exception:
            try:
                self._save(retry=False)  # what the sink has confirmed; the error that led here is the one to raise
            except TikvBrError as error:
                log.warning("the checkpoint was not saved: %s", error.message)
            raise
        self._save()

    def status(self) -> SyncStatus:
        now_ms = self._clock() * 1000
        return SyncStatus(
            checkpoint_ts=self._checkpoint_ts,
            resolved_ts=self._resolved_ts,
            checkpoint_lag=(now_ms - physical_ms(self._checkpoint_ts)) / 1000,
            resolved_lag=(now_ms - physical_ms(self._resolved_ts)) / 1000,
            write_lag=self._write_lag.value(),
            events=self._events,
            written=self._written,
            events_per_second=self._rate.value(self._events),
            sorter_memory_bytes=self._sorter.memory_bytes,
            sorter_disk_bytes=self._sorter.disk_bytes,
            late_rows=self._sorter.late_rows,
            sink_failures=self.writer.failures,
            sink_failing_seconds=self.writer.failing_seconds,
            sink_rate_limit=self._options.rate_limit,
            sink_limited_share=self.writer.limited_share,
            last_error=self.writer.last_error,
            pd_silent_seconds=self._safe_point.silent_seconds,
            feed=self._feed_status(),
            missed=self._missed,
        )

    def _add_rows(self, batch: pa.RecordBatch) -> None:
        self._write_lag.record_arrival(int(columns.numbers(batch["ts"])[0]))
        self._sorter.add(batch)
        self._events += batch.num_rows
        self._rate.record(self._events)

    def _mark_missed(self, event: Missed) -> None:
        """Remember rows that the sink will lack; saved with the next checkpoint, which is not beyond them."""
        self._sink.mark_missed(event)
        text = f"{event.cause}, ended at {show_ts(event.to_ts, age=False)}"
        if text not in self._missed:
            self._missed = (*self._missed, text)
            log.error("rows that no change feed delivers: %s, ingested rows with their older timestamps", text)

    def _resolve(self, ts: int) -> None:
        self._safe_point.check()
        self._resolved_ts = max(self._resolved_ts, ts)
        for batch in self._sorter.take(ts):
            self.writer.write(batch)
            self._written += batch.num_rows
            self._confirm(int(columns.numbers(batch["ts"])[-1]))
        self._confirm(ts)

    def _confirm(self, ts: int) -> None:
        """Inform the sink that it has all changes up to this ts; advance the checkpoint to what it has made durable.

        After each batch, too: it has all rows of its last ts, so everything up to there is written.
        """
        self._complete_ts = max(self._complete_ts, ts)
        durable_ts = self.writer.resolve(self._complete_ts)
        self._checkpoint_ts = max(self._checkpoint_ts, durable_ts)
        self._write_lag.record_confirmed(durable_ts)
        if time.monotonic() - self._saved_at >= self._options.save_every:
            self._save()

    def _save(self, *, retry: bool = True) -> None:
        """Save the checkpoint, then advance the safe point to it. Retries while the storage is unreachable, unless stopped.

        Nothing is written to the sink in the meantime: if this process cannot save, another may have taken over.
        """
        began = self._saved_at = time.monotonic()
        if self._checkpoint_ts == self._saved_ts:
            return
        checkpoint = structs.replace(
            self._start,
            checkpoint_ts=self._checkpoint_ts,
            resolved_ts=self._resolved_ts,
            saved_ms=time.time_ns() // 1_000_000,
            missed=self._missed,
        )
        failures = Patience(self._options.state_patience, "a sync may wait for its state")
        while True:
            try:
                self._checkpoints.save(checkpoint)
                break
            except StorageUnreachable as error:
                if self._stop.is_set() or not retry:
                    raise
                failures.fail(error, began)
                log.warning("cannot save the checkpoint, the sync waits: %s", error.message)
            self._safe_point.check()
            self._stop.wait(SAVE_RETRY_SECONDS)
        self._saved_ts = self._checkpoint_ts
        self._safe_point.advance(self._checkpoint_ts - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of replicating one range."""

    scratch: Path
    """A local directory for changes that do not fit into memory."""
    sorter_bytes: int = SORTER_BYTES
    feed: FeedOptions = field(default_factory=FeedOptions)
    replicate: ReplicateOptions = field(default_factory=ReplicateOptions)


@contextmanager
def pipeline(
    cluster: Cluster,
    codec: KeyCodec,
    spans: Sequence[KeyRange],
    start: Checkpoint,
    options: PipelineOptions,
    *,
    sink: Sink,
    checkpoints: CheckpointStore,
    safe_point: SafePoint,
    stop: threading.Event,
) -> Iterator[Replicator]:
    """A replicator of a range (RPC keys), ready to `run` from a checkpoint. Feed and sorter are closed at the end of the block, the sink is not.

    Of several ranges, in order and of a keyspace each, the sink gets rows with RPC keys.
    """
    keep_freed_memory()
    with (
        Sorter(options.sorter_bytes, options.scratch, all_versions=sink.all_versions) as sorter,
        closing(
            Feed(cluster, codec, spans[0], start.checkpoint_ts, options.feed, ingests=cluster.watched_ingests)
            if len(spans) == 1
            else JoinedFeeds(cluster, spans, start.checkpoint_ts, options.feed, ingests=cluster.watched_ingests)
        ) as feed,
    ):
        yield Replicator(
            start,
            feed=_events(feed, safe_point, stop),
            sorter=sorter,
            sink=sink,
            checkpoints=checkpoints,
            safe_point=safe_point,
            options=options.replicate,
            stop=stop,
            feed_status=lambda: feed.status,
            timestamp_age=cluster.timestamp_age,
            clock=cluster.clock.shown,
        )


def _events(feed: Feed | JoinedFeeds, safe_point: SafePoint, stop: threading.Event) -> Iterator[Event]:
    """The feed's events until `stop`; a lost safe point raises also while the feed is idle."""
    while not stop.is_set():
        safe_point.check()
        event = feed.poll(POLL_SECONDS)
        if event is not None:
            yield event
