"""A serialized ``kvrpcpb.RawScanResponse`` taken apart.

Of the message only this is known: ``kvs`` = 2, repeated, of pairs with ``key`` = 2 and then ``value`` = 3, either left
out when empty. `measure` walks all of it, with every length compared with what is left, before `split` reads a byte of
a key.
"""

from __future__ import annotations

import numpy as np

from formats.columns import Bytes, Offsets
from formats.jit import njit
from formats.kernels.memory import U64, copy

TAG_PAIR = 0x12  # RawScanResponse.kvs = 2, length-delimited
TAG_KEY = 0x12  # KvPair.key = 2
TAG_VALUE = 0x1A  # KvPair.value = 3
MORE = 0x80
PAYLOAD = 0x7F
MAX_SHIFT = 56  # eight groups of 7 bits: longer lengths cannot be, and other forms of shorter ones are left to protobuf
NOT_THERE = -1


@njit(forceinline=True)
def _length(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """The length written at `at`, and where what it measures begins; `NOT_THERE` when that is not all before `stop`."""
    number = 0
    for shift in range(0, MAX_SHIFT, 7):
        if at >= stop:
            return NOT_THERE, at
        byte = int(data[U64(at)])
        at += 1
        number |= (byte & PAYLOAD) << shift
        if not byte & MORE:
            return (number if number <= stop - at else NOT_THERE), at
    return NOT_THERE, at


@njit(forceinline=True)
def _field(data: Bytes, at: int, stop: int, tag: int) -> tuple[int, int]:
    """Size and start of the field of this tag at `at`; size 0 at `at` itself when another tag or the end is there."""
    if at >= stop or data[U64(at)] != tag:
        return 0, at
    return _length(data, at + 1, stop)


@njit(forceinline=True)
def _pair(data: Bytes, at: int) -> tuple[int, int, int, int, int]:
    """(end of the pair, start and size of its key, start and size of its value); the end is `NOT_THERE` if unexpected."""
    size, at = _field(data, at, len(data), TAG_PAIR)
    if size == NOT_THERE:
        return NOT_THERE, 0, 0, 0, 0
    stop = at + size
    key_size, key = _field(data, at, stop, TAG_KEY)
    if key_size == NOT_THERE:
        return NOT_THERE, 0, 0, 0, 0
    value_size, value = _field(data, key + key_size, stop, TAG_VALUE)
    if value_size == NOT_THERE or value + value_size != stop:
        return NOT_THERE, 0, 0, 0, 0
    return stop, key, key_size, value, value_size


@njit
def measure(data: Bytes) -> tuple[int, int, int]:
    """(pairs, bytes of keys, bytes of values); the pairs are `NOT_THERE` when anything else is in the message."""
    pairs = key_bytes = value_bytes = at = 0
    while at < len(data):
        if data[U64(at)] != TAG_PAIR:
            return NOT_THERE, 0, 0
        at, _, key_size, _, value_size = _pair(data, at)
        if at == NOT_THERE:
            return NOT_THERE, 0, 0
        pairs += 1
        key_bytes += key_size
        value_bytes += value_size
    return pairs, key_bytes, value_bytes


@njit
def split(data: Bytes, pairs: int, key_bytes: int, value_bytes: int) -> tuple[Offsets, Bytes, Offsets, Bytes]:
    """Key and value columns of a measured message: offsets, shape (pairs + 1,), and data of each."""
    key_ends, value_ends = np.zeros(pairs + 1, np.int64), np.zeros(pairs + 1, np.int64)
    keys, values = np.empty(key_bytes, np.uint8), np.empty(value_bytes, np.uint8)
    at = 0
    for row in range(pairs):
        at, key, key_size, value, value_size = _pair(data, at)
        end = key_ends[row]
        copy(keys, end, data, key, key_size)
        key_ends[row + 1] = end + key_size
        end = value_ends[row]
        copy(values, end, data, value, value_size)
        value_ends[row + 1] = end + value_size
    return key_ends, keys, value_ends, values
