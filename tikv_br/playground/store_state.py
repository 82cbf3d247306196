"""What a store keeps about its work: call times, rate limits, its import mode, and requests that would crash a real store."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

_OPEN_STREAMS: Final = frozenset({"BatchCommands", "EventFeed", "EventFeedV2"})
"""RPCs that stay open also while there is nothing to do."""


class CallClock:
    """Adds up the calls of all stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._busy_since = self._busy = 0.0
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def clear(self) -> None:
        """Start from zero. A call in flight is counted when it ends, with all its time, and as busy from now on."""
        with self._lock:
            self._busy_since, self._busy = time.monotonic(), 0.0
            self._calls.clear()
            self._seconds.clear()

    @contextmanager
    def measure(self, rpc: str) -> Iterator[None]:
        if rpc in _OPEN_STREAMS:
            yield
            return
        with self._lock:
            started = time.monotonic()
            if not self._active:
                self._busy_since = started
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic()
                self._active -= 1
                if not self._active:
                    self._busy += now - self._busy_since
                self._calls[rpc] += 1
                self._seconds[rpc] += now - started

    def describe(self) -> dict[str, Any]:
        """``busy_seconds`` with a call in flight at any store, and for each RPC its calls and their seconds."""
        with self._lock:
            busy = self._busy + (time.monotonic() - self._busy_since if self._active else 0.0)
            calls = {rpc: {"calls": count, "seconds": self._seconds[rpc]} for rpc, count in sorted(self._calls.items())}
            return {"busy_seconds": busy, "rpcs": calls}


class Pace:
    """Slows down the work that shares it to a rate in bytes per second, which can be changed. Thread-safe."""

    def __init__(
        self,
        rate: int = 0,
        weight: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """A rate of 0 is unlimited. Each byte counts ``weight`` times."""
        self.rate = rate
        self._weight = weight
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.worked = 0.0
        """Seconds of work, the least that it could have taken."""

    def limit(self, rate: int) -> None:
        """Change the rate of work that starts from now on; it does not wait for what started at another rate."""
        with self._lock:
            if rate != self.rate:
                self.rate, self._free_at = rate, 0.0

    def work(self, size: int) -> None:
        """Wait for earlier work, and then as long as ``size`` bytes take."""
        with self._lock:
            if not self.rate:
                return
            seconds = size * self._weight / self.rate
            now = self._clock()
            self._free_at = max(self._free_at, now) + seconds
            self.worked += seconds
            wait = self._free_at - now
        self._sleep(wait)

    def clear(self) -> None:
        with self._lock:
            self.worked = 0.0


@dataclass(frozen=True, slots=True)
class FatalRequest:
    """A request that would have crashed a real store; ``time`` in unix seconds."""

    time: float
    store_id: int
    rpc: str
    what: str


class FatalRequestLog:
    """All fatal requests of a playground, in memory and in a file of JSON lines. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._requests = [FatalRequest(**json.loads(line)) for line in lines]

    def record(self, *, store_id: int, rpc: str, what: str) -> None:
        """Add one; it is in the file when this returns."""
        request = FatalRequest(time.time(), store_id, rpc, what)
        with self._lock:
            self._requests.append(request)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(request)) + "\n")

    def all(self) -> list[FatalRequest]:
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Remove all: for a test that sends one on purpose."""
        with self._lock:
            self._requests.clear()
            self._path.unlink(missing_ok=True)


TIMEOUT: Final = 600.0
"""Seconds after the last SwitchMode(Import) at which a store returns to Normal (`import.import-mode-timeout`)."""


class StoreImportMode:
    """The mode of one store. Thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0

    def switch(self, *, importing: bool) -> None:
        """Enter import mode, or stay in it for another ten minutes, or leave it."""
        self._until = self._clock() + TIMEOUT if importing else 0.0

    @property
    def importing(self) -> bool:
        return self._clock() < self._until
