"""The kernel that turns rows into data blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from formats.columns import Bytes, Offsets
from formats.jit import njit
from formats.sst.memory import Int, address, common_prefix, copy, load_byte, store

Numbers = npt.NDArray[np.int64]
Restarts = npt.NDArray[np.uint32]

DONE, BLOCK_FULL, NO_ROOM, UNSORTED = 0, 1, 2, 3
"""Results of `encode_rows`: all rows are in; the block is sealed and the next row starts another; the buffer is too short
for the next row; the next row does not sort after the one before."""

ROW, ROWS_IN_BLOCK, RESTARTS, SIZE, LAST_LENGTH, SEALED, NEED, STATE_SIZE = range(8)
"""Fields of the state: next row of the batch; what the open block holds: rows, restarts, bytes; length of the key before
the batch (-1 = none); bytes of the block that was sealed last; bytes that the buffer needs when `NO_ROOM`."""

_PUT = np.uint64(1)
"""Sequence number 0 and type 1: the eight bytes after every user key."""
_KEY_TRAILER = 8


@njit(forceinline=True)
def _varint_size(number: Int) -> Int:
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
    return _varint_size(shared) + _varint_size(unshared) + _varint_size(value_length)


@njit(forceinline=True)
def _put_varint(block: Bytes, at: Int, number: Int) -> Int:
    """Write a varint; the position after it."""
    while number >= 0x80:
        block[at] = number & 0x7F | 0x80
        number >>= 7
        at += 1
    block[at] = number
    return at + 1


@njit(forceinline=True)
def _put_lengths(block: Bytes, at: Int, shared: Int, unshared: Int, value_length: Int) -> Int:
    """Write an entry's three lengths; the position after them."""
    if (shared | unshared | value_length) < 0x80:
        block[at], block[at + 1], block[at + 2] = shared, unshared, value_length
        return at + 3
    return _put_varint(block, _put_varint(block, _put_varint(block, at, shared), unshared), value_length)


@njit(forceinline=True)
def _sorts_after(key: Int, length: Int, last: Int, last_length: Int, shared: Int) -> bool | np.bool:
    """Whether a key sorts after another with which it shares this many bytes; addresses and lengths."""
    if shared == length:
        return False
    return shared == last_length or load_byte(key + shared) > load_byte(last + shared)


@njit
def seal(block: Bytes, state: Numbers, restarts: Restarts) -> None:
    """Append the restarts to the block, for which there is room: its end is ``state[SEALED]``, and the next one opens."""
    count, end = state[RESTARTS], state[SIZE]
    copy(address(block) + end, address(restarts), 4 * count)
    end += 4 * count
    for byte in range(4):
        block[end + byte] = count >> (8 * byte) & 0xFF
    state[SEALED] = end + 4
    state[ROWS_IN_BLOCK] = state[RESTARTS] = state[SIZE] = 0


@njit
def encode_rows(
    key_offsets: Offsets,
    keys: Bytes,
    value_offsets: Offsets,
    values: Bytes,
    last_key: Bytes,
    state: Numbers,
    block: Bytes,
    restarts: Restarts,
    block_size: int,
    restart_interval: int,
) -> int:
    """Append rows from ``state[ROW]`` on to the open block until they or the block end.

    `last_key` holds the key before the batch. A row that does not fit into `block_size` beside others starts a new
    block; alone it may be larger. `restarts` has room for as many as the block's rows can need.
    """
    keys_at, values_at, block_at = address(keys), address(values), address(block)
    last, last_length = address(last_key), state[LAST_LENGTH]
    if state[ROW] > 0:
        last = keys_at + key_offsets[state[ROW] - 1]
        last_length = key_offsets[state[ROW]] - key_offsets[state[ROW] - 1]
    size, count, restart_count = state[SIZE], state[ROWS_IN_BLOCK], state[RESTARTS]
    result, row = DONE, state[ROW]
    while row < key_offsets.size - 1:
        key, length = keys_at + key_offsets[row], key_offsets[row + 1] - key_offsets[row]
        value_length = value_offsets[row + 1] - value_offsets[row]
        shared: Int = np.int64(0)
        if last_length >= 0:
            shared = common_prefix(last, key, min(last_length, length))
            if not _sorts_after(key, length, last, last_length, shared):
                result = UNSORTED
                break
        is_restart = count % restart_interval == 0
        if is_restart:
            shared = np.int64(0)
        unshared = length - shared + _KEY_TRAILER
        end = size + _lengths_size(shared, unshared, value_length) + unshared + value_length
        sealed = end + 4 * (restart_count + is_restart + 1)
        if count > 0 and sealed > block_size:
            result = BLOCK_FULL
            break
        if sealed > block.size:
            state[NEED] = sealed
            result = NO_ROOM
            break
        if is_restart:
            restarts[restart_count] = size
            restart_count += 1
        at = block_at + _put_lengths(block, size, shared, unshared, value_length)
        copy(at, key + shared, length - shared)
        store(at + length - shared, _PUT)
        copy(at + unshared, values_at + value_offsets[row], value_length)
        last, last_length, size = key, length, end
        count += 1
        row += 1
    state[ROW], state[SIZE], state[ROWS_IN_BLOCK], state[RESTARTS] = row, size, count, restart_count
    if result == BLOCK_FULL:
        seal(block, state, restarts)
    return result
