"""A limit to how fast this process reads from each store."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from tikv_br.cluster.config import ClusterConfig

CREDIT_SECONDS = 1.0
"""How much of the time in which a store was not read from may be made up for: what requests take is no loss of speed."""


class Throttle:
    """Readers of a store wait after each read until it is paid for at the rate. Thread-safe: they share the rate."""

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paid: dict[int, float] = {}
        """By store: the time up to which what was read is paid for."""

    def spend(self, store_id: int, size: int) -> None:
        """Note a read of ``size`` bytes, and wait for as long as the rate demands."""
        with self._lock:
            now = self._clock()
            since = max(self._paid.get(store_id, now), now - CREDIT_SECONDS)
            paid = self._paid[store_id] = since + size / self.bytes_per_second
        if paid > now:
            self._sleep(paid - now)


@functools.lru_cache(maxsize=4)
def shared_throttle(config: ClusterConfig, bytes_per_second: int) -> Throttle:  # noqa: ARG001 - the key of the cache
    """The process's throttle for a cluster: tasks that run side by side share the rate."""
    return Throttle(bytes_per_second)
