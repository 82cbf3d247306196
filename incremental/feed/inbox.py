"""A bounded queue of many threads to one consumer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class InboxClosed(Exception):
    """Nobody reads any more."""


class Inbox(Generic[T]):
    """First in, first out, bounded by the bytes that the items say they have."""

    def __init__(self, limit: int) -> None:
        """`limit` is in bytes; one item alone may be larger."""
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """What waits."""
        return self._bytes

    def put(self, item: T, size: int) -> None:
        """Add an item as soon as there is room. Raises `InboxClosed`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._limit)
            if self._closed:
                raise InboxClosed
            self._add(item, size)

    def put_now(self, item: T) -> None:
        """Add an item of no size, room or not; nothing happens when it is closed."""
        with self._changed:
            if not self._closed:
                self._add(item, 0)

    def get(self, timeout: float, most: int) -> list[T]:
        """What waits, up to `most` bytes; none when nothing comes within `timeout` seconds, or when it is closed.

        The first item is always among them.
        """
        taken: list[T] = []
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items, timeout)
            while self._items and (not taken or self._items[0][1] <= most):
                item, size = self._items.popleft()
                taken.append(item)
                most -= size
                self._bytes -= size
            if taken:
                self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Drop everything and let go everyone who waits."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _add(self, item: T, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size
        self._changed.notify_all()
