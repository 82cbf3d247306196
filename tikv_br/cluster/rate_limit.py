"""`--ratelimit`: the maximum rate at which each store is read from, or made to write."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from tikv_br import cancellation

CREDIT_SECONDS = 1.0
"""Seconds of idleness that a store may make up for by exceeding the rate; without this, the time between requests would be lost."""


class RateLimit:
    """The maximum rate per store for this process. Thread-safe: its tasks share one object. A pickled copy starts without history.

    ``bool()`` is False if unlimited.
    """

    def __init__(
        self,
        bytes_per_second: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = cancellation.sleep,
    ) -> None:
        """Limit to `bytes_per_second`; 0 = unlimited."""
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paid: dict[int, float] = {}
        """By store: the time at which all bytes read so far are paid for."""
        self._gates: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def __bool__(self) -> bool:
        return self.bytes_per_second > 0

    def __reduce__(self) -> tuple[type[RateLimit], tuple[int]]:
        return RateLimit, (self.bytes_per_second,)

    def share(self, executor: str, slots: int, tasks: int) -> RateLimit:
        """Each process's part of the limit: tasks on the driver share one process, on Spark each has its own."""
        processes = 1 if executor == "driver" else max(min(slots, tasks), 1)
        return RateLimit(math.ceil(self.bytes_per_second / processes))

    def seconds(self, size: int) -> float:
        """Return the seconds that ``size`` bytes take at this rate; 0 if unlimited."""
        return size / self.bytes_per_second if self else 0.0

    def spend(self, store_id: int, size: int) -> None:
        """Note a read of ``size`` bytes from a store, and wait until it is paid for at the rate."""
        if not self:
            return
        with self._lock:
            now = self._clock()
            since = max(self._paid.get(store_id, now), now - CREDIT_SECONDS)
            paid = self._paid[store_id] = since + size / self.bytes_per_second
        if paid > now:
            self._sleep(paid - now)

    def gate(self, store_id: int) -> threading.Lock:
        """A lock for one request at a time: a store applies the limit to each request, so that two would have twice the rate."""
        with self._lock:
            return self._gates[store_id]
