"""Fields of ``kvrpcpb.RawBatchPutRequest`` and ``RawBatchDeleteRequest`` besides the context, serialized one by one.

A field of no bytes is left out, as protobuf does: what comes out is what it would write. Rows are [first, stop) of the
columns, and keys get a prefix. All sizes are added up before a byte is written.
"""

from __future__ import annotations

import numpy as np

from tikv_br.formats.columns import Bytes, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import U64, copy

TAG_ROW = 0x12  # RawBatchPutRequest.pairs = 2 and RawBatchDeleteRequest.keys = 2
TAG_KEY, TAG_VALUE = 0x12, 0x1A  # KvPair.key = 2 and .value = 3
MORE = 0x80


@njit(forceinline=True)
def _varint_size(number: int) -> int:
    size = 1
    while number >= MORE:
        number >>= 7
        size += 1
    return size


@njit(forceinline=True)
def _put_varint(out: Bytes, at: int, number: int) -> int:
    """Write a number at `at`; where it ends."""
    while number >= MORE:
        out[U64(at)] = np.uint8(number & 0x7F | MORE)
        number >>= 7
        at += 1
    out[U64(at)] = np.uint8(number)
    return at + 1


@njit(forceinline=True)
def _field_size(size: int) -> int:
    """Return the size of a field with `size` bytes of content."""
    return 1 + _varint_size(size) + size if size else 0


@njit(forceinline=True)
def _head(out: Bytes, at: int, tag: int, size: int) -> int:
    """Write tag and length of a field; where its bytes go."""
    out[U64(at)] = tag
    return _put_varint(out, at + 1, size)


@njit(forceinline=True)
def _key(out: Bytes, at: int, prefix: Bytes, data: Bytes, start: int, stop: int) -> int:
    """Write an RPC key; where it ends."""
    copy(out, at, prefix, 0, len(prefix))
    at += len(prefix)
    copy(out, at, data, start, stop - start)
    return at + stop - start


@njit
def pairs(
    key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes, prefix: Bytes, first: int, stop: int
) -> Bytes:
    """The field ``pairs`` of a put."""
    total = 0
    for row in range(first, stop):
        size = _field_size(len(prefix) + key_offsets[row + 1] - key_offsets[row])
        size += _field_size(value_offsets[row + 1] - value_offsets[row])
        total += 1 + _varint_size(size) + size
    out = np.empty(total, np.uint8)
    at = 0
    for row in range(first, stop):
        key_size = len(prefix) + key_offsets[row + 1] - key_offsets[row]
        value_size = value_offsets[row + 1] - value_offsets[row]
        at = _head(out, at, TAG_ROW, _field_size(key_size) + _field_size(value_size))
        if key_size:
            at = _head(out, at, TAG_KEY, key_size)
            at = _key(out, at, prefix, keys, key_offsets[row], key_offsets[row + 1])
        if value_size:
            at = _head(out, at, TAG_VALUE, value_size)
            copy(out, at, values, value_offsets[row], value_size)
            at += value_size
    return out


@njit
def names(key_offsets: Offsets, keys: Bytes, prefix: Bytes, first: int, stop: int) -> Bytes:
    """The field ``keys`` of a delete; here an empty key has a field as well, as all of a repeated one."""
    total = 0
    for row in range(first, stop):
        size = len(prefix) + key_offsets[row + 1] - key_offsets[row]
        total += 1 + _varint_size(size) + size
    out = np.empty(total, np.uint8)
    at = 0
    for row in range(first, stop):
        at = _head(out, at, TAG_ROW, len(prefix) + key_offsets[row + 1] - key_offsets[row])
        at = _key(out, at, prefix, keys, key_offsets[row], key_offsets[row + 1])
    return out


@njit
def packed(numbers: Numbers) -> Bytes:
    """Numbers one after the other, as in a packed field."""
    total = 0
    for index in range(len(numbers)):
        total += _varint_size(numbers[index])
    out = np.empty(total, np.uint8)
    at = 0
    for index in range(len(numbers)):
        at = _put_varint(out, at, numbers[index])
    return out
