"""``sync --mode diff`` as those see it who look on at syncs: a pass moves its checkpoint to when it began."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from incremental.diff_mode import Pass
from incremental.feed.status import FeedStatus
from incremental.replicate import SyncStatus
from incremental.watch.named import NamedStatus
from tikv_br.cluster.timestamp import compose
from tikv_br.errors import TikvBrError


class Passes:
    """The passes of one sync, told by the thread that runs them and looked at from any."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` says the seconds since the epoch."""
        self._name, self._clock = name, clock
        self._state: tuple[Pass, int] | None = None
        """The last pass, and how many rows all of them have changed."""
        self._failures, self._last_error = 0, ""
        self._failing_since: float | None = None

    def note(self, done: Pass) -> None:
        """A pass has ended."""
        before = self._state[1] if self._state is not None else 0
        self._state = done, before + done.puts + done.deletes
        self._failing_since = None

    def note_failure(self, error: TikvBrError) -> None:
        """A pass was broken off, and is to be tried again."""
        self._failures, self._last_error = self._failures + 1, error.message
        if self._failing_since is None:
            self._failing_since = self._clock()

    def __call__(self) -> Sequence[NamedStatus]:
        """How it is doing: no figures before the first pass has ended."""
        failing = 0.0 if self._failing_since is None else self._clock() - self._failing_since
        if self._state is None:
            why = f", broken off again and again for {failing:.0f} s: {self._last_error}" if failing else ""
            return [NamedStatus(self._name, None, f"the first pass has not ended yet{why}")]
        done, rows = self._state
        ts, lag = compose(done.began_ms), self._clock() - done.began_ms / 1000
        status = SyncStatus(
            checkpoint_ts=ts,
            resolved_ts=ts,
            checkpoint_lag=lag,
            resolved_lag=lag,
            events=rows,
            written=rows,
            events_per_second=(done.puts + done.deletes) / done.seconds if done.seconds else 0.0,
            sorter_memory_bytes=0,
            sorter_disk_bytes=0,
            late_rows=0,
            sink_failures=self._failures,
            sink_failing_seconds=failing,
            last_error=self._last_error,
            feed=FeedStatus(resolved_ts=ts, regions=done.ranges, rows=rows),
        )
        return [NamedStatus(self._name, status)]
