"""A store's causal timestamps: batches of PD's TSO fetched ahead, so that a write needs no word with PD.

As in TiKV the cache is renewed every 100 ms and holds what covers three seconds; the oldest batch is used first. A
write's timestamp is therefore up to three seconds behind PD's, until the cache is flushed.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from tikv_br.playground.node import TimestampOracle

RENEW_INTERVAL: Final = 0.1
"""Seconds between two calls of `CausalTimestamps.renew`."""
_MIN_BATCH: Final = 100
_MAX_BATCH: Final = 8192


class CausalTimestamps:
    """One store's cache. Thread-safe."""

    def __init__(self, tso: TimestampOracle, ahead: float = 3.0) -> None:
        self._tso = tso
        self._lock = threading.Lock()
        self._max_batches = max(1, round(ahead / RENEW_INTERVAL))
        self._batch_size = _MIN_BATCH
        self._batches: deque[range] = deque()
        self._append()

    def next_ts(self) -> int:
        """The timestamp of the next write: above the last, below what PD hands out from now on."""
        with self._lock:
            if not self._batches:
                self._batch_size = min(2 * self._batch_size, _MAX_BATCH)
                self._append()
            batch = self._batches.popleft()
            if len(batch) > 1:
                self._batches.appendleft(batch[1:])
            return batch[0]

    def flush(self) -> None:
        """Throw the cache away: the next timestamp is above every one that PD has handed out before."""
        with self._lock:
            self._batches.clear()
            self._append()

    def renew(self) -> None:
        """Fetch one more batch and drop the oldest beyond the time covered; to be called every 100 ms."""
        with self._lock:
            self._append()
            while len(self._batches) > self._max_batches:
                self._batches.popleft()

    def _append(self) -> None:
        last = self._tso.next(self._batch_size)
        self._batches.append(range(last - self._batch_size + 1, last + 1))
