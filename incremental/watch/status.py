"""The statuses of all syncs of a process, and when one is unhealthy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tikv_br.cluster.safepoint import SILENCE_SECONDS, describe_silence
from tikv_br.cluster.timestamps import compose
from tikv_br.errors import TikvBrError
from tikv_br.incremental.diff_mode import Pass
from tikv_br.incremental.feed.events import FeedStatus
from tikv_br.incremental.pipeline import Replicator
from tikv_br.incremental.status import SyncStatus
from tikv_br.redaction import redact
from tikv_br.retry import Patience


@dataclass(frozen=True, slots=True)
class NamedStatus:
    """State of one sync of this process."""

    name: str
    status: SyncStatus | None
    """None until it has started."""
    error: str = ""
    """Error that stopped it."""
    waiting: str = ""
    """Event that it waits for before it can start."""
    source: str = ""
    """PD of the cluster that it follows."""
    sink: str = ""
    """The address of the sink, without credentials."""

    def problem(self, max_lag: float) -> str:
        """Return why it is unhealthy, in one line; empty if it runs, writes, and is at most `max_lag` seconds late."""
        if self.status is None or self.error:
            return self.idle
        if self.status.sink_failing_seconds or self.status.missed:
            return next(current_problems(self.status))
        lag, feed = self.status.checkpoint_lag, self.status.feed.problem
        if lag <= max_lag:
            return ""
        reasons = [each for each in (feed, _limit(self.status)) if each]
        return f"{lag:.0f} s behind, which is more than {max_lag:g} s" + (f": {'; '.join(reasons)}" if reasons else "")

    @property
    def degraded(self) -> str:
        """Return why it may soon become unhealthy, in one line: gaps, a silent store or PD. Empty if nothing."""
        if self.status is None:
            return ""
        return "; ".join([*self.status.feed.gaps, *_source_problems(self.status)])

    @property
    def idle(self) -> str:
        """Return why it does not run, in one line; for a sync without a status or with an error."""
        return self.error or self.waiting or "has not started yet"

    def redacted(self) -> NamedStatus:
        status = self.status
        if status is not None:
            feed = replace(status.feed, last_error=redact(status.feed.last_error))
            status = replace(status, last_error=redact(status.last_error), feed=feed)
        return replace(
            self, status=status, error=redact(self.error), waiting=redact(self.waiting), sink=redact(self.sink)
        )


def current_problems(status: SyncStatus) -> Iterator[str]:
    """Current problems, first the sink's, and the number of earlier failures of the sink."""
    if status.sink_failing_seconds:
        yield f"the sink has accepted no writes for {status.sink_failing_seconds:.0f} s: {status.last_error}"
    if status.missed:
        yield f"degraded: the sink lacks rows that no change feed delivers: {'; '.join(status.missed)}"
    if status.sink_failures and not status.sink_failing_seconds:
        yield f"the sink has failed {status.sink_failures:,} times so far"
    if limited := _limit(status):
        yield limited
    yield from _source_problems(status)


def _limit(status: SyncStatus) -> str:
    """Return a reason if the rate limit delays the sync; else empty."""
    if status.sink_limited_share < LIMITED_SHARE:
        return ""
    rate = status.sink_rate_limit / (1 << 20)
    return f"writes wait for --sink-ratelimit ({rate:.3g} MiB/s), so the lag may grow"


def _source_problems(status: SyncStatus) -> Iterator[str]:
    if status.feed.problem:
        yield status.feed.problem
    if status.pd_silent_seconds >= SILENCE_SECONDS:
        yield describe_silence(status.pd_silent_seconds)


LIMITED_SHARE = 0.1
"""Share of time spent waiting from which the rate limit is named as a reason for the lag."""
StatusSource = Callable[[], Sequence[NamedStatus]]
"""Returns the current statuses of all syncs of a process. Called from any thread; must not raise."""


class FeedTracker:
    """The status of one sync that follows a feed."""

    def __init__(self, name: str, source: str = "", sink: str = "") -> None:
        """`source`, `sink`: see `NamedStatus`."""
        self._plain = NamedStatus(name, None, source=source, sink=sink)
        self._replicator: Replicator | None = None
        self._waiting = ""

    def wait(self, why: str) -> None:
        """Note what the sync waits for before it can begin; empty: it goes on."""
        self._waiting = why

    def begin(self, replicator: Replicator) -> None:
        self._plain = replace(self._plain, name=replicator.changefeed_id)
        self._replicator = replicator

    @property
    def has_begun(self) -> bool:
        return self._replicator is not None

    def __call__(self) -> Sequence[NamedStatus]:
        if self._replicator is not None:
            return [replace(self._plain, status=self._replicator.status())]
        return [replace(self._plain, waiting=self._waiting)]


class PassTracker:
    """The status of one sync that runs in passes. Written by the thread that runs them, read from any."""

    def __init__(
        self, name: str, source: str = "", sink: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`source`, `sink`: see `NamedStatus`."""
        self._plain, self._clock = NamedStatus(name, None, source=source, sink=sink), clock
        self._state: tuple[Pass, int, float] | None = None
        """The last pass, the number of rows changed by all passes, and when the last one began."""
        self._failure_count, self._last_error = 0, ""
        self._failures = Patience(clock=clock)

    def record(self, done: Pass) -> None:
        before = self._state[1] if self._state is not None else 0
        self._state = done, before + done.puts + done.deletes, self._clock() - done.seconds
        self._failures.end()

    def record_failure(self, error: TikvBrError) -> None:
        self._failure_count, self._last_error = self._failure_count + 1, error.message
        self._failures.begin()

    def __call__(self) -> Sequence[NamedStatus]:
        """The current status, as a `StatusSource`: without figures until the first pass has finished."""
        failing = self._failures.failing_seconds
        if self._state is None:
            why = f", failing for {failing:.0f} s: {self._last_error}" if failing else ""
            return [replace(self._plain, error=f"the first pass has not finished yet{why}")]
        done, rows, began = self._state
        ts, lag = compose(done.began_ms), self._clock() - began
        status = SyncStatus(
            checkpoint_ts=ts,
            resolved_ts=ts,
            checkpoint_lag=lag,
            resolved_lag=lag,
            events=rows,
            written=rows,
            events_per_second=(done.puts + done.deletes) / done.seconds if done.seconds else 0.0,
            sink_failures=self._failure_count,
            sink_failing_seconds=failing,
            last_error=self._last_error,
            feed=FeedStatus(resolved_ts=ts, regions=done.ranges, rows=rows),
        )
        return [replace(self._plain, status=status)]
