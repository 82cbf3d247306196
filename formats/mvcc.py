"""Rows of transactions as stores hold them, in two column families.

``write`` has a record for each commit, whose key ends with the commit ts; ``default`` has the values that are too long for a record,
under keys that end with the start ts. A backup has one version of each key, so that rows of both lie in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst.coding import decode_varint, encode_varint
from tikv_br.formats.values import SHORT_VALUE

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats import columns
    from tikv_br.formats.columns import Offsets

PUT, DELETE, LOCK_ONLY, ROLLBACK = b"P", b"D", b"L", b"R"
_TS_SIZE = 8


class WriteRecord(Struct, frozen=True):
    """The value of one row of ``write``."""

    kind: bytes
    start_ts: int
    value: bytes | None = None
    """A short value; None if there is none, or it is in ``default``."""
    is_rolled_back: bool = False
    """The transaction that started at this commit's ts is rolled back: an overlapped rollback."""
    fence: int | None = None
    """GC fence: ts of the next version when the overlapped rollback came. This version ends there; 0 = nowhere."""
    last_change: tuple[int, int] | None = None
    """Commit ts of the last put or delete before this one, and the number of versions since: a hint for readers."""
    source: int = 0
    """The cluster that the transaction was replicated from; 0 = none."""
    rest: bytes = b""
    """Fields of newer versions, which readers ignore."""

    def encode(self) -> bytes:
        fields = [self.kind, encode_varint(self.start_ts)]
        if self.value is not None:
            fields += b"v", bytes([len(self.value)]), self.value
        if self.is_rolled_back:
            fields.append(b"R")
        if self.fence is not None:
            fields += b"F", self.fence.to_bytes(_TS_SIZE, "big")
        if self.last_change is not None:
            fields += b"l", self.last_change[0].to_bytes(_TS_SIZE, "big"), encode_varint(self.last_change[1])
        if self.source:
            fields += b"S", encode_varint(self.source)
        return b"".join((*fields, self.rest))

    @classmethod
    def decode(cls, stored: bytes) -> Self:
        """Raises `DamagedBytes`."""
        if stored[:1] not in {PUT, DELETE, LOCK_ONLY, ROLLBACK}:
            raise DamagedBytes(f"write record {show_key(stored)}: unknown type")
        start_ts, at = decode_varint(stored, 1)
        value, is_rolled_back, fence, last_change, source = None, False, None, None, 0
        while at < len(stored):
            match stored[at : at + 1]:
                case b"v":
                    size, at = int.from_bytes(_take(stored, at + 1, 1)), at + 2
                    value, at = _take(stored, at, size), at + size
                case b"R":
                    is_rolled_back, at = True, at + 1
                case b"F":
                    fence, at = int.from_bytes(_take(stored, at + 1, _TS_SIZE), "big"), at + 1 + _TS_SIZE
                case b"l":
                    ts = int.from_bytes(_take(stored, at + 1, _TS_SIZE), "big")
                    versions, at = decode_varint(stored, at + 1 + _TS_SIZE)
                    last_change = ts, versions
                case b"S":
                    source, at = decode_varint(stored, at + 1)
                case _:
                    break
        return cls(stored[:1], start_ts, value, is_rolled_back, fence, last_change, source, stored[at:])


def _take(stored: bytes, at: int, size: int) -> bytes:
    found = stored[at : at + size]
    if len(found) < size:
        raise DamagedBytes(f"write record {show_key(stored)}: {len(found)} bytes at {at} instead of {size}")
    return found


def join(
    write: Iterable[pa.RecordBatch], default: Iterable[pa.RecordBatch], prefix: bytes = b""
) -> Iterator[pa.RecordBatch]:
    """The rows of one part of a backup: from batches of ``STORAGE_SCHEMA`` of both files to batches of ``SCHEMA``.

    Keys lose ``prefix`` (the keyspace in API V2); ``ts`` is the commit ts. Memory holds one batch of each file. Raises
    `DamagedBytes` for a record without its value, a value without its record, two versions of a key, and rows that no store
    writes into a backup, `UnsortedKeys`.
    """
    from tikv_br.formats.rows import RowOrder

    order, values = RowOrder(), _LongValues(default)
    for stored in write:
        for records in _join_batch(stored, values, prefix):
            again = order.signs(records) == 0
            if again.any():
                key = records["key"][int(again.argmax())].as_py()
                raise DamagedBytes(f"two versions of key {show_key(key)}")
            yield records
    if (rest := values.head()).num_rows:
        raise _unpaired(rest, 0, "a value", "record")


