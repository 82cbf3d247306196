"""The loop of a sync: feed, sorter, sink, checkpoint, safe point. Nothing is confirmed before it is at the sink."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from formats import columns
from incremental.checkpoint import Checkpoint, CheckpointStore
from incremental.feed.outputs import Resolved, Rows
from incremental.feed.status import FeedStatus
from incremental.sinks.base import Sink
from incremental.sorter import Sorter
from tikv_br.cluster.timestamp import physical_ms
from tikv_br.errors import (
    ClusterTlsError,
    ClusterUnreachable,
    RetryBudgetExhausted,
    StorageUnreachable,
    SyncFenced,
    TikvBrError,
)

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

RATE_SECONDS = 10.0
"""Over which events a second are counted."""


class SafePoint(Protocol):
    """What is needed of `SafePointKeeper`."""

    def check(self) -> None:
        """Raise `SafePointError` once it is lost."""

    def advance(self, safe_point: int) -> None:
        """Guard only what is newer."""


SAVE_AGAIN = 1.0
"""Seconds between two tries to save, on top of the storage's own."""


@dataclass(frozen=True, slots=True)
class ReplicateOptions:
    """All times are in seconds."""

    save_every: float = 1.0
    """How often the checkpoint is saved: so much is written again after a kill."""
    patience: float = 600.0
    """How long the sink may fail in a row before the sync ends."""
    state_patience: float = 60.0
    """How long the storage of the checkpoint may be silent."""
    longest_wait: float = 5.0
    """Between two tries at a sink that does not answer, on top of its own retries; the first waits are shorter."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """How a sync is doing. Lags are in seconds, by this machine's clock."""

    checkpoint_ts: int
    """Up to which all is at the sink."""
    resolved_ts: int
    """Up to which all is known of."""
    checkpoint_lag: float
    resolved_lag: float
    events: int
    """Rows that the feed told, some of them twice."""
    written: int
    """Rows that the sink has confirmed: of a key's changes in a batch only the last."""
    events_per_second: float
    sorter_memory_bytes: int
    sorter_disk_bytes: int
    late_rows: int
    sink_failures: int
    """How often the sink gave up on a batch, which was then tried again."""
    sink_failing_seconds: float
    """For how long it has taken nothing, 0 while it takes what there is: what failed first is tried again until it is there."""
    last_error: str
    feed: FeedStatus
    """Regions, stores and errors of the source's feed."""


