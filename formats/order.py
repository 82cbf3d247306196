"""Sorts rows by key, with all versions of a key, only the newest or only its last row.

Merges sorted runs of versioned rows into the rows that a reader saw at one timestamp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.rows import unexpired

if TYPE_CHECKING:
    from tikv_br.formats.kernels.order import Signs


Order = npt.NDArray[np.int64]
"""Array of row numbers."""


def by_key(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each key, by ascending key."""
    if rows.num_rows < 2:
        return rows
    order, signs = key_order(rows["key"])
    return _take(rows, order[_mark_last_rows(signs != 0)])


def by_version(rows: pa.RecordBatch) -> pa.RecordBatch:
    """All rows by ascending key, the newest version of a key first; of rows with the same key and ts, only the last."""
    if rows.num_rows < 2:
        return rows
    ts = columns.numbers(rows["ts"])
    order, signs = key_order(rows["key"], np.argsort(~ts, kind="stable"))
    ts = ts[order]
    return _take(rows, order[_mark_last_rows((signs != 0) | np.append(True, ts[1:] != ts[:-1]))])


def newest_by_key(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The newest version of each key, by ascending key; of rows with the same key and ts, the last."""
    if rows.num_rows < 2:
        return rows
    order, signs = key_order(rows["key"])
    firsts = np.flatnonzero(signs)
    if len(firsts) < len(order):
        ts = columns.numbers(rows["ts"])[order]
        newest = np.repeat(np.maximum.reduceat(ts, firsts), np.diff(np.append(firsts, len(ts))))
        found = np.flatnonzero(ts == newest)
        keys = np.cumsum(signs)[found]
        order = order[found[_mark_last_rows(np.append(True, keys[1:] != keys[:-1]))]]
    return _take(rows, order)


def key_order(keys: pa.LargeBinaryArray, order: Order | None = None) -> tuple[Order, Signs]:
    """The rows in the order of their keys, rows of one key in the given order, and how each key compares with the one before it."""
    from tikv_br.formats.kernels.order import codes, compare_neighbours

    numbers = codes(*columns.view(keys))
    found = np.argsort(numbers, kind="stable") if order is None else order[np.argsort(numbers[order], kind="stable")]
    signs = compare_neighbours(*columns.view(keys.take(pa.array(found))))
    if (signs < 0).any():  # some keys differ later than in eight bytes
        import pyarrow.compute as pc

        order = np.arange(len(keys)) if order is None else order
        found = order[np.asarray(pc.sort_indices(keys.take(pa.array(order))))]  # a stable sort
        signs = compare_neighbours(*columns.view(keys.take(pa.array(found))))
    return found, signs


def _mark_last_rows(begins: columns.Flags) -> columns.Flags:
    """Return whether each row is the last of its group, given whether it is the first."""
    return np.append(begins[1:], True)


def _take(rows: pa.RecordBatch, order: Order) -> pa.RecordBatch:
    """The rows at these places; without a copy if they are all rows in order."""
    in_order = len(order) == rows.num_rows and bool((order[1:] > order[:-1]).all())
    return rows if in_order else rows.take(pa.array(order))


def drop_repeated(rows: pa.RecordBatch, again: columns.Flags) -> pa.RecordBatch:
    """The rows without those that equal the next row; `again`, shape (rows,): whether a row equals the one before it."""
    return rows.filter(pa.array(np.append(~again[1:], True))) if again.any() else rows


def rows_at(runs: Sequence[Iterable[pa.RecordBatch]], ts: int, now: int) -> Iterator[pa.RecordBatch]:
    """The rows that a reader saw at `ts` (TSO), by ascending key: of each key the newest version with a ts up to it.

    Keys whose newest version is a tombstone, or had expired at `now` (seconds since the epoch), are left out. Each run
    yields batches of `SCHEMA` by ascending key, the versions of a key in any order. Runs may overlap and repeat rows.
    One batch per run is in memory at a time, more where a single key fills several.
    """
    heads = [SortedRun(run) for run in runs]
    while True:
        heads = [head for head in heads if head.fill()]
        if not heads:
            return
        bound = min((head.last_key for head in heads if not head.at_end), default=None)
        complete = [part for head in heads if (part := head.take(bound)).num_rows]
        if not complete:  # the versions of one key go on in the next batch of at least one run
            for head in heads:
                if head.last_key == bound:
                    head.extend()
            continue
        found = _visible(_newest(complete, ts), now)
        if found.num_rows:
            yield found


def newest_versions(batches: Iterable[pa.RecordBatch], ts: int, buffer_bytes: int = 64 << 20) -> pa.RecordBatch:
    """The newest version with a ts up to `ts` of each key in the batches, which come in any order; by ascending key.

    Tombstones and expired rows stay. Memory: the result, and `buffer_bytes` (and one batch) of rows not yet merged into it.
    """
    merged = pa.RecordBatch.from_pylist([], SCHEMA)
    buffer: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        buffer.append(batch)
        size += batch.nbytes
        if size >= max(buffer_bytes, merged.nbytes):  # merging costs time for all rows: not for a few new ones
            merged, buffer, size = _newest([merged, *buffer], ts), [], 0
    return _newest([merged, *buffer], ts)


class SortedRun:
    """The front of a run: the rows read and not yet taken."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._rows = pa.RecordBatch.from_pylist([], SCHEMA)
        self.at_end = False
        """True if the rows at the front are the last of the run."""

    @property
    def last_key(self) -> bytes:
        """The last key at the front; later rows of the run have this key or a greater one."""
        key: bytes = self._rows["key"][-1].as_py()
        return key

    def fill(self) -> bool:
        """Have rows at the front; False at the end of the run."""
        while not self._rows.num_rows and not self.at_end:
            self.extend()
        return bool(self._rows.num_rows)

    def extend(self) -> None:
        """Read one more batch."""
        batch = next(self._batches, None)
        if batch is None:
            self.at_end = True
        elif self._rows.num_rows:
            self._rows = pa.concat_batches([self._rows, batch])
        else:
            self._rows = batch

    def take(self, bound: bytes | None) -> pa.RecordBatch:
        """Remove the rows with keys below `bound`, all if None."""
        keys = self._rows["key"]
        count = len(keys)
        if bound is not None:
            count = bisect_left(range(count), bound, key=lambda row: keys[row].as_py())
        taken = self._rows.slice(0, count)
        self._rows = self._rows.slice(count)
        return taken


def _newest(parts: Sequence[pa.RecordBatch], ts: int) -> pa.RecordBatch:
    """The newest version up to `ts` of each key, by ascending key."""
    rows = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
    found_ts = columns.numbers(rows["ts"])
    if (found_ts > np.uint64(ts)).any():
        rows = rows.filter(pa.array(found_ts <= np.uint64(ts)))
    return newest_by_key(rows)


def _visible(rows: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """The rows that are no tombstones and have not expired."""
    deleted = columns.flags(rows["deleted"])
    return unexpired(rows.filter(pa.array(~deleted)) if deleted.any() else rows, now)