def split(records: pa.RecordBatch, prefix: bytes = b"") -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows of ``SCHEMA`` as stores hold them in ``default`` (it may be empty) and ``write``, in the same order.

    ``ts`` becomes start and commit ts, as stores do it in files that they make of plain rows.
    """
    import pyarrow.compute as pc

    from tikv_br.formats import columns
    from tikv_br.formats.kernels import mvcc as kernels

    ts, deleted = columns.numbers(records["ts"]), columns.flags(records["deleted"])
    keys = columns.build(*kernels.encode_txn_keys(*columns.view(records["key"]), columns.from_bytes(prefix), ts))
    values = columns.build(*kernels.encode_records(*columns.view(records["value"]), ts, deleted))
    long = pc.and_not(pc.greater(pc.binary_length(records["value"]), SHORT_VALUE), records["deleted"])
    return (
        columns.storage_rows(keys.filter(long), records["value"].filter(long)),
        columns.storage_rows(keys, values),
    )


def fences(write: pa.RecordBatch) -> columns.Numbers:
    """The GC fence of each row of ``write``, shape (rows,); 0 = none. Raises `DamagedBytes`.

    Readers of a cluster that has this row and not the one at the fence hide this one.
    """
    from tikv_br.formats import columns
    from tikv_br.formats.kernels import mvcc as kernels

    row, reason, _, found, _, _ = kernels.decode_records(*columns.view(write["value"]))
    _check(row, reason, write)
    return found


class _LongValues:
    """The rows of ``default`` that were not taken yet."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        from tikv_br.formats import columns

        self._batches = iter(batches)
        self._rows = columns.storage_rows(columns.from_list([]), columns.from_list([]))

    def head(self) -> pa.RecordBatch:
        """The next rows; none only at the end."""
        while not self._rows.num_rows and (rows := next(self._batches, None)) is not None:
            self._rows = rows
        return self._rows

    def take(self, most: int) -> pa.RecordBatch:
        """Remove up to that many rows, and at least one if there is one."""
        taken = self.head().slice(0, most)
        self._rows = self._rows.slice(taken.num_rows)
        return taken


def _join_batch(stored: pa.RecordBatch, values: _LongValues, prefix: bytes) -> Iterator[pa.RecordBatch]:
    """Join the records of a batch, in parts for which the values at hand suffice."""
    import numpy as np

    from tikv_br.formats import columns
    from tikv_br.formats.kernels import mvcc as kernels

    keys, commit_ts = _decode_keys(stored, prefix)
    row, reason, start_ts, _, spans, deleted = kernels.decode_records(*columns.view(stored["value"]))
    _check(row, reason, stored)
    pending = np.flatnonzero(spans[:, 0] == kernels.IN_DEFAULT)
    start = 0
    while start < stored.num_rows:
        long = values.take(len(pending)) if len(pending) else values.head().slice(0, 0)
        _check_pairs(stored, pending, start_ts, long, prefix)
        pending = pending[long.num_rows :]
        end = int(pending[0]) if len(pending) else stored.num_rows
        _, short = columns.view(stored["value"])
        yield columns.records(
            keys[start:end],
            columns.build(*kernels.gather_values(spans[start:end], short, *columns.view(long["value"]))),
            ts=commit_ts[start:end],
            deleted=deleted[start:end],
        )
        start = end


def _decode_keys(stored: pa.RecordBatch, prefix: bytes) -> tuple[pa.LargeBinaryArray, columns.Numbers]:
    """User keys and timestamps of data keys."""
    from tikv_br.formats import columns
    from tikv_br.formats.kernels import mvcc as kernels

    row, reason, offsets, data, ts = kernels.decode_txn_keys(*columns.view(stored["key"]), columns.from_bytes(prefix))
    _check(row, reason, stored, prefix)
    return columns.build(offsets, data), ts


def _check_pairs(
    stored: pa.RecordBatch, pending: Offsets, start_ts: columns.Numbers, long: pa.RecordBatch, prefix: bytes
) -> None:
    """Raise `DamagedBytes` unless the pending rows of ``write`` begin with those that these values belong to."""
    from tikv_br.formats import columns
    from tikv_br.formats.kernels import mvcc as kernels

    if len(pending) and not long.num_rows:
        raise _unpaired(stored, int(pending[0]), "a record", "value")
    _decode_keys(long, prefix)
    rows = pending[: long.num_rows]
    found, sign = kernels.first_mismatch(*columns.view(stored["key"]), start_ts, rows, *columns.view(long["key"]))
    if sign < 0:
        raise _unpaired(stored, int(rows[found]), "a record", "value")
    if sign > 0:
        raise _unpaired(long, found, "a value", "record")


def _unpaired(rows: pa.RecordBatch, row: int, what: str, other: str) -> DamagedBytes:
    return DamagedBytes(f"{what} without its {other}: row with key {show_key(rows['key'][row].as_py())}")


def _check(row: int, reason: int, stored: pa.RecordBatch, prefix: bytes = b"") -> None:
    from tikv_br.formats.kernels import mvcc as kernels
    from tikv_br.formats.kernels.rows import GOOD
    from tikv_br.formats.rows import REASONS

    if reason != GOOD:
        known = REASONS | {
            kernels.NO_TYPE: "the write record has no known type",
            kernels.NOT_A_ROW: "the write record is neither a put nor a delete",
            kernels.NO_START: "the write record has no start ts",
            kernels.CUT_OFF: "the write record is cut off",
            kernels.VALUE_OF_DELETE: "the write record is a delete with a value",
        }
        what = known[reason].format(keyspace=int.from_bytes(prefix[1:], "big"))
        raise DamagedBytes(f"row {row}, key {show_key(stored['key'][row].as_py())}: {what}")
