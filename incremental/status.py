"""The status of a sync, with rates and lags from samples of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.cluster.topology import DEFAULT_TIMESTAMP_AGE
from tikv_br.incremental.feed.events import FeedStatus

RATE_SECONDS = 10.0
"""The window of rates and lags."""
SAMPLE_SECONDS = 0.1
"""The interval in which one change is sampled for the write lag."""
MAX_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The status of a sync. Lags are in seconds, by the clock of the source's PD."""

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
    """Maximum bytes per second that the sink is given; 0 = unlimited."""
    sink_limited_share: float = 0.0
    """Part of the last `RATE_SECONDS` in which changes waited for the rate limit, 0 to 1."""
    last_error: str = ""
    pd_silent_seconds: float = 0.0
    """Seconds since the source's PD stopped answering; 0 while it answers."""
    feed: FeedStatus = field(default_factory=FeedStatus)
    missed: tuple[str, ...] = ()
    """Ingests into the source whose rows the sink lacks, as they keep older timestamps; also of earlier runs."""


class Rate:
    """Increase of a total per second, over the last `RATE_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[float, float]] = deque([(clock(), 0)])

    def record(self, total: float) -> None:
        now = self._clock()
        self._counts.append((now, total))
        while len(self._counts) > 2 and self._counts[1][0] < now - RATE_SECONDS:
            self._counts.popleft()

    def value(self, total: float) -> float:
        now = self._clock()
        counts = self._counts.copy()
        before = [count for at, count in counts if at <= now - RATE_SECONDS]
        if before:
            return (total - before[-1]) / RATE_SECONDS
        since, count = counts[0]
        return (total - count) / (now - since) if now > since else 0.0


class WriteLag:
    """Median time of writes from the source to the sink, estimated from a sample. `value` is thread-safe.

    The time of a write is known only from its timestamp, which is up to `timestamp_age` too old. So the estimate counts from the
    arrival of the change here, or from that much after its timestamp if that is earlier (then the change was delayed). The write
    was no later than that, so the estimate is never too high. It is too low by the delay from the store to here, at most that age.
    """

    def __init__(self, timestamp_age: float = DEFAULT_TIMESTAMP_AGE, *, clock: Callable[[], float]) -> None:
        """`clock` returns PD's time, in seconds since the epoch."""
        self._timestamp_age = timestamp_age
        self._clock = clock
        self._sampled_at = 0.0
        self._pending: list[tuple[int, float]] = []
        """Timestamp and start time of each sampled change."""
        self._confirmed: deque[tuple[float, float]] = deque()
        """Time of confirmation and lag of each sampled change."""

    def record_arrival(self, ts: int) -> None:
        """A change with this timestamp has arrived from the feed."""
        now = self._clock()
        if 0 <= now - self._sampled_at < SAMPLE_SECONDS:
            return
        self._sampled_at = now
        if len(self._pending) >= MAX_SAMPLES:
            del self._pending[1::2]
        self._pending.append((ts, min(now, physical_ms(ts) / 1000 + self._timestamp_age)))

    def record_confirmed(self, ts: int) -> None:
        """The sink has confirmed all changes up to this timestamp."""
        now = self._clock()
        done = [since for each, since in self._pending if each <= ts]
        if done:
            self._pending = [each for each in self._pending if each[0] > ts]
            self._confirmed.extend((now, now - since) for since in done)
        while self._confirmed and self._confirmed[0][0] <= now - RATE_SECONDS:
            self._confirmed.popleft()

    def value(self) -> float | None:
        """The median lag of the last `RATE_SECONDS`; if nothing was confirmed in it, the age of the oldest pending change."""
        now = self._clock()
        lags = [lag for at, lag in self._confirmed.copy() if at > now - RATE_SECONDS]
        if lags:
            return median(lags)
        pending = [since for _, since in self._pending.copy()]
        return now - min(pending) if pending else None
