"""Checksums in block trailers: over the stored bytes and the byte that names their compression.

As in RocksDB's public format: https://github.com/facebook/rocksdb/wiki/Rocksdb-BlockBasedTable-Format
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import xxhash
from fastcrc import crc32

from formats.sst.coding import Readable

_LOW_32 = 0xFFFFFFFF
_CRC_MASK_DELTA = 0xA282EAD8
_XXH3_LAST_BYTE = 0x6B9083D9


class ChecksumType(enum.IntEnum):
    """Numbers as in a table's footer."""

    NONE = 0
    CRC32C = 1
    XXHASH = 2
    XXHASH64 = 3
    XXH3 = 4

    def compute(self, pieces: Iterable[Readable], last: int) -> int:
        """The 32 bits over `pieces` followed by the byte `last`."""
        return self.function(pieces, last)

    @property
    def function(self) -> Callable[[Iterable[Readable], int], int]:
        """`compute` of this type."""
        return _FUNCTIONS[self]


def context_modifier(base: int, offset: int) -> int:
    """What format version 6 adds to a checksum so that a block found at another offset fails; 0 without a base."""
    return base ^ (offset + (offset >> 32)) & _LOW_32 if base else 0


def _none(_pieces: Iterable[Readable], _last: int) -> int:
    return 0


def _masked_crc32c(pieces: Iterable[Readable], last: int) -> int:
    """RocksDB stores CRCs rotated and shifted, for bytes that hold CRCs themselves."""
    crc = 0
    for piece in pieces:
        crc = crc32.iscsi(piece, crc)
    crc = crc32.iscsi(bytes((last,)), crc)
    return (crc >> 15 | crc << 17) + _CRC_MASK_DELTA & _LOW_32


def _xxhash(pieces: Iterable[Readable], last: int) -> int:
    return _digest(xxhash.xxh32(), (*pieces, bytes((last,))))


def _xxhash64(pieces: Iterable[Readable], last: int) -> int:
    return _digest(xxhash.xxh64(), (*pieces, bytes((last,))))


def _xxh3(pieces: Iterable[Readable], last: int) -> int:
    return _digest(xxhash.xxh3_64(), pieces) ^ last * _XXH3_LAST_BYTE & _LOW_32


def _digest(state: xxhash.xxh32 | xxhash.xxh64 | xxhash.xxh3_64, pieces: Iterable[Readable]) -> int:
    for piece in pieces:
        state.update(piece)
    return state.intdigest() & _LOW_32


_FUNCTIONS = {
    ChecksumType.NONE: _none,
    ChecksumType.CRC32C: _masked_crc32c,
    ChecksumType.XXHASH: _xxhash,
    ChecksumType.XXHASH64: _xxhash64,
    ChecksumType.XXH3: _xxh3,
}