class Rate:
    """Events a second over the last while."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque([(clock(), 0)])

    def note(self, total: int) -> None:
        """Tell how many there have been until now."""
        now = self._clock()
        self._counts.append((now, total))
        while len(self._counts) > 2 and self._counts[1][0] < now - self._seconds:
            self._counts.popleft()

    def value(self, total: int) -> float:
        """What it is now."""
        now = self._clock()
        counts = self._counts.copy()
        before = [count for at, count in counts if at <= now - self._seconds]
        if before:
            return (total - before[-1]) / self._seconds
        since, count = counts[0]
        return (total - count) / (now - since) if now > since else 0.0


class Replicator:
    """Runs one sync in the thread that calls `run`; `stop` and `status` may be called from any other."""

    def __init__(
        self,
        begun: Checkpoint,
        *,
        feed: Iterable[Rows | Resolved],
        sorter: Sorter,
        sink: Sink,
        checkpoints: CheckpointStore,
        safe_point: SafePoint,
        options: ReplicateOptions | None = None,
        stop: threading.Event | None = None,
        feed_status: Callable[[], FeedStatus] = FeedStatus,
    ) -> None:
        """`begun` says where the feed begins; `checkpoints` are ours (claimed). Setting `stop` is as good as `stop()`."""
        self._begun = begun
        self._feed = feed
        self._sorter = sorter
        self._sink = sink
        self._checkpoints = checkpoints
        self._safe_point = safe_point
        self._options = options or ReplicateOptions()
        self._stop = stop or threading.Event()
        self._feed_status = feed_status
        self._checkpoint_ts = self._saved_ts = begun.checkpoint_ts
        self._resolved_ts = begun.checkpoint_ts
        self._saved_at = time.monotonic()
        self._events = self._written = self._sink_failures = 0
        self._failing_since: float | None = None
        self._last_error = ""
        self.unanswered_at: float | None = None
        """When a write was last given up, on the monotonic clock: it may arrive for as long as its request may take."""
        self._rate = Rate(RATE_SECONDS)

    def run(self) -> None:
        """Replicate until `stop`, or until the feed ends; then the checkpoint is saved, also after an error.

        Raises `SafePointError`, `SyncFenced`, and what feed, sorter, sink and the checkpoints' storage raise.
        """
        try:
            for event in self._feed:
                match event:
                    case Rows():
                        self._take_in(event.batch)
                    case Resolved():
                        self._resolve(event.ts)
                if self._stop.is_set():
                    break
        except SyncFenced:
            raise
        except Exception:
            self._save_what_can_be()
            raise
        self._save(self._options.state_patience)

    def stop(self) -> None:
        """Have `run` end at the next event, or between two batches."""
        self._stop.set()

    def status(self) -> SyncStatus:
        """How it is going."""
        now_ms, failing_since = time.time() * 1000, self._failing_since
        return SyncStatus(
            checkpoint_ts=self._checkpoint_ts,
            resolved_ts=self._resolved_ts,
            checkpoint_lag=(now_ms - physical_ms(self._checkpoint_ts)) / 1000,
            resolved_lag=(now_ms - physical_ms(self._resolved_ts)) / 1000,
            events=self._events,
            written=self._written,
            events_per_second=self._rate.value(self._events),
            sorter_memory_bytes=self._sorter.memory_bytes,
            sorter_disk_bytes=self._sorter.disk_bytes,
            late_rows=self._sorter.late_rows,
            sink_failures=self._sink_failures,
            sink_failing_seconds=0.0 if failing_since is None else time.monotonic() - failing_since,
            last_error=self._last_error,
            feed=self._feed_status(),
        )

    def _take_in(self, batch: pa.RecordBatch) -> None:
        self._sorter.add(batch)
        self._events += batch.num_rows
        self._rate.note(self._events)

    def _resolve(self, ts: int) -> None:
        """Bring all up to a ts to the sink."""
        self._safe_point.check()
        self._resolved_ts = max(self._resolved_ts, ts)
        for batch in self._sorter.take(ts):
            if self._stop.is_set() or not self._write(batch):
                return
            self._written += batch.num_rows
            self._confirm(int(columns.numbers(batch["ts"])[-1]))
        self._confirm(ts)

    def _confirm(self, ts: int) -> None:
        """All up to this ts is at the sink: a batch holds all rows of its last ts."""
        self._checkpoint_ts = max(self._checkpoint_ts, ts)
        if time.monotonic() - self._saved_at >= self._options.save_every:
            self._save(self._options.state_patience)

    def _write(self, batch: pa.RecordBatch) -> bool:
        """Write, as often as it takes; False when told to stop before it was there."""
        tries, began = 0, time.monotonic()
        while True:
            try:
                self._sink.write(batch)
            except TikvBrError as error:
                self.unanswered_at = time.monotonic()
                if not isinstance(error, ClusterUnreachable | ClusterTlsError | RetryBudgetExhausted):
                    raise
                if self._stop.is_set():
                    return False
                self._sink_failures += 1
                self._last_error = error.message
                log.warning("the sink does not take changes: %s", error.message)
                if self._failing_since is None:
                    self._failing_since = began  # the sink's own tries have taken a while
                elif time.monotonic() - self._failing_since > self._options.patience:
                    raise
            else:
                self._failing_since = None
                return True
            self._safe_point.check()
            tries += 1
            if self._stop.wait(min(0.1 * 2 ** min(tries, 20), self._options.longest_wait)):
                return False

    def _save(self, patience: float) -> None:
        """Save the checkpoint, then let GC follow. See `_keep`."""
        self._saved_at = time.monotonic()
        if self._checkpoint_ts == self._saved_ts:
            return
        self._keep(
            Checkpoint(
                changefeed_id=self._begun.changefeed_id,
                checkpoint_ts=self._checkpoint_ts,
                resolved_ts=self._resolved_ts,
                epoch=self._begun.epoch,
                saved_ms=time.time_ns() // 1_000_000,
                subject=self._begun.subject,
            ),
            patience,
        )
        self._saved_ts = self._checkpoint_ts
        self._safe_point.advance(self._checkpoint_ts - 1)

    def _keep(self, checkpoint: Checkpoint, patience: float) -> None:
        """Save it; where the storage does not answer as often as it takes for so many seconds, unless told to stop.

        Nothing is written meanwhile: whoever cannot save cannot know whether another has taken over.
        """
        until = time.monotonic() + patience
        while True:
            try:
                return self._checkpoints.save(checkpoint)
            except StorageUnreachable as error:
                if self._stop.is_set() or time.monotonic() >= until:
                    raise
                log.warning("the checkpoint cannot be saved, and the sync waits for that: %s", error.message)
            self._safe_point.check()
            self._stop.wait(SAVE_AGAIN)

    def _save_what_can_be(self) -> None:
        """After an error: what was confirmed counts, but the error that led here is the one to tell."""
        try:
            self._save(0.0)
        except TikvBrError as error:
            log.warning("the checkpoint was not saved: %s", error.message)
