"""The index of a table that is being written; `formats.sst.index` reads it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from formats import columns
from formats.columns import Bytes, Offsets
from formats.jit import njit
from formats.kernels.addresses import Int, address, copy
from formats.sst.encode import TRAILER_SIZE as KEY_TRAILER
from formats.sst.encode import put_u32, put_varint, varint_size
from formats.sst.footer import TRAILER_SIZE

_MOST_BESIDE_KEY = 1 + 5 + 1 + 10 + 10 + 4
"""Bytes of an entry beside its key: three lengths, offset, size, and its place among the restarts."""
_COUNT = 4
ENTRY_ESTIMATE = 14
"""Bytes of an entry beside its key, about."""


class IndexBuilder:
    """Builds the index block of format version 2 to 5, every entry a restart.

    What comes with each block is only kept: all entries are made at the end, in one go.
    """

    def __init__(self, format_version: int) -> None:
        self.user_keys = format_version >= 3
        self.deltas = format_version >= 4
        self._separators = bytearray()
        self._ends: list[int] = []
        self._sizes: list[int] = []

    @property
    def blocks(self) -> int:
        """Data blocks so far."""
        return len(self._sizes)

    @property
    def separator_bytes(self) -> int:
        """Of all blocks."""
        return len(self._separators)

    def add(self, separators: bytes, ends: Iterable[int], sizes: Iterable[int]) -> None:
        """Add data blocks of these sizes, without their trailers, that follow the last one.

        `separators` holds for each an internal key at or after its last one and before the next block's first, up to
        its end among `ends`.
        """
        before = len(self._separators)
        self._separators += separators
        self._ends += [before + end for end in ends]
        self._sizes += sizes

    def encode(self) -> bytes:
        """The block's contents; there is at least one entry."""
        out = np.empty(len(self._separators) + self.blocks * _MOST_BESIDE_KEY + _COUNT, np.uint8)
        separators = columns.from_bytes(bytes(self._separators))
        ends, sizes = np.array(self._ends, np.int64), np.array(self._sizes, np.int64)
        return out[: _encode(out, separators, ends, sizes, self.user_keys, self.deltas)].tobytes()


@njit
def _encode(
    out: Bytes,
    separators: Bytes,
    ends: Offsets,
    sizes: Offsets,
    user_keys: bool,  # noqa: FBT001 - kernels know no keywords
    deltas: bool,  # noqa: FBT001
) -> Int:
    """Write all entries and the restarts, for which `out` has room; bytes written."""
    begin, keys_at, restarts = address(out), address(separators), np.empty(len(sizes), np.int64)
    at: Int = begin
    key: Int = np.int64(0)
    offset: Int = np.int64(0)
    for number in range(len(sizes)):
        restarts[number] = at - begin
        length, size = ends[number] - key - (KEY_TRAILER if user_keys else 0), sizes[number]
        at = put_varint(put_varint(at, 0), length)
        if not deltas:
            at = put_varint(at, varint_size(offset) + varint_size(size))
        copy(at, keys_at + key, length)
        at = put_varint(put_varint(at + length, offset), size)
        key, offset = ends[number], offset + size + TRAILER_SIZE
    for number in range(len(sizes)):
        put_u32(at, restarts[number])
        at += 4
    put_u32(at, len(sizes))
    return at + 4 - begin
