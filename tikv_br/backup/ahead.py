"""Working on one item while the next is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterates over ``items`` in a thread of its own, one item ahead of the consumer.

    Errors of ``items`` reach the consumer as they are. A consumer that stops early waits for the item under way.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.seconds = 0.0
        """How long the items have taken, in their thread."""
        self.seconds_waiting = 0.0
        """How long the consumer has waited for them."""
        self._items = items
        self._stopped = False

    def stop(self) -> None:
        """Begin no further item: the one under way, if any, is the last."""
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
            coming: Future[T | None] | None = pool.submit(self._next)
            while coming is not None and (item := self._wait(coming)) is not None:
                coming = None if self._stopped else pool.submit(self._next)
                yield item

    def _wait(self, coming: Future[T | None]) -> T | None:
        began = time.perf_counter()
        try:
            return coming.result()
        finally:
            self.seconds_waiting += time.perf_counter() - began

    def _next(self) -> T | None:
        began = time.perf_counter()
        try:
            return next(self._items, None)
        finally:
            self.seconds += time.perf_counter() - began
