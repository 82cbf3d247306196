"""The Arrow schemas of rows, and columns as numpy arrays: no copies, no Python object per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tikv_br.formats.errors import DamagedBytes, FormatError
from tikv_br.formats.keys.codec import KeyCodec

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_binary(), nullable=False),  # user key, no prefix
        pa.field("value", pa.large_binary(), nullable=False),  # user value
        pa.field("expire_ts", pa.uint64(), nullable=False),  # seconds since the epoch, 0 = never
        pa.field("ts", pa.uint64(), nullable=False),  # TSO, 0 = the source has none
        pa.field("deleted", pa.bool_(), nullable=False),  # a tombstone of API V2
    ]
)
"""User records, sorted by key."""

STORAGE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_binary(), nullable=False),  # as in RocksDB: 'z' + storage key (V2: MCE + ~ts)
        pa.field("value", pa.large_binary(), nullable=False),  # as in RocksDB: with expiry and flags
    ]
)
"""Rows as a store's RocksDB holds them, sorted by key: what SSTs contain."""


def view(array: pa.LargeBinaryArray) -> tuple[Offsets, Bytes]:
    """The offsets, shape (rows + 1,), and the data that they point into; row i is ``data[offsets[i]:offsets[i + 1]]``.

    Both are read-only views of the array's memory. In a slice the first offset need not be 0, and data reaches beyond
    the slice. Offsets are checked (they ascend and lie within the data), so that kernels may trust them.
    Raises `FormatError` for another type or for nulls, `DamagedBytes` for offsets that point astray.
    """
    if array.type != pa.large_binary():
        raise FormatError(f"expected a column of large_binary, got {array.type}")
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DamagedBytes(f"column of bytes: {error}") from error
    if array.null_count:
        raise FormatError(f"column of bytes: {array.null_count} nulls")
    _, offsets, data = array.buffers()
    if not len(array):
        return _frozen(np.zeros(1, np.int64)), _frozen(np.zeros(0, np.uint8))
    return (
        _frozen(np.frombuffer(offsets, np.int64, len(array) + 1, offset=array.offset * 8)),
        _frozen(np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)),
    )


def row_sizes(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The bytes of key and value of each row, shape (rows,)."""
    sizes: npt.NDArray[np.int64] = np.diff(view(rows["key"])[0]) + np.diff(view(rows["value"])[0])
    return sizes


def slices(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """The rows in parts of `size` rows, the last one maybe of fewer; without a copy."""
    return (rows.slice(first, size) for first in range(0, rows.num_rows, size))


def numbers(array: pa.Array) -> Numbers:
    """A column of uint64 as a read-only view. Raises `FormatError` for another type or for nulls."""
    if array.type != pa.uint64() or array.null_count:
        raise FormatError(f"expected a column of uint64 without nulls, got {array.type} with {array.null_count} nulls")
    values: Numbers = array.to_numpy(zero_copy_only=True)
    return _frozen(values)


def flags(array: pa.Array) -> Flags:
    """A column of bool, unpacked to a byte a row. Raises `FormatError` for another type or for nulls."""
    if array.type != pa.bool_() or array.null_count:
        raise FormatError(f"expected a column of bool without nulls, got {array.type} with {array.null_count} nulls")
    values: Flags = array.to_numpy(zero_copy_only=False)
    return _frozen(values)


def build(offsets: Offsets, data: Bytes) -> pa.LargeBinaryArray:
    """The column over this memory, which it keeps alive. `offsets` has shape (rows + 1,) and must be right."""
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0
    )


def from_list(rows: Sequence[bytes]) -> pa.LargeBinaryArray:
    """A column of these rows: for tests and for handfuls, never for bulk."""
    return pa.array(rows, pa.large_binary())


def from_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def user_keys(keys: pa.LargeBinaryArray, codec: KeyCodec) -> pa.LargeBinaryArray:
    """The user keys of RPC keys. Raises `DamagedBytes` for keys outside the codec's keyspace."""
    if not codec.prefix:
        return keys
    import pyarrow.compute as pc

    if not pc.all(pc.starts_with(keys, codec.prefix)).as_py():
        raise DamagedBytes(f"the cluster returned keys outside keyspace {codec.keyspace_id}")
    return pc.binary_replace_slice(keys, 0, len(codec.prefix), b"")


def records(
    keys: pa.LargeBinaryArray,
    values: pa.LargeBinaryArray,
    *,
    expire_ts: Numbers | None = None,
    ts: Numbers | None = None,
    deleted: Flags | None = None,
) -> pa.RecordBatch:
    """A batch of `SCHEMA`; what is not given is 0 or false in every row."""
    rows = len(keys)
    return pa.RecordBatch.from_arrays(
        [
            keys,
            values,
            pa.array(np.zeros(rows, np.uint64) if expire_ts is None else expire_ts),
            pa.array(np.zeros(rows, np.uint64) if ts is None else ts),
            pa.array(np.zeros(rows, np.bool_) if deleted is None else deleted),
        ],
        schema=SCHEMA,
    )


def storage_rows(keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([keys, values], schema=STORAGE_SCHEMA)


def _frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    array.flags.writeable = False
    return array
