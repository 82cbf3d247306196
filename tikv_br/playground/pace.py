"""How long a store's work takes where it is made to take the time of more data, or of a slower machine, than there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """One store's disk and wire: work queues for it, at so many bytes a second. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        weight: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """With 0 bytes a second nothing takes any longer. Each byte that there is counts as ``weight``."""
        self._speed = bytes_per_second / weight
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = self._worked = 0.0

    def work(self, size: int) -> None:
        """Take the time of ``size`` bytes, once what came before is done."""
        if not self._speed:
            return
        seconds = size / self._speed
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + seconds
            self._worked += seconds
            wait = self._free_at - now
        self._sleep(wait)

    @property
    def worked(self) -> float:
        """Seconds of work since the start, or since `clear`: nobody who wants it done can take less."""
        return self._worked

    def clear(self) -> None:
        """Count anew."""
        with self._lock:
            self._worked = 0.0
