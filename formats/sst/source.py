"""The source of a table's bytes: anything that reads a range."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from msgspec import Struct

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst.coding import Readable


class RandomAccess(Protocol):
    """A file or object of known size; reads are independent of each other."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_at(self, offset: int, length: int) -> Readable:
        """Return exactly `length` bytes from `offset`, which lie inside the file."""


_TAIL = 64 << 10
"""Bytes that `TailCache` keeps: on object storage a second request costs more than these."""


class MemorySource(Struct, frozen=True):
    """A table that is in memory already."""

    data: Readable

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> memoryview:
        return memoryview(self.data)[offset : offset + length]


class TailCache:
    """A source whose end is read once: footer, properties and index mostly lie within it."""

    def __init__(self, source: RandomAccess) -> None:
        self.source = source
        self.size = source.size
        self._start = max(0, self.size - _TAIL)

    def read_at(self, offset: int, length: int) -> Readable:
        if offset < self._start:
            return self.source.read_at(offset, length)
        return self._tail[offset - self._start : offset - self._start + length]

    @cached_property
    def _tail(self) -> memoryview:
        return memoryview(self.source.read_at(self._start, self.size - self._start))


def read_exactly(source: RandomAccess, offset: int, length: int) -> Readable:
    """Read a range that a table names. Raises `DamagedBytes` when it is not inside the file."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise DamagedBytes(f"bytes {offset} to {offset + length} are outside the file of {source.size} bytes")
    data = source.read_at(offset, length)
    if len(data) != length:
        raise DamagedBytes(f"file ends inside bytes {offset} to {offset + length}: {len(data)} read")
    return data
