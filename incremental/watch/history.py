"""The last minutes of every sync, for those who begin to look on only now."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from incremental.watch.named import Watched

if TYPE_CHECKING:
    from incremental.replicate import SyncStatus

INTERVAL = 1.0
"""Seconds between two points."""
POINTS = 900
JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Point:
    """One sync at one moment. Lags are in seconds; rates are of the time since the point before."""

    ms: int
    """Milliseconds since the epoch."""
    checkpoint_lag: float
    resolved_lag: float
    events_per_second: float
    written_per_second: float


class _Track:
    """The points of one sync, and what the next one is compared with."""

    def __init__(self, points: int) -> None:
        self.points: deque[Point] = deque(maxlen=points)
        self._before: tuple[float, SyncStatus] | None = None

    def add(self, now: float, ms: int, status: SyncStatus) -> None:
        """`now` counts seconds, evenly."""
        if self._before is not None:
            elapsed, old = now - self._before[0], self._before[1]
            # A sync that was started anew counts from 0.
            events = max(0, status.events - old.events) / elapsed
            written = max(0, status.written - old.written) / elapsed
            self.points.append(Point(ms, status.checkpoint_lag, status.resolved_lag, events, written))
        self._before = now, status


class History:
    """Looks at all syncs once an interval, in a thread of its own while it is entered."""

    def __init__(
        self,
        watched: Watched,
        *,
        interval: float = INTERVAL,
        points: int = POINTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched, self._interval, self._points, self._clock = watched, interval, points, clock
        self._tracks: dict[str, _Track] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    def look(self) -> None:
        """Add a point to every sync that runs, the first at the second look; syncs that are not there any more are forgotten."""
        now, ms, found = self._clock(), time.time_ns() // 1_000_000, self._watched()
        with self._lock:
            self._tracks = {each.name: self._tracks.get(each.name) or _Track(self._points) for each in found}
            for each in found:
                if each.status is not None:
                    self._tracks[each.name].add(now, ms, each.status)

    def since(self, ms: int) -> dict[str, Sequence[Point]]:
        """The points of every sync after a moment, the oldest first."""
        with self._lock:
            return {name: [point for point in track.points if point.ms > ms] for name, track in self._tracks.items()}

    def _run(self) -> None:
        self.look()
        while not self._done.wait(self._interval):
            self.look()
