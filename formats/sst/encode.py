"""What kernels do that turn rows into data blocks, many blocks to a call.

They write blocks one behind the other into an arena that stays in the processor's cache. An entry begins with its key in the free one of two slots (the other one has the key before it): `open_entry`
holds it to the order, ends the block where it is full, writes all but the value, and says where that goes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formats.jit import njit
from formats.kernels.addresses import Int, common_prefix, copy, copy_words, load, load_byte, store, store_byte

DONE, NO_ROOM, UNSORTED, OUTSIDE, DAMAGED = range(5)
"""Results of kernels: all rows are in; the blocks must go before the next row; the next row, whose key is in the free
slot, does not sort after the one before; its key lies outside of the keyspace; the bytes are not what was measured."""

CURSOR, START, SIZE, RESTARTS, RUN, SLOT, LAST_LENGTH, LENGTH = range(8)
SEALED, SEPARATED, NEED, ROWS, KEY_BYTES, VALUE_BYTES, STATE_SIZE = range(8, 15)
"""Fields of the state: where the kernel goes on in its input; the open block's place in the arena, bytes and restarts;
rows since the last of these (0: the next row is one); which slot has the last key, its length (-1 = none), that of the
key in the other; sealed blocks in the arena, bytes of separators; bytes that the next row's block needs when `NO_ROOM`;
rows, bytes of keys and of values in all."""

TRAILER_SIZE = 8
"""Bytes behind the user key of every internal key."""
SLACK = 8
"""Bytes at the end of each slot, and behind the arena, for kernels that write whole words."""
_PUT = np.uint64(1)
"""Sequence number 0 and type 1, of every row."""
_SEEK = np.uint64(0xFFFF_FFFF_FFFF_FF11)
"""The highest sequence number, of a separator that is no row's key: it sorts before every row of that key."""


class Blocks(NamedTuple):
    """The memory that kernels fill, by addresses and sizes.

    Of arrays in a tuple every use would count references, which costs more than the rows do.
    """

    state: int
    """int64, `STATE_SIZE` of them."""
    arena: int
    """Sealed blocks, one behind the other, and behind them the open one."""
    arena_size: int
    """Without `SLACK` bytes behind it."""
    restarts: int
    """Of the open block: uint32, as many as `block_size` and `restart_interval` allow."""
    ends: int
    """int64: where each sealed block ends in the arena."""
    separator_ends: int
    """int64: the same of its separator."""
    most_sealed: int
    """How many of them there is room for."""
    keys: int
    """Two slots."""
    slot_size: int
    separators: int
    """Of sealed blocks: internal keys at or after the last row's and before the next block's first."""
    separators_size: int
    block_size: int
    restart_interval: int
    one_by_one: bool
    """Whether to return `NO_ROOM` after each block: then the next one begins where it began, and the arena holds but one."""


@njit(forceinline=True)
def varint_size(number: Int) -> Int:
    """Bytes that `put_varint` writes."""
    size = np.int64(1)
    while number >= 0x80:
        number >>= 7
        size += 1
    return size


@njit(forceinline=True)
def _lengths_size(shared: Int, unshared: Int, value_length: Int) -> Int:
    """Bytes of an entry's three lengths: nearly always 3."""
    if (shared | unshared | value_length) < 0x80:
        return np.int64(3)
    return varint_size(shared) + varint_size(unshared) + varint_size(value_length)


@njit(forceinline=True)
def put_varint(at: Int, number: Int) -> Int:
    """Write a varint; the address after it."""
    while number >= 0x80:
        store_byte(at, number & 0x7F | 0x80)
        number >>= 7
        at += 1
    store_byte(at, number)
    return at + 1


@njit(forceinline=True)
def put_u32(at: Int, number: Int) -> None:
    """Write a little-endian number of four bytes."""
    for byte in range(4):
        store_byte(at + byte, number >> (8 * byte) & 0xFF)


@njit(forceinline=True)
def _sorts_after(key: Int, length: Int, last: Int, last_length: Int, shared: Int) -> bool | np.bool:
    """Whether a key sorts after another with which it shares this many bytes; addresses and lengths."""
    if shared == length:
        return False
    return shared == last_length or load_byte(key + shared) > load_byte(last + shared)


@njit(forceinline=True)
def get(blocks: Blocks, field: int) -> Int:
    """A field of the state."""
    return np.int64(load(blocks.state + 8 * field))


@njit(forceinline=True)
def put(blocks: Blocks, field: int, number: Int) -> None:
    """Set a field of the state."""
    store(blocks.state + 8 * field, number)


@njit(forceinline=True)
def free_slot(blocks: Blocks) -> Int:
    """The address where the next key is to be written."""
    return blocks.keys + (1 - get(blocks, SLOT)) * blocks.slot_size


