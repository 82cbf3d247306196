"""Generated pairs for load tests: the same for the same seed, in batches of any size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.columns import Bytes, Numbers
from tikv_br.formats.errors import FormatError

KEY_PREFIX = b"key-"
KEY_DIGITS = 12
MAX_COUNT = 10**KEY_DIGITS
"""More pairs than that would need longer keys."""

_POWERS = np.array([10**power for power in reversed(range(KEY_DIGITS))], np.uint64)
_FILLING = b"compressible-"
_U64_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)  # the constants of SplitMix64
_MIX_1 = np.uint64(0xBF58_476D_1CE4_E5B9)
_MIX_2 = np.uint64(0x94D0_49BB_1331_11EB)


def generate(
    count: int, value_size: int, seed: int = 0, batch_rows: int = 16384, first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Batches of `SCHEMA` with rows `first` to `first + count`, ascending by key, neither expiring nor deleted.

    The key of row i is ``key-`` and i in 12 digits. Of the `value_size` bytes of a value the first half (rounded up)
    depends on seed and row and does not compress, the rest is one text repeated. Batches have `batch_rows` rows, the
    last one the rest. Raises `FormatError` for sizes that are negative or too large.
    """
    if count < 0 or value_size < 0 or first < 0 or batch_rows < 1 or first + count > MAX_COUNT:
        raise FormatError(f"cannot make {count} pairs from {first}, values of {value_size}, batches of {batch_rows}")
    for start in range(first, first + count, batch_rows):
        rows = np.arange(start, min(start + batch_rows, first + count), dtype=np.uint64)
        yield columns.records(_column(_keys(rows)), _column(_values(rows, value_size, seed)))


def _keys(rows: Numbers) -> Bytes:
    keys = np.empty((len(rows), len(KEY_PREFIX) + KEY_DIGITS), np.uint8)
    keys[:, : len(KEY_PREFIX)] = columns.from_bytes(KEY_PREFIX)
    keys[:, len(KEY_PREFIX) :] = np.floor_divide.outer(rows, _POWERS) % np.uint64(10) + np.uint64(ord("0"))
    return keys


def _values(rows: Numbers, size: int, seed: int) -> Bytes:
    half = (size + 1) // 2
    words = (half + 7) // 8
    values = np.empty((len(rows), size), np.uint8)
    numbers: Numbers = np.add.outer(rows * np.uint64(words), np.arange(words, dtype=np.uint64))
    values[:, :half] = _split_mix64(numbers, seed).astype("<u8", copy=False).view(np.uint8)[:, :half]
    values[:, half:] = np.resize(columns.from_bytes(_FILLING), size - half)
    return values


def _split_mix64(numbers: Numbers, seed: int) -> Numbers:
    """SplitMix64: the outputs with these numbers of the sequence that `seed` begins."""
    start = _mix(np.array([seed & _U64_MASK], np.uint64))
    return _mix(start + (numbers + np.uint64(1)) * _GAMMA)


def _mix(state: Numbers) -> Numbers:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def _column(table: Bytes) -> pa.LargeBinaryArray:
    """The rows of a table, shape (rows, bytes a row), as a column."""
    rows, size = table.shape
    return columns.build(np.arange(rows + 1, dtype=np.int64) * size, table.reshape(-1))
