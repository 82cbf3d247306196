"""The kernel that turns a data block into columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, copy, load, store

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

DONE, FULL, DAMAGED, NO_PUT = 0, 1, 2, 3
"""Results of `decode_rows`: the block is through; the columns have no room for the next row; an entry is wrong; a row is
no put, and its trailer was not asked for."""

POSITION, END, KEY_LENGTH, TRAILER, ROWS, NEED_KEY, NEED_VALUE, CURSOR_SIZE = range(8)
"""Fields of the cursor: where to go on in the block (-1: enter it) and where its entries end; length of the user key before
and its eight bytes; rows in the columns; rows seen that are no puts; room that the next row needs when `FULL`."""

SLACK = 16
"""Bytes that a column of keys needs beyond its keys: a trailer, and a word written across its end."""

_PUT = np.uint64(1)
_LOW_BYTE = np.uint64(0xFF)


@njit(forceinline=True)
def _u32(block: Bytes, at: Int) -> np.int64:
    number = np.int64(0)
    for byte in range(4):
        number |= np.int64(block[at + byte]) << (8 * byte)
    return number


@njit(forceinline=True)
def _entries_end(block: Bytes) -> Int:
    """Return the start of the restarts, or -1 if it is invalid; as `block.entries_end`."""
    end = np.int64(block.size - 4)
    if end < 0:
        return np.int64(-1)
    packed = _u32(block, end)
    if packed >> 31:
        if end < 2:
            return np.int64(-1)
        end -= 2 + (np.int64(block[end - 2]) | np.int64(block[end - 1]) << 8)
    end -= 4 * (packed & 0x7FFFFFFF)
    return end if end >= 0 else np.int64(-1)


@njit(forceinline=True)
def _varint(block: Bytes, position: Int, end: Int) -> tuple[Int, Int]:
    """The varint32 at `position` and the position after it, which is -1 where there is none before `end`."""
    number = np.int64(0)
    for shift in range(0, 35, 7):
        if position >= end:
            break
        byte = np.int64(block[position])
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    return number, np.int64(-1)


@njit(forceinline=True)
def _lengths(block: Bytes, position: Int, end: Int) -> tuple[Int, Int, Int, Int]:
    """An entry's shared, unshared and value length, and the position after them, or -1."""
    start = position + 3
    # Nearly always all three are single bytes.
    if start <= end and (block[position] | block[position + 1] | block[position + 2]) < 0x80:
        return np.int64(block[position]), np.int64(block[position + 1]), np.int64(block[position + 2]), start
    unshared: Int = np.int64(0)
    length: Int = np.int64(0)
    shared, start = _varint(block, position, end)
    if start >= 0:
        unshared, start = _varint(block, start, end)
    if start >= 0:
        length, start = _varint(block, start, end)
    return shared, unshared, length, start


@njit
def decode_rows(
    block: Bytes,
    cursor: Numbers,
    last_key: Bytes,
    key_offsets: Numbers,
    keys: Bytes,
    value_offsets: Numbers,
    values: Bytes,
    trailers: Numbers,
) -> int:
    """Append rows of `block` to the columns, from where the cursor stands, until it ends or they are full.

    `last_key`, at least as long as the block, carries the user key from one call to the next. Offsets hold rows + 1
    numbers; `trailers` takes sequence number and type of every row, or has length 0: then only puts will do. Nothing
    outside of the arrays is touched whatever the block says.
    """
    if cursor[POSITION] < 0:
        cursor[POSITION] = cursor[KEY_LENGTH] = cursor[TRAILER] = 0
        cursor[END] = _entries_end(block)
        if cursor[END] < 0:
            return DAMAGED
    position, end, rows = cursor[POSITION], cursor[END], cursor[ROWS]
    key_at, key_length, trailer = address(last_key), cursor[KEY_LENGTH], np.uint64(cursor[TRAILER])
    block_at, keys_at, values_at = address(block), address(keys), address(values)
    key_end, value_end = key_offsets[rows], value_offsets[rows]
    result = DONE
    while position < end:
        shared, unshared, length, start = _lengths(block, position, end)
        size = shared + unshared - 8
        known = key_length + 8 if position else 0
        if start < 0 or shared > known or size < 0 or unshared + length > end - start:
            result = DAMAGED
            break
        if rows + 1 >= key_offsets.size or key_end + size + SLACK > keys.size or value_end + length > values.size:
            cursor[NEED_KEY], cursor[NEED_VALUE] = size + SLACK, length
            result = FULL
            break
        at = keys_at + key_end
        copy(at, key_at, min(shared, key_length))
        if shared > key_length:
            store(at + key_length, trailer)  # shared bytes reach into the trailer of the key before
        copy(at + shared, block_at + start, unshared)
        copy(values_at + value_end, block_at + start + unshared, length)
        key_at, key_length = at, size
        trailer = load(key_at + size)
        if trailers.size:
            trailers[rows] = trailer
        elif trailer & _LOW_BYTE != _PUT:
            result = NO_PUT
            break
        rows += 1
        key_end += size
        value_end += length
        key_offsets[rows], value_offsets[rows] = key_end, value_end
        position = start + unshared + length
    if result == FULL and key_at != address(last_key):
        copy(address(last_key), key_at, key_length)
    cursor[POSITION], cursor[ROWS], cursor[KEY_LENGTH], cursor[TRAILER] = position, rows, key_length, np.int64(trailer)
    return result
