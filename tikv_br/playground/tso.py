"""PD's timestamp oracle: strictly ascending timestamps, also across restarts and kills."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from tikv_br.playground.engine import Engine

LOGICAL_BITS: Final = 18
_MAX_LOGICAL: Final = (1 << LOGICAL_BITS) - 1
_RECORD: Final = "tso"
_WINDOW_MS: Final = 3000


def compose(physical_ms: int, logical: int) -> int:
    """A timestamp from unix milliseconds and a counter below 2^18."""
    return physical_ms << LOGICAL_BITS | logical


class Tso:
    """Hands out timestamps of the wall clock's milliseconds. Thread-safe.

    As PD does, it writes down a moment in the near future before it hands out timestamps up to it, and starts above
    what was written down.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._saved = int(engine.get_meta(_RECORD) or b"0")
        self._physical = self._saved
        self._logical = 0

    def next(self, count: int = 1) -> int:
        """Allocate ``count`` timestamps of one millisecond and return the last; ``count`` is at most 2^18 - 1."""
        if not 0 < count <= _MAX_LOGICAL:
            raise ValueError(f"tso count {count} is not in 1..{_MAX_LOGICAL}")
        with self._lock:
            now = int(self._clock() * 1000)
            if now > self._physical:
                self._physical, self._logical = now, 0
            if self._logical + count > _MAX_LOGICAL:
                self._physical, self._logical = self._physical + 1, 0
            if self._physical >= self._saved:
                self._saved = self._physical + _WINDOW_MS
                self._engine.put_meta({_RECORD: str(self._saved).encode()})
            self._logical += count
            return compose(self._physical, self._logical)
