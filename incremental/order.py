"""Order of changes, as columns: by ts, each once, and the last of each key. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from formats import columns
from formats.order import without_earlier
from formats.records import SCHEMA

if TYPE_CHECKING:
    from formats.kernels.rows import Signs

ROW_BYTES = 33
"""What a row takes in a batch beside its key and value, roughly."""

_SEED = np.frombuffer(os.urandom(8), np.uint64)[0]
"""So that nobody who writes keys can foresee which of them meet in a hash table."""


def in_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows by ascending ts, then key; of rows with the same ts and key the last.

    Most of these are copies; but where one request writes a key twice both rows have its ts, and the cluster keeps the
    last. So `batches` stand in the order in which they came.
    """
    rows = joined(batches)
    if rows.num_rows < 2:
        return rows
    ts = columns.numbers(rows["ts"])
    if (ts[1:] < ts[:-1]).any():
        rows = rows.take(pa.array(np.argsort(ts, kind="stable")))
    signs = _signs(rows)
    if (signs < 0).any():  # rows of one request mostly come by ascending key
        rows = rows.take(pc.sort_indices(rows, sort_keys=[("ts", "ascending"), ("key", "ascending")]))  # a stable sort
        signs = _signs(rows)
    return without_earlier(rows, signs == 0)


def _signs(rows: pa.RecordBatch) -> Signs:
    """For rows by ascending ts: the sign of each row's key minus the one before it, 1 where the ts changes."""
    from formats.kernels.rows import compare_neighbours

    ts = columns.numbers(rows["ts"])
    signs = compare_neighbours(*columns.view(rows["key"]))
    signs[1:][ts[1:] != ts[:-1]] = 1
    return signs


def last_of_keys(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each key, in the order that they have."""
    from formats.kernels.order import last_of_keys as kernel

    last = kernel(*columns.view(rows["key"]), _SEED)
    return rows if last.all() else rows.filter(pa.array(last))


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows in order."""
    filled = [batch for batch in batches if batch.num_rows]
    if not filled:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    return filled[0] if len(filled) == 1 else pa.concat_batches(filled)


def split_at(rows: pa.RecordBatch, ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The rows up to a ts, and those after it; of rows in any order, which both parts keep."""
    early = columns.numbers(rows["ts"]) <= np.uint64(ts)
    if early.all():
        return rows, rows.slice(rows.num_rows)
    if not early.any():
        return rows.slice(0, 0), rows
    return rows.filter(pa.array(early)), rows.filter(pa.array(~early))


def pieces(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about so many bytes, where small ones are put together and large ones cut.

    The batches are in order, and no ts lies in two of them; that holds for the pieces, too.
    """
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(part.nbytes for part in held) >= size:
            yield from _cut(joined(held), size)
            held = []
    if held:
        yield from _cut(joined(held), size)


def _cut(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Cut where the ts changes: a piece is longer than `size` where the rows of one ts are."""
    ts = columns.numbers(rows["ts"])
    lengths = [np.diff(columns.view(rows[name])[0]) for name in ("key", "value")]
    ends = np.cumsum(lengths[0] + lengths[1] + ROW_BYTES)
    first = 0
    while first < rows.num_rows:
        start = ends[first - 1] if first else 0
        last = min(max(int(np.searchsorted(ends, start + size)), first), rows.num_rows - 1)
        end = int(np.searchsorted(ts, ts[last], side="right"))
        yield rows.slice(first, end - first)
        first = end
