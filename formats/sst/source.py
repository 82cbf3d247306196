"""Where the bytes of a table come from: anything that reads a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from formats.errors import DamagedBytes
from formats.sst.coding import Readable


class RandomAccess(Protocol):
    """A file or object of known size; reads are independent of each other."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_at(self, offset: int, length: int) -> Readable:
        """Return exactly `length` bytes from `offset`, which lie inside the file."""


@dataclass(frozen=True, slots=True)
class MemorySource:
    """A table that is in memory already."""

    data: Readable

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`, without a copy."""
        return memoryview(self.data)[offset : offset + length]


def read_exactly(source: RandomAccess, offset: int, length: int) -> Readable:
    """Read a range that a table names. Raises `DamagedBytes` when it is not inside the file."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise DamagedBytes(f"bytes {offset} to {offset + length} named in a file of {source.size} bytes")
    data = source.read_at(offset, length)
    if len(data) != length:
        raise DamagedBytes(f"file ends inside bytes {offset} to {offset + length}: {len(data)} read")
    return data
