"""Compares rows of two sides batch by batch, as Arrow columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA

SOON_SECONDS = 60
"""A row of a backup that expires within this time may be gone from the cluster before it is compared."""


class RowDifferences(NamedTuple):
    """The differences between two ranges of rows."""

    only_a: pa.RecordBatch
    """Rows of A, of ``SCHEMA``."""
    value: pa.RecordBatch
    """Rows of A whose value in B is another."""
    only_b: pa.LargeBinaryArray
    """Keys of B."""
    expiring: int
    """Rows that A has and B may lack by now."""


def compare(a: pa.RecordBatch, b: pa.RecordBatch, now: int, expiry_error: int = 0) -> RowDifferences:
    """Compare rows of ``SCHEMA`` of the same range at about ``now`` (seconds since the epoch).

    Expired rows of A are ignored; those that expire about now may be missing in B. Expiries of A may be up to
    ``expiry_error`` seconds too early; those of B are ignored: scans do not return them.
    """
    a = _unexpired(a, now - expiry_error)
    at = pc.index_in(a["key"], value_set=b["key"])
    there = at.is_valid()
    both = a.filter(there)
    same = pc.equal(both["value"], b["value"].take(at.filter(there)))
    missing = a.filter(pc.invert(there))
    lasting, expiring = _by_expiry(missing, now)
    extra = b["key"].filter(pc.is_null(pc.index_in(b["key"], value_set=a["key"])))
    return RowDifferences(lasting, both.filter(pc.invert(same)), extra, expiring)


def lockstep(
    a: Iterable[pa.RecordBatch], b: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Batches of both sides cut so that each pair covers the same stretch of keys; holds a batch of each."""
    one, other = _Cursor(a), _Cursor(b)
    while one.fill() | other.fill():
        lasts = [cursor.last for cursor in (one, other) if cursor.rest.num_rows]
        bound = min(lasts)
        yield one.take(bound), other.take(bound)


class _Cursor:
    """The rows of one side that are not compared yet."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self.rest = empty()

    @property
    def last(self) -> bytes:
        key: bytes = self.rest["key"][-1].as_py()
        return key

    def fill(self) -> bool:
        """Have rows, if there are any left."""
        while not self.rest.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self.rest = batch
        return True

    def take(self, bound: bytes) -> pa.RecordBatch:
        """The rows up to and with a key."""
        if not self.rest.num_rows:
            return self.rest
        size = pc.sum(pc.less_equal(self.rest["key"], pa.scalar(bound, pa.large_binary()))).as_py()
        taken, self.rest = self.rest.slice(0, size), self.rest.slice(size)
        return taken


def empty() -> pa.RecordBatch:
    """No rows."""
    return pa.RecordBatch.from_pylist([], schema=SCHEMA)


def _unexpired(rows: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """The rows without those that have certainly expired."""
    expire_ts = columns.numbers(rows["expire_ts"])
    keep = (expire_ts == 0) | (expire_ts > now - CLOCK_SECONDS)
    return rows if keep.all() else rows.filter(pa.array(keep))


def _by_expiry(rows: pa.RecordBatch, now: int) -> tuple[pa.RecordBatch, int]:
    """The rows that must still exist, and how many may have expired."""
    expire_ts = columns.numbers(rows["expire_ts"])
    lasting = (expire_ts == 0) | (expire_ts > now + SOON_SECONDS)
    return rows.filter(pa.array(lasting)), int((~lasting).sum())
