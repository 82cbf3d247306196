"""Keys and values between their user and storage forms, by column.

A decoder first measures, proving each length before it reads, and reports which row is invalid, and why; only then is
anything copied. All offsets have shape (rows + 1,); what is returned starts at 0.
"""

from __future__ import annotations

import numpy as np

from tikv_br.formats.columns import Bytes, Flags, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import copy, get_u64, put_u64
from tikv_br.formats.keys.codec import ENCODED_GROUP, FULL, GROUP, PREFIX_SIZE, TS_SIZE
from tikv_br.formats.values import EXPIRE_SIZE, FLAG_DELETED, FLAG_EXPIRE

Z = np.uint8(ord("z"))
FILL = np.uint8(FULL)

GOOD = 0
NO_DATA_PREFIX = 1
BAD_LENGTH = 2
BAD_MARKER = 3
BAD_PADDING = 4
OTHER_KEYSPACE = 5
BAD_TS = 6
NO_FLAGS = 7
BAD_FLAGS = 8
NO_EXPIRY = 9
ZERO_EXPIRY = 10


@njit
def add_data_prefix(offsets: Offsets, data: Bytes) -> tuple[Offsets, Bytes]:
    """Storage keys before V2: ``z`` and the user key."""
    rows = len(offsets) - 1
    ends = np.empty(rows + 1, np.int64)
    for row in range(rows + 1):
        ends[row] = offsets[row] - offsets[0] + row
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        out[ends[row]] = Z
        copy(out, ends[row] + 1, data, offsets[row], offsets[row + 1] - offsets[row])
    return ends, out


