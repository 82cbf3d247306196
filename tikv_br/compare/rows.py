"""Compares rows of two sides batch by batch, as Arrow columns. Loads Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.formats import columns
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.columns import Flags
from tikv_br.formats.order import SortedRun

SOON_SECONDS = 60
"""A row of a backup that expires within this time may be gone from the cluster before it is compared."""


class RowDifferences(NamedTuple):
    """The differences between two ranges of rows."""

    same: pa.RecordBatch
    """Rows of A, of ``SCHEMA``, that B has too."""
    only_a: pa.RecordBatch
    """Rows that only A has."""
    value: pa.RecordBatch
    """Rows of A whose value in B is another."""
    only_b: pa.LargeBinaryArray
    """Keys that only B has."""
    expiring: int
    """Rows that A has and B may lack by now."""

    @property
    def first_key(self) -> bytes | None:
        """The first key that differs."""
        columns = (self.only_a["key"], self.value["key"], self.only_b)
        return min((keys[0].as_py() for keys in columns if len(keys)), default=None)


Now = Callable[[], int]
"""Returns the seconds since the epoch, by the clock of B's PD."""


def compare_rows(
    a: Iterable[pa.RecordBatch], b: Iterable[pa.RecordBatch], now: Now, expiry_error: int = 0
) -> Iterator[RowDifferences]:
    """Yield `compare_batches` for the rows of a range of both sides, batch by batch. Both are in key order."""
    return (compare_batches(ours, theirs, now(), expiry_error) for ours, theirs in lockstep(a, b))


def compare_batches(a: pa.RecordBatch, b: pa.RecordBatch, now: int, expiry_error: int = 0) -> RowDifferences:
    """Compare rows of ``SCHEMA`` of the same range at about ``now`` (seconds since the epoch).

    Expired rows of A are ignored; those that expire about now may be missing in B. Expiries of A may be up to
    ``expiry_error`` seconds too early; B's expired rows are ignored: scans do not return them.
    """
    expire_ts = columns.numbers(a["expire_ts"])
    a = _filtered(a, (expire_ts == 0) | (expire_ts > now - CLOCK_SECONDS - expiry_error))
    at = pc.index_in(a["key"], value_set=b["key"])
    there = columns.flags(at.is_valid())
    both, missing = _filtered(a, there), _filtered(a, ~there)
    same = columns.flags(pc.equal(both["value"], b["value"].take(at.drop_null())))
    expire_ts = columns.numbers(missing["expire_ts"])
    lasting = (expire_ts == 0) | (expire_ts > now + SOON_SECONDS)
    extra = b["key"].filter(pc.is_null(pc.index_in(b["key"], value_set=a["key"])))
    return RowDifferences(
        _filtered(both, same), _filtered(missing, lasting), _filtered(both, ~same), extra, int((~lasting).sum())
    )


@dataclass(slots=True)
class DifferenceSums:
    """Sums over the `RowDifferences` of a range. ``prefix`` turns user keys into RPC keys of ``same``."""

    prefix: bytes = b""
    same: Checksum = field(default_factory=Checksum)
    only_a: Checksum = field(default_factory=Checksum)
    """Rows that only A has; by user keys, as the following."""
    value: Checksum = field(default_factory=Checksum)
    only_b: Checksum = field(default_factory=Checksum)
    """Keys that only B has, without values."""
    expiring: int = 0
    first_key: bytes | None = None
    """The first key that differs."""
    first_only_a: bytes | None = None

    def add(self, found: RowDifferences) -> None:
        """Add the next differences."""
        self.same += checksum(found.same["key"], found.same["value"], self.prefix)
        self.only_a += checksum(found.only_a["key"], found.only_a["value"])
        self.value += checksum(found.value["key"], found.value["value"])
        self.only_b += checksum(found.only_b, found.only_b)
        self.expiring += found.expiring
        if self.first_key is None:
            self.first_key = found.first_key
        if self.first_only_a is None and found.only_a.num_rows:
            self.first_only_a = found.only_a["key"][0].as_py()


def lockstep(
    a: Iterable[pa.RecordBatch], b: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Batches of both sides cut so that each pair covers the same stretch of keys; holds a batch of each."""
    one, other = SortedRun(a), SortedRun(b)
    while filled := [run for run in (one, other) if run.fill()]:
        bound = min(run.last_key for run in filled) + b"\0"
        yield one.take(bound), other.take(bound)


def _filtered(rows: pa.RecordBatch, wanted: Flags) -> pa.RecordBatch:
    return rows if wanted.all() else rows.filter(pa.array(wanted))
