"""Working on one item while the next is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterates over ``items`` in a thread of its own, one item ahead of the consumer.

    Errors of ``items`` reach the consumer as they are. A consumer that stops early waits for the item under way.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.seconds = 0.0
        """How long the items have taken, in their thread."""
        self._items = items

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
            coming = pool.submit(self._next)
            while (item := coming.result()) is not None:
                coming = pool.submit(self._next)
                yield item

    def _next(self) -> T | None:
        began = time.perf_counter()
        try:
            return next(self._items, None)
        finally:
            self.seconds += time.perf_counter() - began
