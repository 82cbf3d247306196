"""Produces items one ahead of their consumer, in a thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from tikv_br.cancellation import inherit

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates over ``items`` in a separate thread, one item ahead of the consumer.

    Errors of ``items`` are raised in the consumer. A consumer that stops early waits for the item in progress.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.seconds = 0.0
        """Time spent producing items, in their thread."""
        self.seconds_waiting = 0.0
        """Time that the consumer has waited for items."""
        self._items = items
        self._stopped = False

    def stop(self) -> None:
        """Produce no further items after the one in progress."""
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
            fetch_next = inherit(self._next)
            pending: Future[T | None] | None = pool.submit(fetch_next)
            while pending is not None and (item := self._wait(pending)) is not None:
                pending = None if self._stopped else pool.submit(fetch_next)
                yield item

    def _wait(self, pending: Future[T | None]) -> T | None:
        began = time.perf_counter()
        try:
            return pending.result()
        finally:
            self.seconds_waiting += time.perf_counter() - began

    def _next(self) -> T | None:
        began = time.perf_counter()
        try:
            return next(self._items, None)
        finally:
            self.seconds += time.perf_counter() - began
