from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA, STORAGE_SCHEMA
from tikv_br.formats.errors import DamagedBytes, FormatError


def rows_of(array: pa.LargeBinaryArray) -> list[bytes]:
    """The rows as `view` shows them."""
    offsets, data = columns.view(array)
    return [data[start:stop].tobytes() for start, stop in pairwise(offsets.tolist())]


def test_a_view_shows_the_rows_of_any_slice() -> None:
    """Whole columns, slices from inside, slices of slices and empty ones show just their rows."""
    rows = [b"a", b"", b"ccc", b"\0", b""]
    array = columns.from_list(rows)
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            assert rows_of(array[start:stop]) == rows[start:stop]
    assert rows_of(array[1:5][1:3]) == rows[2:4]


def test_a_view_copies_nothing_and_cannot_be_written() -> None:
    """The view's memory is the array's own, read-only; a column built from numpy shares its memory too."""
    data = np.frombuffer(b"abcdef", np.uint8)
    array = columns.build(np.array([0, 2, 6], np.int64), data)
    offsets, seen = columns.view(array[1:])
    assert np.shares_memory(seen, data)
    assert offsets.tolist() == [2, 6]
    assert not offsets.flags.writeable
    assert not seen.flags.writeable


def test_empty_columns_have_one_offset() -> None:
    """No rows give offsets [0]; rows without bytes give as many zeros as it takes."""
    for empty in (columns.from_list([]), pa.array([], pa.large_binary()), columns.from_list([b"x"])[1:]):
        assert columns.view(empty)[0].tolist() == [0]
    assert columns.view(columns.from_list([b"", b""]))[0].tolist() == [0, 0, 0]


def test_offsets_that_point_astray_are_refused() -> None:
    """Offsets that descend, are negative or leave the data in the middle of a column never reach a kernel."""
    data = pa.py_buffer(bytes(8))
    for offsets in ([0, 9, 8], [0, 5, 3, 8], [0, -1, 8], [0, 1 << 62, 8]):
        buffers = [None, pa.py_buffer(np.array(offsets, np.int64)), data]
        array = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
        with pytest.raises(DamagedBytes, match="column of bytes"):
            columns.view(array)


def test_other_types_and_nulls_are_refused() -> None:
    """32-bit offsets, strings, nulls and signed numbers are no columns of records."""
    for array in (pa.array([b"a"]), pa.array(["a"], pa.large_string()), pa.array([b"a", None], pa.large_binary())):
        with pytest.raises(FormatError, match="column of"):
            columns.view(array)
    for array in (pa.array([1]), pa.array([1, None], pa.uint64())):
        with pytest.raises(FormatError, match="uint64"):
            columns.numbers(array)
    for array in (pa.array([1], pa.uint8()), pa.array([True, None])):
        with pytest.raises(FormatError, match="bool"):
            columns.flags(array)


def test_numbers_and_flags_of_slices() -> None:
    """Slices that begin within a byte of packed flags come out right, and numbers are not copied."""
    flags = pa.array([row % 3 == 0 for row in range(20)])
    assert columns.flags(flags[5:17]).tolist() == flags[5:17].to_pylist()
    numbers = pa.array(range(20), pa.uint64())
    assert columns.numbers(numbers[5:]).tolist() == list(range(5, 20))
    assert columns.numbers(numbers).ctypes.data == numbers.buffers()[1].address


def test_batches_have_the_schemas() -> None:
    """Missing values are 0 or false; the schemas are those of `tikv_br.formats.columns`."""
    keys, values = columns.from_list([b"a", b"b"]), columns.from_list([b"1", b""])
    batch = columns.records(keys, values, ts=np.array([3, 4], np.uint64))
    assert batch.schema == SCHEMA
    assert batch.to_pylist()[1] == {"key": b"b", "value": b"", "expire_ts": 0, "ts": 4, "deleted": False}
    assert columns.storage_rows(keys, values).schema == STORAGE_SCHEMA
