"""A serialized ``cdcpb.ChangeDataEvent`` taken apart.

Known are events of rows (``entries``), of the older form of resolved-ts, and the ``resolved_ts`` of many regions, with
their fields in any order, each at most once where it holds a message. Everything else, errors too, is left to protobuf.

`walk` goes through the message with tables that most messages fit into, and a second time with larger ones where they
did not. In the first walk, what does not fit overwrites the last line of a table, and is only counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tikv_br.formats.columns import Bytes, Flags, Numbers, Offsets
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.memory import NOT_THERE, U64, copy, get_varint

Table = npt.NDArray[np.uint64]

TAG_EVENT, TAG_RESOLVED = 0x0A, 0x12  # ChangeDataEvent
TAG_REGION_ID, TAG_INDEX, TAG_REQUEST_ID = 0x08, 0x10, 0x38  # Event
TAG_ENTRIES, TAG_EVENT_RESOLVED = 0x1A, 0x30
TAG_ROW = 0x0A  # Entries
TAG_START_TS, TAG_COMMIT_TS, TAG_TYPE, TAG_OP, TAG_KEY, TAG_VALUE, TAG_EXPIRE = 0x08, 0x10, 0x18, 0x20, 0x2A, 0x32, 0x40
TAG_REGIONS_PACKED, TAG_REGIONS, TAG_TS, TAG_RESOLVED_REQUEST = 0x0A, 0x08, 0x10, 0x18  # ResolvedTs

COMMITTED, INITIALIZED = 4, 5
PUT, DELETE = 1, 2

REGION, REQUEST, RESOLVED, IS_INITIALIZED, FIRST_ROW, EVENT_COLUMNS = 0, 1, 2, 3, 4, 5
TS, EXPIRE, OP, KEY, KEY_SIZE, VALUE, VALUE_SIZE, TYPE, START_TS, ROW_COLUMNS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9


@njit(forceinline=True)
def _signed(number: np.uint64) -> int:
    """A number below 2^63 as one that may be subtracted from; mixed with signed ones, numba makes it a float."""
    return np.int64(number)  # type: ignore[return-value]


@njit(forceinline=True)
def _field(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """Return start and end of the bytes field whose length is at `at`; end `NOT_THERE` = beyond `stop`."""
    size, at = get_varint(data, at, stop)
    if at == NOT_THERE or size > U64(stop - at):
        return at, NOT_THERE
    return at, at + _signed(size)


@njit(forceinline=True)
def _number_column(tag: int) -> int:
    """Return the column of a number with this tag; `NOT_THERE` for other tags."""
    if tag == TAG_COMMIT_TS:
        return TS
    if tag == TAG_EXPIRE:
        return EXPIRE
    if tag == TAG_TYPE:
        return TYPE
    if tag == TAG_OP:
        return OP
    return START_TS if tag == TAG_START_TS else NOT_THERE


@njit
def _row(data: Bytes, at: int, stop: int, row: Numbers) -> int:
    """Take a row in [at, stop) into its line of the table: its ``type``, or `NOT_THERE` when it is an unexpected one."""
    row[:] = 0
    while at < stop:
        tag = data[U64(at)]
        if tag == TAG_KEY or tag == TAG_VALUE:  # noqa: PLR1714, SIM109 - numba would build a set
            start, at = _field(data, at + 1, stop)
            if at == NOT_THERE:
                return NOT_THERE
            column = KEY if tag == TAG_KEY else VALUE
            row[column], row[column + 1] = start, at - start
        else:
            column = _number_column(tag)
            number, at = get_varint(data, at + 1, stop)
            if NOT_THERE in (at, column):
                return NOT_THERE
            row[column] = number
    if row[TYPE] == INITIALIZED:
        return INITIALIZED
    known = row[OP] == PUT or row[OP] == DELETE
    return COMMITTED if row[TYPE] == COMMITTED and known else NOT_THERE


@njit
def _entries(data: Bytes, at: int, stop: int, rows: Table, count: int, event: Numbers) -> int:
    """Take the rows in [at, stop), the first as number `count`; the number after the last, or `NOT_THERE`."""
    while at < stop:
        if data[U64(at)] != TAG_ROW:
            return NOT_THERE
        start, at = _field(data, at + 1, stop)
        if at == NOT_THERE:
            return NOT_THERE
        kind = _row(data, start, at, rows[min(count, len(rows) - 1)])
        if kind == INITIALIZED:
            event[IS_INITIALIZED] = 1
        elif kind == COMMITTED:
            count += 1
        else:
            return NOT_THERE
    return count


@njit
def _event(data: Bytes, at: int, stop: int, rows: Table, count: int, event: Numbers) -> int:
    """Parse a whole event like `_entries`, including the event's own fields."""
    event[:] = 0
    event[FIRST_ROW] = count
    contents = 0
    while at < stop:
        tag = data[U64(at)]
        if tag == TAG_ENTRIES:
            start, at = _field(data, at + 1, stop)
            if at == NOT_THERE:
                return NOT_THERE
            count = _entries(data, start, at, rows, count, event)
            if count == NOT_THERE:
                return NOT_THERE
            contents += 1
            continue
        number, at = get_varint(data, at + 1, stop)
        if at == NOT_THERE:
            return NOT_THERE
        if tag == TAG_REGION_ID:
            event[REGION] = number
        elif tag == TAG_REQUEST_ID:
            event[REQUEST] = number
        elif tag == TAG_EVENT_RESOLVED:
            event[RESOLVED] = number
            contents += 1
        elif tag != TAG_INDEX:
            return NOT_THERE
    return count if contents <= 1 else NOT_THERE


