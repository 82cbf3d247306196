"""A serialized ``kvrpcpb.RawScanResponse`` taken apart.

Of the message only this is known: ``kvs`` = 2, repeated, of pairs with ``key`` = 2 and then ``value`` = 3, either left
out when empty. `measure` walks all of it, with every length compared with the remaining bytes, before `split` reads a byte of
a key.
"""

from __future__ import annotations

import numpy as np

from tikv_br.formats.columns import Bytes, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, copy, load_byte

TAG_PAIR = 0x12  # RawScanResponse.kvs = 2, length-delimited
TAG_KEY = 0x12  # KvPair.key = 2
TAG_VALUE = 0x1A  # KvPair.value = 3
MORE = 0x80
PAYLOAD = 0x7F
MAX_SHIFT = 56  # eight groups of 7 bits: longer lengths cannot be, and other forms of shorter ones are left to protobuf
NOT_THERE = -1


@njit(forceinline=True)
def _length(data: Int, at: Int, stop: Int) -> tuple[Int, Int]:
    """Parse a length at `at`; returns it and the address behind it. The length is `NOT_THERE` if so many bytes do not fit before `stop`."""
    number = np.int64(0)
    for shift in range(0, MAX_SHIFT, 7):
        if at >= stop:
            return NOT_THERE, at
        byte = np.int64(load_byte(data + at))
        at += 1
        number |= (byte & PAYLOAD) << shift
        if not byte & MORE:
            return (number if number <= stop - at else NOT_THERE), at
    return NOT_THERE, at


@njit(forceinline=True)
def _field(data: Int, at: Int, stop: Int, tag: Int) -> tuple[Int, Int]:
    """Size and start of the field at `at`, if it has this tag; else size 0, and `at`."""
    if at >= stop or load_byte(data + at) != tag:
        return np.int64(0), at
    return _length(data, at + 1, stop)


@njit(forceinline=True)
def next_pair(data: Int, size: Int, at: Int) -> tuple[Int, Int, Int, Int, Int]:
    """(end of the pair at `at`, start and size of its key, start and size of its value), of `size` bytes at an address.

    The end is `NOT_THERE` when anything else is there.
    """
    nothing = np.int64(0)
    if at >= size or load_byte(data + at) != TAG_PAIR:
        return NOT_THERE, nothing, nothing, nothing, nothing
    length, at = _length(data, at + 1, size)
    if length == NOT_THERE:
        return NOT_THERE, nothing, nothing, nothing, nothing
    stop = at + length
    key_size, key = _field(data, at, stop, TAG_KEY)
    if key_size == NOT_THERE:
        return NOT_THERE, nothing, nothing, nothing, nothing
    value_size, value = _field(data, key + key_size, stop, TAG_VALUE)
    if value_size == NOT_THERE or value + value_size != stop:
        return NOT_THERE, nothing, nothing, nothing, nothing
    return stop, key, key_size, value, value_size


@njit
def measure(data: Bytes) -> tuple[Int, Int, Int, Int, Int, tuple[Int, Int], tuple[Int, Int]]:
    """(pairs, bytes of keys, bytes of values, longest key, longest key and value, start and size of the first and the last key).

    The pairs are `NOT_THERE` when anything else is in the message.
    """
    pairs: Int = np.int64(0)
    key_bytes: Int = np.int64(0)
    value_bytes: Int = np.int64(0)
    longest_key: Int = np.int64(0)
    longest: Int = np.int64(0)
    at: Int = np.int64(0)
    key, key_size = at, at
    first = (key, key_size)
    base, size = address(data), data.size
    while at < size:
        at, key, key_size, _, value_size = next_pair(base, size, at)
        if at == NOT_THERE:
            return NOT_THERE, key_bytes, value_bytes, longest_key, longest, first, first
        if not pairs:
            first = (key, key_size)
        pairs += 1
        key_bytes += key_size
        value_bytes += value_size
        longest_key = max(longest_key, key_size)
        longest = max(longest, key_size + value_size)
    return pairs, key_bytes, value_bytes, longest_key, longest, first, (key, key_size)


@njit
def split(data: Bytes, pairs: int, key_bytes: int, value_bytes: int) -> tuple[Offsets, Bytes, Offsets, Bytes]:
    """Key and value columns of a measured message: offsets, shape (pairs + 1,), and data of each."""
    key_ends, value_ends = np.zeros(pairs + 1, np.int64), np.zeros(pairs + 1, np.int64)
    keys, values = np.empty(key_bytes, np.uint8), np.empty(value_bytes, np.uint8)
    base, size = address(data), data.size
    at: Int = np.int64(0)
    key_at, value_at = address(keys), address(values)
    for row in range(pairs):
        at, key, key_size, value, value_size = next_pair(base, size, at)
        copy(key_at + key_ends[row], base + key, key_size)
        key_ends[row + 1] = key_ends[row] + key_size
        copy(value_at + value_ends[row], base + value, value_size)
        value_ends[row + 1] = value_ends[row] + value_size
    return key_ends, keys, value_ends, values