@njit
def strip_data_prefix(offsets: Offsets, data: Bytes) -> tuple[int, int, Offsets, Bytes]:
    """User keys before V2: (wrong row, reason or `GOOD`, offsets, data)."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        if offsets[row + 1] == offsets[row] or data[offsets[row]] != Z:
            return row, NO_DATA_PREFIX, ends, np.empty(0, np.uint8)
        ends[row + 1] = offsets[row + 1] - offsets[0] - row - 1
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, offsets[row] + 1, ends[row + 1] - ends[row])
    return 0, GOOD, ends, out


@njit(forceinline=True)
def _encode_key(out: Bytes, at: int, prefix: Bytes, prefix_size: int, data: Bytes, start: int, stop: int) -> int:
    """Write the MCE of prefix, of less than a group, and user key; returns where it ends."""
    copy(out, at, prefix, 0, prefix_size)
    first, filled = GROUP - prefix_size, prefix_size
    if stop - start >= first:
        copy(out, at + prefix_size, data, start, first)
        out[at + GROUP] = FILL
        at, start, filled = at + ENCODED_GROUP, start + first, 0
    while stop - start >= GROUP:
        put_u64(out, at, get_u64(data, start))
        out[at + GROUP] = FILL
        at, start = at + ENCODED_GROUP, start + GROUP
    copy(out, at + filled, data, start, stop - start)
    filled += stop - start
    for index in range(filled, GROUP):
        out[at + index] = 0
    out[at + GROUP] = np.uint8(FULL - GROUP + filled)
    return at + ENCODED_GROUP


@njit(forceinline=True)
def encode_keys(
    offsets: Offsets, data: Bytes, prefix: Bytes, prefix_size: int, ts: Numbers, default_ts: np.uint64
) -> tuple[Offsets, Bytes]:
    """Storage keys with timestamps: ``z``, MCE(prefix + user key), ~ts big endian; a ts of 0 becomes `default_ts`."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        size = prefix_size + offsets[row + 1] - offsets[row]
        ends[row + 1] = ends[row] + 1 + (size // GROUP + 1) * ENCODED_GROUP + TS_SIZE
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        out[ends[row]] = Z
        at = _encode_key(out, ends[row] + 1, prefix, prefix_size, data, offsets[row], offsets[row + 1])
        put_u64(out, at, ~(ts[row] or default_ts))
    return ends, out


@njit
def encode_v2_keys(
    offsets: Offsets, data: Bytes, prefix: Bytes, ts: Numbers, default_ts: np.uint64
) -> tuple[Offsets, Bytes]:
    """As `encode_keys`, for the size of prefixes in V2, which makes it faster."""
    return encode_keys(offsets, data, prefix, PREFIX_SIZE, ts, default_ts)


@njit(forceinline=True)
def _check_groups(data: Bytes, start: int, last: int) -> tuple[int, int]:
    """(reason or `GOOD`, padding) of the groups from `start` to the one at `last`, all of them within `data`."""
    for marker in range(start + GROUP, last, ENCODED_GROUP):
        if data[marker] != FILL:
            return BAD_MARKER, 0
    padding = FULL - int(data[last + GROUP])
    if padding < 1 or padding > GROUP:
        return BAD_MARKER, 0
    for index in range(last + GROUP - padding, last + GROUP):
        if data[index]:
            return BAD_PADDING, 0
    return GOOD, padding


@njit(forceinline=True)
def check_versioned_key(data: Bytes, start: int, stop: int, prefix: Bytes, prefix_size: int) -> tuple[int, int]:
    """(reason or `GOOD`, size of the user key) of one storage key with a timestamp."""
    if stop == start or data[start] != Z:
        return NO_DATA_PREFIX, 0
    groups, rest = divmod(stop - start - 1 - TS_SIZE, ENCODED_GROUP)
    if groups < 1 or rest:
        return BAD_LENGTH, 0
    reason, padding = _check_groups(data, start + 1, start + 1 + (groups - 1) * ENCODED_GROUP)
    if reason != GOOD:
        return reason, 0
    size = groups * GROUP - padding - prefix_size
    if size < 0:
        return OTHER_KEYSPACE, 0
    for index in range(prefix_size):
        if data[start + 1 + index] != prefix[index]:
            return OTHER_KEYSPACE, 0
    return GOOD, size


@njit(forceinline=True)
def _decode_key(out: Bytes, at: int, size: int, data: Bytes, start: int, prefix_size: int) -> None:
    """Copy the user key of a checked storage key whose groups begin at `start`."""
    first = min(size, GROUP - prefix_size)
    copy(out, at, data, start + prefix_size, first)
    at, stop, start = at + first, at + size, start + ENCODED_GROUP
    while stop - at >= GROUP:
        put_u64(out, at, get_u64(data, start))
        at, start = at + GROUP, start + ENCODED_GROUP
    copy(out, at, data, start, stop - at)


@njit(forceinline=True)
def decode_keys(
    offsets: Offsets, data: Bytes, prefix: Bytes, prefix_size: int
) -> tuple[int, int, Offsets, Bytes, Numbers]:
    """User keys and ts of storage keys with timestamps: (wrong row, reason or `GOOD`, offsets, data, ts)."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    ts = np.empty(rows, np.uint64)
    for row in range(rows):
        reason, size = check_versioned_key(data, offsets[row], offsets[row + 1], prefix, prefix_size)
        if reason == GOOD:
            ts[row] = ~get_u64(data, offsets[row + 1] - TS_SIZE)
            reason = GOOD if ts[row] else BAD_TS
        if reason != GOOD:
            return row, reason, ends, np.empty(0, np.uint8), ts
        ends[row + 1] = ends[row] + size
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        _decode_key(out, ends[row], ends[row + 1] - ends[row], data, offsets[row] + 1, prefix_size)
    return 0, GOOD, ends, out, ts


@njit
def decode_v2_keys(offsets: Offsets, data: Bytes, prefix: Bytes) -> tuple[int, int, Offsets, Bytes, Numbers]:
    """As `decode_keys`, for the size of prefixes in V2, which makes it faster."""
    return decode_keys(offsets, data, prefix, PREFIX_SIZE)


@njit
def encode_v1ttl_values(offsets: Offsets, data: Bytes, expire_ts: Numbers) -> tuple[Offsets, Bytes]:
    """Stored values of V1TTL: value, expiry big endian."""
    rows = len(offsets) - 1
    ends = np.empty(rows + 1, np.int64)
    for row in range(rows + 1):
        ends[row] = offsets[row] - offsets[0] + row * EXPIRE_SIZE
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, offsets[row], offsets[row + 1] - offsets[row])
        put_u64(out, ends[row + 1] - EXPIRE_SIZE, expire_ts[row])
    return ends, out


@njit
def decode_v1ttl_values(offsets: Offsets, data: Bytes) -> tuple[int, int, Offsets, Bytes, Numbers]:
    """User values and expiries of V1TTL: (wrong row, reason or `GOOD`, offsets, data, expire_ts)."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    expire_ts = np.empty(rows, np.uint64)
    for row in range(rows):
        if offsets[row + 1] - offsets[row] < EXPIRE_SIZE:
            return row, NO_EXPIRY, ends, np.empty(0, np.uint8), expire_ts
        expire_ts[row] = get_u64(data, offsets[row + 1] - EXPIRE_SIZE)
        ends[row + 1] = offsets[row + 1] - offsets[0] - (row + 1) * EXPIRE_SIZE
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, offsets[row], ends[row + 1] - ends[row])
    return 0, GOOD, ends, out, expire_ts


