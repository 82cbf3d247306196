"""The loop of a sync: feed, sorter, sink, checkpoint, safe point. The checkpoint advances only after the sink has confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.timestamps import physical_ms, show_ts
from tikv_br.cluster.topology import DEFAULT_TIMESTAMP_AGE
from tikv_br.errors import (
    ClusterTlsError,
    ClusterUnreachable,
    KafkaUnreachable,
    RetryBudgetExhausted,
    StorageUnreachable,
    SyncFenced,
    TikvBrError,
)
from tikv_br.formats import columns
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.feed.events import Event, Missed, Resolved, Rows, Scanned
from tikv_br.incremental.feed.feed import Feed, FeedOptions
from tikv_br.incremental.feed.status import FeedStatus
from tikv_br.incremental.rates import Rate, WriteLag
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sorter import Sorter
from tikv_br.patience import Patience
from tikv_br.retry import Backoff
from tikv_br.tasks.task import keep_freed_memory

if TYPE_CHECKING:
    import pyarrow as pa


log = logging.getLogger(__name__)

RATE_SECONDS = 10.0
"""The window for events per second and write lag."""
PORTION_SECONDS = 0.25
"""Seconds that the changes of one write take at the rate limit."""
SINK = 0
"""Key of `RateLimit`: there is one sink."""


SAVE_RETRY_SECONDS = 1.0
"""Seconds between two attempts to save, in addition to the storage's own retries."""


class SafePoint(Protocol):
    """The methods of `SafePointKeeper` that the loop uses."""

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the source's PD stopped answering; 0 while it answers."""
        return 0.0

    def check(self) -> None:
        """Raise `SafePointError` if the safe point is lost."""

    def advance(self, safe_point: int) -> None:  # noqa: ARG002 - for processes that have one
        """Move the safe point forward."""
        return


@dataclass(frozen=True)
class NoSafePoint(SafePoint):
    """For a process whose safe point another one keeps, or that needs none."""

    check_membership: Callable[[], object]
    """Raises if another process may have taken over."""

    def check(self) -> None:
        """Check the membership instead."""
        self.check_membership()


@dataclass(frozen=True, slots=True)
class ReplicateOptions:
    """All times are in seconds."""

    save_every: float = 1.0
    """Interval of saving the checkpoint, in seconds; later changes are written again after a kill."""
    patience: float = 600.0
    """Seconds for which the sink may fail continuously before the sync fails."""
    state_patience: float = 60.0
    """Seconds for which the storage of the checkpoint may be unreachable before the sync fails."""
    longest_wait: float = 5.0
    """Maximum wait between retries of a failing sink (exponential backoff), in addition to the sink's own retries."""
    rate_limit: int = 0
    """Maximum bytes of keys and values per second that the sink is given; 0 = unlimited. A batch that is retried counts once."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The status of a sync. Lags are in seconds, by this machine's clock."""

    checkpoint_ts: int
    """The sink has confirmed all changes up to this."""
    resolved_ts: int
    """The feed has delivered all changes up to this."""
    checkpoint_lag: float
    resolved_lag: float
    write_lag: float | None = None
    """Estimated time that a write takes from the source to the sink (`WriteLag`); None while there are no writes."""
    events: int = 0
    """Rows received from the feed, including duplicates."""
    written: int = 0
    """Rows that the sink has confirmed; of several changes of a key in a batch, only the last is written."""
    events_per_second: float = 0.0
    sorter_memory_bytes: int = 0
    sorter_disk_bytes: int = 0
    late_rows: int = 0
    sink_failures: int = 0
    """Number of batches that the sink failed and that were retried."""
    sink_failing_seconds: float = 0.0
    """Seconds since the sink stopped accepting writes; 0 while it accepts them.

    A failed batch is retried until it succeeds.
    """
    sink_rate_limit: int = 0
    """Value of `ReplicateOptions.rate_limit`."""
    sink_limited_share: float = 0.0
    """Part of the last `RATE_SECONDS` in which changes waited for the rate limit, 0 to 1."""
    last_error: str = ""
    pd_silent_seconds: float = 0.0
    """Seconds since the source's PD stopped answering; 0 while it answers."""
    feed: FeedStatus = field(default_factory=FeedStatus)
    missed: tuple[str, ...] = ()
    """Ingests into the source whose rows the sink lacks, as they keep older timestamps; also of earlier runs."""


