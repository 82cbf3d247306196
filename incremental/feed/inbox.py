"""The queue between the threads that read streams and the feed."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class InboxClosed(Exception):
    """The inbox was closed."""


class Inbox(Generic[T]):
    """A FIFO queue bounded by the total size of its items. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """`limit` is in bytes; a single item may be larger."""
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """Total size of the queued items."""
        return self._bytes

    def put(self, item: T, size: int) -> None:
        """Add an item; waits until there is room. Raises `InboxClosed`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._limit)
            if self._closed:
                raise InboxClosed
            self._add(item, size)

    def put_now(self, item: T) -> None:
        """Add an item of size 0 without waiting; no effect if the inbox is closed."""
        with self._changed:
            if not self._closed:
                self._add(item, 0)

    def get(self, timeout: float, most: int) -> list[T]:
        """Take at least one item, and more up to `most` bytes. Empty after `timeout` seconds, or if the inbox is closed."""
        items: list[T] = []
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items, timeout)
            while self._items and (not items or self._items[0][1] <= most):
                item, size = self._items.popleft()
                items.append(item)
                most -= size
                self._bytes -= size
            if items:
                self._changed.notify_all()
        return items

    def close(self) -> None:
        """Drop all items and wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _add(self, item: T, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size
        self._changed.notify_all()