@njit
def encode_v2_values(offsets: Offsets, data: Bytes, expire_ts: Numbers, deleted: Flags) -> tuple[Offsets, Bytes]:
    """Stored values of V2: value, expiry big endian if there is one, flags."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        tail = 1 + (EXPIRE_SIZE if expire_ts[row] else 0)
        ends[row + 1] = ends[row] + offsets[row + 1] - offsets[row] + tail
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, offsets[row], offsets[row + 1] - offsets[row])
        stop = ends[row + 1] - 1
        out[stop] = np.uint8((FLAG_EXPIRE if expire_ts[row] else 0) | (FLAG_DELETED if deleted[row] else 0))
        if expire_ts[row]:
            put_u64(out, stop - EXPIRE_SIZE, expire_ts[row])
    return ends, out


@njit(forceinline=True)
def check_v2_value(data: Bytes, start: int, stop: int) -> tuple[int, int, np.uint64]:
    """(reason or `GOOD`, bytes after the user value, expiry) of one stored value."""
    if stop == start:
        return NO_FLAGS, 0, np.uint64(0)
    flags = np.int64(data[stop - 1])
    if flags > FLAG_EXPIRE | FLAG_DELETED:
        return BAD_FLAGS, 0, np.uint64(0)
    if not flags & FLAG_EXPIRE:
        return GOOD, 1, np.uint64(0)
    if stop - start < 1 + EXPIRE_SIZE:
        return NO_EXPIRY, 0, np.uint64(0)
    expiry = get_u64(data, stop - 1 - EXPIRE_SIZE)
    return (GOOD if expiry else ZERO_EXPIRY), 1 + EXPIRE_SIZE, expiry


@njit
def decode_v2_values(offsets: Offsets, data: Bytes) -> tuple[int, int, Offsets, Bytes, Numbers, Flags]:
    """User values of V2: (wrong row, reason or `GOOD`, offsets, data, expire_ts, deleted)."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    expire_ts = np.empty(rows, np.uint64)
    deleted = np.empty(rows, np.bool_)
    for row in range(rows):
        reason, tail, expire_ts[row] = check_v2_value(data, offsets[row], offsets[row + 1])
        if reason != GOOD:
            return row, reason, ends, np.empty(0, np.uint8), expire_ts, deleted
        deleted[row] = data[offsets[row + 1] - 1] & FLAG_DELETED != 0
        ends[row + 1] = ends[row] + offsets[row + 1] - offsets[row] - tail
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, offsets[row], ends[row + 1] - ends[row])
    return 0, GOOD, ends, out, expire_ts, deleted