RETRYABLE = (ClusterUnreachable, ClusterTlsError, RetryBudgetExhausted, StorageUnreachable, KafkaUnreachable)
"""Errors of a sink that does not answer."""
T = TypeVar("T")


class _Stopped(Exception):
    """`Replicator.stop` was called while the sink failed, or while changes waited for the rate limit."""


class Replicator:
    """Runs one sync in the thread that calls `run`; `stop` and `status` are thread-safe."""

    def __init__(
        self,
        start: Checkpoint,
        *,
        feed: Iterable[Event],
        sorter: Sorter,
        sink: Sink,
        checkpoints: CheckpointStore,
        safe_point: SafePoint,
        options: ReplicateOptions | None = None,
        stop: threading.Event | None = None,
        feed_status: Callable[[], FeedStatus] = FeedStatus,
        timestamp_age: float = DEFAULT_TIMESTAMP_AGE,
    ) -> None:
        """`start` is where the feed starts; `checkpoints` must be claimed. Setting the event `stop` has the effect of `stop()`."""
        self.changefeed_id = start.changefeed_id
        self._start = start
        self._feed = feed
        self._sorter = sorter
        self._sink = sink
        self._checkpoints = checkpoints
        self._safe_point = safe_point
        self._options = options or ReplicateOptions()
        self._stop = stop or threading.Event()
        self._feed_status = feed_status
        self._checkpoint_ts = self._saved_ts = start.checkpoint_ts
        self._resolved_ts = start.checkpoint_ts
        self._complete_ts = start.checkpoint_ts
        """The sink was given all changes up to this."""
        self._saved_at = time.monotonic()
        self._events = self._written = self._sink_failures = 0
        self._failures = Patience(
            self._options.patience, "--sink-patience", f"the sink, {sink.place}, accepts no writes"
        )
        self._last_error = ""
        self._missed = start.missed
        self.unanswered_at: float | None = None
        """Time at which a write last failed, on the monotonic clock. That write may still reach the sink until its request times out."""
        self._rate = Rate(RATE_SECONDS)
        self._limit = RateLimit(self._options.rate_limit, sleep=self._wait_for_limit)
        self._limited_seconds = 0.0
        self._limited = Rate(RATE_SECONDS)
        self._write_lag = WriteLag(RATE_SECONDS, timestamp_age=timestamp_age)

    def run(self) -> None:
        """Replicate until `stop`, or until the feed ends; then save the checkpoint, also after an error.

        Raises `SafePointError`, `SyncFenced`, and the errors of feed, sorter, sink and checkpoint storage.
        """
        try:
            with suppress(_Stopped):
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
            self._flush()
        except SyncFenced:
            raise
        except Exception:
            try:
                self._save(0.0)  # what the sink has confirmed; the error that led here is the one to raise
            except TikvBrError as error:
                log.warning("the checkpoint was not saved: %s", error.message)
            raise
        self._save(self._options.state_patience)

    def stop(self) -> None:
        """Make `run` return at the next event, or between two batches."""
        self._stop.set()

    def status(self) -> SyncStatus:
        """The current status."""
        now_ms = time.time() * 1000
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
            sink_failures=self._sink_failures,
            sink_failing_seconds=self._failures.failing_seconds,
            sink_rate_limit=self._options.rate_limit,
            sink_limited_share=min(self._limited.value(self._limited_seconds), 1.0),
            last_error=self._last_error,
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
        """Write all changes up to a ts to the sink."""
        self._safe_point.check()
        self._resolved_ts = max(self._resolved_ts, ts)
        for batch in self._sorter.take(ts):
            for part in self._rate_limited(batch):
                if self._stop.is_set():
                    return
                self._retry(partial(self._sink.write, part))
            self._written += batch.num_rows
            self._confirm(int(columns.numbers(batch["ts"])[-1]))
        self._confirm(ts)

    def _rate_limited(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows in portions, each when the rate limit allows it; all at once without a limit."""
        if not self._limit:
            yield batch
            return
        ends = np.concatenate(([0], np.cumsum(columns.row_sizes(batch))))
        done = 0
        while done < batch.num_rows:
            most = ends[done] + PORTION_SECONDS * self._options.rate_limit
            stop = max(int(np.searchsorted(ends, most, "right")) - 1, done + 1)
            self._limit.spend(SINK, int(ends[stop] - ends[done]))
            yield batch.slice(done, stop - done)
            done = stop

    def _wait_for_limit(self, seconds: float) -> None:
        """Wait until the rate limit allows the next write. Raises `_Stopped`, and `SafePointError`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._safe_point.check()
            began = time.monotonic()
            stopped = self._stop.wait(min(left, 1.0))
            self._limited_seconds += time.monotonic() - began
            self._limited.record(self._limited_seconds)
            if stopped:
                raise _Stopped

    def _confirm(self, ts: int) -> None:
        """Inform the sink that it has all changes up to this ts; advance the checkpoint to what it has made durable.

        This is called after each batch, since a batch has all rows of its last ts.
        """
        self._complete_ts = max(self._complete_ts, ts)
        durable_ts = self._retry(partial(self._sink.resolve, self._complete_ts))
        self._checkpoint_ts = max(self._checkpoint_ts, durable_ts)
        self._write_lag.record_confirmed(durable_ts)
        if time.monotonic() - self._saved_at >= self._options.save_every:
            self._save(self._options.state_patience)

    def _flush(self) -> None:
        """Make the sink durable at the end. If it does not answer, the next run writes the rest again."""
        try:
            durable_ts = self._sink.resolve(self._complete_ts, flush=True)
        except RETRYABLE as error:
            log.warning("cannot write the last changes to the sink, the next run will: %s", error.message)
        else:
            self._checkpoint_ts = max(self._checkpoint_ts, durable_ts)

    def _retry(self, call: Callable[[], T]) -> T:
        """Call the sink, with retries. Raises `_Stopped` if stopped before it succeeded."""
        tries, began = 0, time.monotonic()
        while True:
            try:
                result = call()
            except TikvBrError as error:
                self.unanswered_at = time.monotonic()
                if not isinstance(error, RETRYABLE):
                    raise
                if self._stop.is_set():
                    raise _Stopped from None
                self._sink_failures += 1
                self._last_error = error.message
                log.warning("cannot write to the sink, retrying: %s", error.message)
                self._failures.fail(error, began)  # not from now: the sink's own retries have taken a while
            else:
                self._failures.end()
                return result
            self._safe_point.check()
            tries += 1
            if self._stop.wait(Backoff("sink", 0.1, self._options.longest_wait).delay(tries, 0.0)):
                raise _Stopped

    def _save(self, patience: float) -> None:
        """Save the checkpoint, then advance the safe point to it. See `_save_with_retries` for `patience`."""
        self._saved_at = time.monotonic()
        if self._checkpoint_ts == self._saved_ts:
            return
        self._save_with_retries(
            replace(
                self._start,
                checkpoint_ts=self._checkpoint_ts,
                resolved_ts=self._resolved_ts,
                saved_ms=time.time_ns() // 1_000_000,
                missed=self._missed,
            ),
            patience,
        )
        self._saved_ts = self._checkpoint_ts
        self._safe_point.advance(self._checkpoint_ts - 1)

    def _save_with_retries(self, checkpoint: Checkpoint, patience: float) -> None:
        """Retry for `patience` seconds while the storage is unreachable, unless stopped.

        Nothing is written to the sink in the meantime: if this process cannot save, another may have taken over.
        """
        until = time.monotonic() + patience
        while True:
            try:
                return self._checkpoints.save(checkpoint)
            except StorageUnreachable as error:
                if self._stop.is_set() or time.monotonic() >= until:
                    raise
                log.warning("cannot save the checkpoint, the sync waits: %s", error.message)
            self._safe_point.check()
            self._stop.wait(SAVE_RETRY_SECONDS)


POLL_SECONDS = 0.5
"""Interval at which an idle sync checks for a stop."""
SORTER_BYTES = 256 << 20


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
    span: KeyRange,
    start: Checkpoint,
    options: PipelineOptions,
    *,
    sink: Sink,
    checkpoints: CheckpointStore,
    safe_point: SafePoint,
    stop: threading.Event,
) -> Iterator[Replicator]:
    """A replicator of a range (RPC keys), ready to `run` from a checkpoint. Feed and sorter are closed at the end of the block, the sink is not."""
    keep_freed_memory()
    with (
        Sorter(options.sorter_bytes, options.scratch, all_versions=sink.all_versions) as sorter,
        Feed(cluster, codec, span, start.checkpoint_ts, options.feed, ingests=cluster.watched_ingests) as feed,
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
        )


def _events(feed: Feed, safe_point: SafePoint, stop: threading.Event) -> Iterator[Event]:
    """The feed's events until `stop`; a lost safe point raises also while the feed is idle."""
    while not stop.is_set():
        safe_point.check()
        event = feed.poll(POLL_SECONDS)
        if event is not None:
            yield event