@njit
def put_separator(at: Int, last: Int, last_length: Int, key: Int, length: Int, shared: Int) -> Int:
    """Write the shortest internal key at or after `last` and before `key`; the address after it.

    Addresses and lengths; the keys ascend and share `shared` bytes. With a `key` of no bytes it is `last` itself.
    """
    end, trailer = last_length, _PUT
    if shared < last_length and shared < length:
        end = shared
        if int(load_byte(last + shared)) + 1 >= int(load_byte(key + shared)) and shared + 1 >= length:
            end += 1
            while end < last_length and load_byte(last + end) == np.uint8(0xFF):
                end += 1
    copy(at, last, end)
    at += end
    if end < last_length:
        store_byte(at, load_byte(last + end) + 1)
        at, trailer = at + 1, _SEEK
    store(at, trailer)
    return at + TRAILER_SIZE


@njit
def seal(blocks: Blocks, key: Int, length: Int, shared: Int) -> bool:
    """End the open block, whose restarts have room; False, with nothing done, where its separator has none.

    `key` is the address of the next block's first key, of no bytes if there is none.
    """
    number, separated, last_length = get(blocks, SEALED), get(blocks, SEPARATED), get(blocks, LAST_LENGTH)
    if number == blocks.most_sealed or separated + last_length + TRAILER_SIZE > blocks.separators_size:
        return False
    count, end = get(blocks, RESTARTS), get(blocks, START) + get(blocks, SIZE)
    copy(blocks.arena + end, blocks.restarts, 4 * count)
    put_u32(blocks.arena + end + 4 * count, count)
    end += 4 * count + 4
    last = blocks.keys + get(blocks, SLOT) * blocks.slot_size
    at = put_separator(blocks.separators + separated, last, last_length, key, length, shared)
    store(blocks.ends + 8 * number, end)
    store(blocks.separator_ends + 8 * number, at - blocks.separators)
    put(blocks, SEALED, number + 1)
    put(blocks, SEPARATED, at - blocks.separators)
    put(blocks, START, end)
    put(blocks, SIZE, 0)
    put(blocks, RESTARTS, 0)
    put(blocks, RUN, 0)
    return True


@njit(forceinline=True)
def open_entry(blocks: Blocks, length: Int, value_length: Int) -> Int:
    """Append the entry of the key in the free slot but for its value: the address where that goes, or minus a result.

    A row that does not fit into `block_size` beside others starts a new block; alone it may be larger.
    """
    key, last = free_slot(blocks), blocks.keys + get(blocks, SLOT) * blocks.slot_size
    last_length = get(blocks, LAST_LENGTH)
    common: Int = np.int64(0)
    put(blocks, LENGTH, length)
    if last_length >= 0:
        common = common_prefix(last, key, min(last_length, length))
        if not _sorts_after(key, length, last, last_length, common):
            return -UNSORTED
    run, restarts, opened = get(blocks, RUN), get(blocks, RESTARTS), get(blocks, SIZE)
    shared: Int = common if run else np.int64(0)
    unshared = length - shared + TRAILER_SIZE
    size = opened + _lengths_size(shared, unshared, value_length) + unshared + value_length
    if restarts and size + 4 * (restarts + (run == 0) + 1) > blocks.block_size:
        if not seal(blocks, key, length, common) or blocks.one_by_one:
            return -NO_ROOM
        run, restarts, opened, shared, unshared = 0, 0, 0, 0, length + TRAILER_SIZE
        size = _lengths_size(shared, unshared, value_length) + unshared + value_length
    sealed = size + 4 * (restarts + (run == 0) + 1)
    if get(blocks, START) + sealed > blocks.arena_size:
        put(blocks, NEED, sealed)
        return -NO_ROOM
    if run == 0:
        put_u32(blocks.restarts + 4 * restarts, opened)
        put(blocks, RESTARTS, restarts + 1)
    at = put_varint(blocks.arena + get(blocks, START) + opened, shared)
    at = put_varint(put_varint(at, unshared), value_length)
    copy_words(at, key + shared, length - shared)
    store(at + length - shared, _PUT)
    _count(blocks, size, run, length, value_length)
    return at + unshared


@njit(forceinline=True)
def _count(blocks: Blocks, size: Int, run: Int, length: Int, value_length: Int) -> None:
    """Take note of an entry with which the open block has `size` bytes."""
    put(blocks, SIZE, size)
    put(blocks, RUN, 0 if run + 1 == blocks.restart_interval else run + 1)
    put(blocks, LAST_LENGTH, length)
    put(blocks, SLOT, 1 - get(blocks, SLOT))
    put(blocks, ROWS, get(blocks, ROWS) + 1)
    put(blocks, KEY_BYTES, get(blocks, KEY_BYTES) + length)
    put(blocks, VALUE_BYTES, get(blocks, VALUE_BYTES) + value_length)