@njit
def _resolved(data: Bytes, at: int, stop: int, regions: Numbers, head: Numbers) -> int:
    """Take the resolved-ts of many regions into `regions` and (ts, request) into `head`: the number of regions."""
    count = 0
    while at < stop:
        tag = data[U64(at)]
        packed_stop = stop
        if tag == TAG_REGIONS_PACKED:
            at, packed_stop = _field(data, at + 1, stop)
            if packed_stop == NOT_THERE:
                return NOT_THERE
        else:
            at += 1
        while tag != TAG_REGIONS_PACKED or at < packed_stop:
            number, at = get_varint(data, at, packed_stop)
            if at == NOT_THERE:
                return NOT_THERE
            if tag == TAG_REGIONS_PACKED or tag == TAG_REGIONS:  # noqa: PLR1714, SIM109 - numba would build a set
                regions[min(count, len(regions) - 1)] = number
                count += 1
            elif tag == TAG_TS:
                head[0] = number
            elif tag == TAG_RESOLVED_REQUEST:
                head[1] = number
            else:
                return NOT_THERE
            if tag != TAG_REGIONS_PACKED:
                break
    return count


@njit
def walk(data: Bytes, events: Table, rows: Table, regions: Numbers, head: Numbers) -> tuple[int, int, int]:
    """Numbers of (events, rows, regions of the resolved-ts); the first is `NOT_THERE` when anything else is found.

    Each table has one line more than it takes up: the last is scribbled on.
    """
    at, event_count, row_count, region_count = 0, 0, 0, NOT_THERE
    while at < len(data):
        tag = data[U64(at)]
        start, at = _field(data, at + 1, len(data))
        if at == NOT_THERE:
            return NOT_THERE, 0, 0
        if tag == TAG_EVENT:
            row_count = _event(data, start, at, rows, row_count, events[min(event_count, len(events) - 1)])
            event_count += 1
        elif tag == TAG_RESOLVED and region_count == NOT_THERE:
            region_count = _resolved(data, start, at, regions, head)
            if region_count == NOT_THERE:
                return NOT_THERE, 0, 0
        else:
            return NOT_THERE, 0, 0
        if row_count == NOT_THERE:
            return NOT_THERE, 0, 0
    return event_count, row_count, max(region_count, 0)


@njit(forceinline=True)
def _before(data: Bytes, at: int, size: int, bound: Bytes) -> bool:
    """Return whether the key at `at` sorts before a bound."""
    for index in range(min(size, len(bound))):
        byte = data[U64(at + index)]
        if byte != bound[U64(index)]:
            return bool(byte < bound[U64(index)])
    return size < len(bound)


@njit
def inside(data: Bytes, rows: Table, keep: Flags, start: Bytes, end: Bytes) -> None:
    """Take out of `keep`, shape (rows,), the rows whose key is not in [start, end)."""
    for index in range(len(rows)):
        at, size = _signed(rows[index, KEY]), _signed(rows[index, KEY_SIZE])
        if keep[index] and (_before(data, at, size, start) or not _before(data, at, size, end)):
            keep[index] = False


@njit
def gather(data: Bytes, table: Table, start: int, size: int, skip: int) -> tuple[Offsets, Bytes]:
    """A column, as offsets and data, of the spans of the message that columns `start` and `size` have, without the first `skip` bytes of each."""
    rows = len(table)
    ends = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        ends[row + 1] = ends[row] + _signed(table[row, size]) - skip
    out = np.empty(ends[rows], np.uint8)
    for row in range(rows):
        copy(out, ends[row], data, _signed(table[row, start]) + skip, ends[row + 1] - ends[row])
    return ends, out
