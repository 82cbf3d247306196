"""Rows of the column families ``write`` and ``default``, by column: decoded, matched with each other, and encoded.

As in `tikv_br.formats.kernels.rows`, a decoder proves each length before it reads, and reports which row is invalid, and why.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tikv_br.formats.columns import Bytes, Flags, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import NOT_THERE, U64, copy, get_u64, get_varint
from tikv_br.formats.kernels.rows import GOOD, ZERO_EXPIRY, decode_keys, encode_keys
from tikv_br.formats.keys.codec import TS_SIZE
from tikv_br.formats.values import SHORT_VALUE

Spans = npt.NDArray[np.int64]
"""Start and size of each row's value, shape (rows, 2)."""

NO_TYPE = ZERO_EXPIRY + 1
NOT_A_ROW = NO_TYPE + 1
NO_START = NOT_A_ROW + 1
CUT_OFF = NO_START + 1
VALUE_OF_DELETE = CUT_OFF + 1

IN_DEFAULT = -1

_PUT, _DELETE, _LOCK, _ROLLBACK = ord("P"), ord("D"), ord("L"), ord("R")
_VALUE, _OVERLAPPED, _FENCE, _LAST_CHANGE, _SOURCE = ord("v"), ord("R"), ord("F"), ord("l"), ord("S")


@njit
def decode_txn_keys(offsets: Offsets, data: Bytes, prefix: Bytes) -> tuple[int, int, Offsets, Bytes, Numbers]:
    """User keys and ts of data keys: (wrong row, reason or `GOOD`, offsets, data, ts)."""
    return decode_keys(offsets, data, prefix, len(prefix))


@njit(forceinline=True)
def _byte(data: Bytes, at: int) -> int:
    return np.int64(data[U64(at)])  # type: ignore[return-value]


@njit(forceinline=True)
def _skip_field(data: Bytes, field: int, at: int, stop: int) -> int:
    """Return the end of a field whose contents begin at `at`; `NOT_THERE` if they do not end before `stop`."""
    if field == _OVERLAPPED:
        return at
    if field == _VALUE:
        at += 1 + _byte(data, at) if at < stop else 1
    elif field == _SOURCE:
        return get_varint(data, at, stop)[1]
    else:
        at += TS_SIZE
    if at > stop:
        return NOT_THERE
    return get_varint(data, at, stop)[1] if field == _LAST_CHANGE else at


@njit
def decode_records(offsets: Offsets, data: Bytes) -> tuple[int, int, Numbers, Numbers, Spans, Flags]:
    """Write records: (wrong row, reason or `GOOD`, start ts, GC fences, spans of short values, whether it is a delete).

    Start `IN_DEFAULT`: the value is in ``default``. Fence 0: none. As stores do, it ignores what follows an unknown field.
    """
    rows = len(offsets) - 1
    start_ts, fences = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
    spans, deleted = np.zeros((rows, 2), np.int64), np.zeros(rows, np.bool_)
    for row in range(rows):
        at, stop = offsets[row], offsets[row + 1]
        kind = _byte(data, at) if at < stop else 0
        if kind != _PUT and kind != _DELETE:  # noqa: PLR1714 - numba would build a set
            is_other = kind == _LOCK or kind == _ROLLBACK  # noqa: PLR1714
            return row, NOT_A_ROW if is_other else NO_TYPE, start_ts, fences, spans, deleted
        start_ts[row], at = get_varint(data, at + 1, stop)
        if at == NOT_THERE:
            return row, NO_START, start_ts, fences, spans, deleted
        deleted[row] = kind == _DELETE
        spans[row, 0] = stop if deleted[row] else IN_DEFAULT
        while at < stop:
            field, at = _byte(data, at), at + 1
            known = field == _VALUE or field == _OVERLAPPED or field == _FENCE  # noqa: PLR1714
            if not known and field != _LAST_CHANGE and field != _SOURCE:  # noqa: PLR1714
                break
            end = _skip_field(data, field, at, stop)
            if end == NOT_THERE:
                return row, CUT_OFF, start_ts, fences, spans, deleted
            if field == _VALUE:
                spans[row, 0], spans[row, 1] = at + 1, end - at - 1
            elif field == _FENCE:
                fences[row] = get_u64(data, at)
            at = end
        if deleted[row] and spans[row, 1]:
            return row, VALUE_OF_DELETE, start_ts, fences, spans, deleted
    return 0, GOOD, start_ts, fences, spans, deleted


