"""How fast a store may download: the smallest limit that any task has asked for and that has not run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class SpeedLimit:
    """The limits of one store. Thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limits: dict[str, tuple[int, float]] = {}
        self._free_at = 0.0

    def set(self, task: str, limit: int, ttl: int) -> None:
        """Limit a task to ``limit`` bytes a second (0 = none) for ``ttl`` seconds (0 = for good)."""
        with self._lock:
            if limit:
                self._limits[task] = limit, self._clock() + ttl if ttl else float("inf")
            else:
                self._limits.pop(task, None)

    def current(self) -> int:
        """Bytes a second, 0 = unlimited."""
        now = self._clock()
        with self._lock:
            return self._strictest(now)

    def delay(self, size: int) -> float:
        """Seconds that a download of ``size`` bytes, which begins now, has to last: all of a store share its limit."""
        now = self._clock()
        with self._lock:
            limit = self._strictest(now)
            if not limit:
                return 0.0
            self._free_at = max(self._free_at, now) + size / limit
            return self._free_at - now

    def _strictest(self, now: float) -> int:
        return min((limit for limit, until in self._limits.values() if now < until), default=0)
