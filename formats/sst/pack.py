"""From sealed blocks to the bytes of a file: compressed, with checksums, and laid one behind the other.

Kernels that fill the arena do it when they want room: blocks lie in the processor's cache then, and nothing returns to
Python for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formats.jit import njit
from formats.kernels.addresses import Int, copy, copy_words, load, store, store_byte
from formats.kernels.crc32c import crc32c
from formats.kernels.foreign import call_ints, call_sizes
from formats.sst.encode import SEALED, SIZE, START, Blocks, get, put, put_u32, put_varint

PACKED, PLACE, FILLED, MISSES, SKIP, STATE_SIZE = range(6)
"""Fields of the state: how many of the sealed blocks are packed, and where the next one begins in the arena; bytes in the
output; how many blocks are skipped after the next that does not shrink, and now."""

MOST_SKIPPED = 15
"""Blocks stored as they are after several that did not shrink: compressing noise costs most."""
_EXPANSION = 7
"""Noise grows by less than 1/128 in zstd and lz4,"""
SLACK = 128
"""and by less than so many bytes, with the size before it and the trailer behind it."""
_CRC_MASK_DELTA = 0xA282EAD8
_LOW_32 = 0xFFFFFFFF


class Packing(NamedTuple):
    """Where packed blocks go and what compresses them, by addresses."""

    state: int
    """int64, `STATE_SIZE` of them; 0: blocks are not packed by kernels."""
    sizes: int
    """int64: of each packed block, without the trailer; as many as blocks may be sealed."""
    out: int
    out_size: int
    method: int
    """The byte in the trailer of blocks that are compressed."""
    compress_sizes: int
    """A function of zstd's signature, or 0."""
    context: int
    """Its first argument."""
    compress_ints: int
    """A function of lz4's signature, or 0. With neither, blocks are stored as they are."""


NO_PACKING = Packing(0, 0, 0, 0, 0, 0, 0, 0)


def room_for(size: int) -> int:
    """What the output needs for a block of so many bytes, whatever becomes of it."""
    return size + (size >> _EXPANSION) + SLACK


@njit(forceinline=True)
def _compressed(packing: Packing, to: Int, room: Int, block: Int, size: Int) -> Int:
    """Compress a block; bytes written, not positive where the library refuses."""
    if packing.compress_sizes:
        return call_sizes(packing.compress_sizes, packing.context, to, room, block, size)
    return call_ints(packing.compress_ints, block, to, size, room)


@njit(forceinline=True)
def _put_body(packing: Packing, to: Int, block: Int, size: Int) -> tuple[Int, Int]:
    """Write a block, compressed where that saves an eighth at least; the address after it, and its method."""
    if packing.compress_sizes or packing.compress_ints:
        skip = np.int64(load(packing.state + 8 * SKIP))
        if skip:
            store(packing.state + 8 * SKIP, skip - 1)
        else:
            body = put_varint(to, size)
            written = _compressed(packing, body, size + (size >> _EXPANSION) + SLACK // 2, block, size)
            if written > 0 and body - to + written < size - size // 8:
                store(packing.state + 8 * MISSES, 0)
                return body + written, np.int64(packing.method)
            misses: Int = np.int64(2 * load(packing.state + 8 * MISSES) + 1)
            if misses > MOST_SKIPPED:
                misses = np.int64(MOST_SKIPPED)
            store(packing.state + 8 * MISSES, misses)
            store(packing.state + 8 * SKIP, misses)
    copy(to, block, size)
    return to + size, np.int64(0)


@njit(forceinline=True)
def _put_trailer(start: Int, end: Int, method: Int) -> Int:
    """Write method and checksum of what lies between two addresses; the address after them."""
    store_byte(end, method)
    crc = np.int64(crc32c(start, end + 1 - start))
    put_u32(end + 1, ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & _LOW_32)
    return end + 5


@njit
def pack(blocks: Blocks, packing: Packing) -> bool:
    """Pack all sealed blocks; False where there was none, or the output has no room for the rest.

    After the last one the open block goes to the arena's beginning.
    """
    if not packing.state:
        return False
    first, sealed = np.int64(load(packing.state + 8 * PACKED)), get(blocks, SEALED)
    place: Int = np.int64(load(packing.state + 8 * PLACE))
    filled: Int = np.int64(load(packing.state + 8 * FILLED))
    number: Int = first
    while number < sealed:
        end = np.int64(load(blocks.ends + 8 * number))
        size = end - place
        if filled + size + (size >> _EXPANSION) + SLACK > packing.out_size:
            break
        to = packing.out + filled
        body_end, method = _put_body(packing, to, blocks.arena + place, size)
        store(packing.sizes + 8 * number, body_end - to)
        filled = _put_trailer(to, body_end, method) - packing.out
        place = end
        number += 1
    if first < number == sealed:
        copy_words(blocks.arena, blocks.arena + place, get(blocks, SIZE))  # forwards: the places may overlap
        put(blocks, START, 0)
        place = np.int64(0)
    store(packing.state + 8 * PACKED, number)
    store(packing.state + 8 * PLACE, place)
    store(packing.state + 8 * FILLED, filled)
    return bool(first < number == sealed)
