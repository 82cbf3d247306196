"""Timestamps: PD's oracle, and what a store caches of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tikv_br.playground.engine import RocksEngine

LOGICAL_BITS: Final = 18
_MAX_LOGICAL: Final = (1 << LOGICAL_BITS) - 1
_TSO_RECORD: Final = "tso"
_WINDOW_MS: Final = 3000


class TimestampFault(Exception):
    """A store gets no timestamp from PD; the text is what it then puts into its answers."""

    def __init__(self) -> None:
        super().__init__('BatchRenew("Pd unknown error \\"TimestampRequest channel is closed\\"")')


class Tso:
    """PD's timestamp oracle. Thread-safe.

    As PD does, it saves a time in the near future before it allocates timestamps up to it, and starts above the saved time.
    """

    def __init__(self, engine: RocksEngine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._saved = int(engine.get_meta(_TSO_RECORD) or b"0")
        self._physical = self._saved
        self._logical = 0
        self.available = True
        """True while stores reach PD's leader; without it they renew no timestamps and send no resolved-ts."""

    def sync(self) -> None:
        """Begin above the saved time, as a new leader does: each change of the leader moves time up to 3 s ahead."""
        with self._lock:
            if self._saved > self._physical:
                self._physical, self._logical = self._saved, 0

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
                self._engine.put_meta({_TSO_RECORD: str(self._saved).encode()})
            self._logical += count
            return self._physical << LOGICAL_BITS | self._logical


RENEW_INTERVAL: Final = 0.1
"""Seconds between two calls of `CausalTimestamps.renew`."""
_MIN_BATCH: Final = 100
_MAX_BATCH: Final = 8192


class CausalTimestamps:
    """One store's cache of timestamps from PD, up to ``ahead`` seconds old. Thread-safe."""

    def __init__(self, tso: Tso, ahead: float = 3.0) -> None:
        self._tso = tso
        self._lock = threading.Lock()
        self._max_batches = max(1, round(ahead / RENEW_INTERVAL))
        self._max_age = round(ahead * 1000) << LOGICAL_BITS
        self._batch_size = _MIN_BATCH
        self._batches: deque[range] = deque()
        with contextlib.suppress(TimestampFault):
            self._append()

    def next_ts(self) -> int:
        """The timestamp of the next write: above the last, below what PD allocates from now on.

        Raises `TimestampFault` if the cache is used up while PD has no leader.
        """
        with self._lock:
            if not self._batches:
                self._batch_size = min(2 * self._batch_size, _MAX_BATCH)
                self._append()
            batch = self._batches.popleft()
            if len(batch) > 1:
                self._batches.appendleft(batch[1:])
            return batch[0]

    def flush(self) -> None:
        """Drop the cache: the next timestamp is above every one that PD has allocated before.

        Raises `TimestampFault` while PD has no leader; the cache is empty then, too.
        """
        with self._lock:
            self._batches.clear()
            self._append()

    def renew(self) -> None:
        """Fetch one more batch and drop the oldest beyond the time covered; to be called every 100 ms."""
        with self._lock, contextlib.suppress(TimestampFault):
            self._append()
            newest = self._batches[-1][0]
            # By age as well: on a busy machine the calls are further apart, and so many batches cover more time.
            while len(self._batches) > self._max_batches or newest - self._batches[0][0] > self._max_age:
                self._batches.popleft()

    def _append(self) -> None:
        if not self._tso.available:
            raise TimestampFault
        last = self._tso.next(self._batch_size)
        self._batches.append(range(last - self._batch_size + 1, last + 1))
