"""Fields of ``kvrpcpb.RawBatchPutRequest`` and ``RawBatchDeleteRequest`` besides the context, serialized one by one.

A field of no bytes is left out, as protobuf does: what comes out is what it would write. Rows are [first, stop) of the
columns, and keys get a prefix. All sizes are added up before a byte is written.
"""

from __future__ import annotations

import numpy as np

from tikv_br.formats.columns import Bytes, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, copy, put_varint, store_byte, varint_size

TAG_ROW = 0x12  # RawBatchPutRequest.pairs = 2 and RawBatchDeleteRequest.keys = 2
TAG_KEY, TAG_VALUE = 0x12, 0x1A  # KvPair.key = 2 and .value = 3


@njit(forceinline=True)
def _field_size(size: Int) -> Int:
    """Return the size of a field with `size` bytes of content."""
    return 1 + varint_size(size) + size if size else np.int64(0)


@njit(forceinline=True)
def _head(at: Int, tag: Int, size: Int) -> Int:
    """Write tag and length of a field; where its bytes go."""
    store_byte(at, tag)
    return put_varint(at + 1, size)


@njit(forceinline=True)
def _key(at: Int, prefix: Bytes, key: Int, size: Int) -> Int:
    """Write an RPC key, of the prefix and a user key at an address; where it ends."""
    copy(at, address(prefix), prefix.size)
    copy(at + prefix.size, key, size)
    return at + prefix.size + size


@njit
def pairs(
    key_offsets: Offsets, keys: Bytes, value_offsets: Offsets, values: Bytes, prefix: Bytes, first: int, stop: int
) -> Bytes:
    """The field ``pairs`` of a put."""
    total: Int = np.int64(0)
    for row in range(first, stop):
        size = _field_size(prefix.size + key_offsets[row + 1] - key_offsets[row])
        size += _field_size(value_offsets[row + 1] - value_offsets[row])
        total += 1 + varint_size(size) + size
    out = np.empty(total, np.uint8)
    keys_at, values_at = address(keys), address(values)
    at: Int = address(out)
    for row in range(first, stop):
        key_size, value_size = key_offsets[row + 1] - key_offsets[row], value_offsets[row + 1] - value_offsets[row]
        rpc_size = prefix.size + key_size
        at = _head(at, TAG_ROW, _field_size(rpc_size) + _field_size(value_size))
        if rpc_size:
            at = _key(_head(at, TAG_KEY, rpc_size), prefix, keys_at + key_offsets[row], key_size)
        if value_size:
            at = _head(at, TAG_VALUE, value_size)
            copy(at, values_at + value_offsets[row], value_size)
            at += value_size
    return out


@njit
def names(key_offsets: Offsets, keys: Bytes, prefix: Bytes, first: int, stop: int) -> Bytes:
    """The field ``keys`` of a delete; here an empty key has a field as well, as all of a repeated one."""
    total: Int = np.int64(0)
    for row in range(first, stop):
        size = prefix.size + key_offsets[row + 1] - key_offsets[row]
        total += 1 + varint_size(size) + size
    out = np.empty(total, np.uint8)
    keys_at = address(keys)
    at: Int = address(out)
    for row in range(first, stop):
        size = key_offsets[row + 1] - key_offsets[row]
        at = _key(_head(at, TAG_ROW, prefix.size + size), prefix, keys_at + key_offsets[row], size)
    return out


@njit
def packed(numbers: Numbers) -> Bytes:
    """Numbers one after the other, as in a packed field."""
    total: Int = np.int64(0)
    for index in range(len(numbers)):
        total += varint_size(numbers[index])
    out = np.empty(total, np.uint8)
    at: Int = address(out)
    for index in range(len(numbers)):
        at = put_varint(at, numbers[index])
    return out