@njit
def first_mismatch(
    offsets: Offsets, data: Bytes, start_ts: Numbers, rows: Offsets, other_offsets: Offsets, other: Bytes
) -> tuple[int, int]:
    """Compare data keys of ``write``, at these rows and with start ts, with the data keys of ``default``, one by one.

    Returns the first index at which they differ and the sign of the key of ``write`` minus the other; sign 0 = all are equal.
    The keys were checked by `decode_txn_keys`.
    """
    for index in range(len(rows)):
        at, since = offsets[rows[index]], other_offsets[index]
        size = offsets[rows[index] + 1] - TS_SIZE - at
        other_size = other_offsets[index + 1] - TS_SIZE - since
        for place in range(min(size, other_size)):
            byte, other_byte = data[U64(at + place)], other[U64(since + place)]
            if byte != other_byte:
                return index, 1 if byte > other_byte else -1
        if size != other_size:
            return index, 1 if size > other_size else -1
        ts, other_ts = start_ts[rows[index]], ~get_u64(other, since + size)
        if ts != other_ts:
            return index, 1 if ts < other_ts else -1
    return 0, 0


@njit
def gather_values(spans: Spans, short: Bytes, long_offsets: Offsets, long: Bytes) -> tuple[Offsets, Bytes]:
    """Values by their spans in `short`, or the next one of `long`: (offsets, data)."""
    rows, taken = len(spans), 0
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        size = spans[row, 1]
        if spans[row, 0] == IN_DEFAULT:
            size = long_offsets[taken + 1] - long_offsets[taken]
            taken += 1
        ends[row + 1] = ends[row] + size
    out = np.empty(ends[rows], np.uint8)
    taken = 0
    for row in range(rows):
        if spans[row, 0] == IN_DEFAULT:
            copy(out, ends[row], long, long_offsets[taken], ends[row + 1] - ends[row])
            taken += 1
        else:
            copy(out, ends[row], short, spans[row, 0], spans[row, 1])
    return ends, out


@njit
def encode_txn_keys(offsets: Offsets, data: Bytes, prefix: Bytes, ts: Numbers) -> tuple[Offsets, Bytes]:
    """Data keys: ``z``, MCE(prefix + user key), ~ts big endian."""
    return encode_keys(offsets, data, prefix, len(prefix), ts, U64(0))


@njit
def encode_records(offsets: Offsets, data: Bytes, start_ts: Numbers, deleted: Flags) -> tuple[Offsets, Bytes]:
    """Write records of values, or of deletes: type, start ts, and the value if it is short."""
    rows = len(offsets) - 1
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        size, number = 2, start_ts[row] >> U64(7)
        while number:
            size, number = size + 1, number >> U64(7)
        length = offsets[row + 1] - offsets[row]
        if not deleted[row] and length <= SHORT_VALUE:
            size += 2 + length
        ends[row + 1] = ends[row] + size
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        at, number = ends[row] + 1, start_ts[row]
        out[ends[row]] = np.uint8(_DELETE if deleted[row] else _PUT)
        while number >> U64(7):
            out[at] = np.uint8(number & U64(0x7F) | U64(0x80))
            at, number = at + 1, number >> U64(7)
        out[at] = np.uint8(number)
        length = offsets[row + 1] - offsets[row]
        if not deleted[row] and length <= SHORT_VALUE:
            out[at + 1], out[at + 2] = np.uint8(_VALUE), np.uint8(length)
            copy(out, at + 3, data, offsets[row], length)
    return ends, out
