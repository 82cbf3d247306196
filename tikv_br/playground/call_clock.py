"""How long the stores themselves were at work: what a command takes beyond that is its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_KEPT_OPEN: Final = frozenset({"BatchCommands", "EventFeed", "EventFeedV2"})
"""RPCs that stay open also while there is nothing to do."""


class CallClock:
    """Adds up the calls of all stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._busy_since = self._busy = 0.0
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def clear(self) -> None:
        """Begin anew; calls under way count from their start when they end, and as busy from now on."""
        with self._lock:
            self._busy_since, self._busy = time.monotonic(), 0.0
            self._calls.clear()
            self._seconds.clear()

    @contextmanager
    def running(self, rpc: str) -> Iterator[None]:
        """A call, for the length of the block."""
        if rpc in _KEPT_OPEN:
            yield
            return
        began = self._begin()
        try:
            yield
        finally:
            self._end(rpc, began)

    def describe(self) -> dict[str, Any]:
        """``busy_seconds``, in which some store had a call under way, and for each RPC its calls and their seconds."""
        with self._lock:
            busy = self._busy + (time.monotonic() - self._busy_since if self._under_way else 0.0)
            calls = {rpc: {"calls": count, "seconds": self._seconds[rpc]} for rpc, count in sorted(self._calls.items())}
            return {"busy_seconds": busy, "rpcs": calls}

    def _begin(self) -> float:
        with self._lock:
            now = time.monotonic()
            if not self._under_way:
                self._busy_since = now
            self._under_way += 1
            return now

    def _end(self, rpc: str, began: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._under_way -= 1
            if not self._under_way:
                self._busy += now - self._busy_since
            self._calls[rpc] += 1
            self._seconds[rpc] += now - began
