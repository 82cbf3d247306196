"""Order of changes by timestamp and key, and batches of a given size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.order import drop_repeated

if TYPE_CHECKING:
    from tikv_br.formats.kernels.order import Signs


ROW_BYTES = 33
"""Estimated size of a row in a batch besides its key and value."""
_SEED = np.frombuffer(os.urandom(8), np.uint64)[0]
"""Random, so that clients cannot choose keys that collide in the hash table."""


def in_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows by ascending ts, then key; of rows with the same ts and key, only the last.

    Most of these are duplicates. But if one request writes a key twice, both rows have the same ts, and the cluster keeps the
    last one. So `batches` must be in order of arrival.
    """
    rows = concatenate(batches)
    if rows.num_rows < 2:
        return rows
    ts = columns.numbers(rows["ts"])
    if (ts[1:] < ts[:-1]).any():
        rows = rows.take(pa.array(np.argsort(ts, kind="stable")))
    signs = _signs(rows)
    if (signs < 0).any():  # rows of one request are mostly in order of key already
        rows = rows.take(pc.sort_indices(rows, sort_keys=[("ts", "ascending"), ("key", "ascending")]))  # a stable sort
        signs = _signs(rows)
    return drop_repeated(rows, signs == 0)


def _signs(rows: pa.RecordBatch) -> Signs:
    """Return the order of each row's key relative to the row before (-1, 0, 1); 1 where the ts changes."""
    from tikv_br.formats.kernels.order import compare_neighbours

    ts = columns.numbers(rows["ts"])
    signs = compare_neighbours(*columns.view(rows["key"]))
    signs[1:][ts[1:] != ts[:-1]] = 1
    return signs


def last_of_keys(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each key, without changing the order."""
    from tikv_br.formats.kernels.order import last_of_keys as kernel

    last = kernel(*columns.view(rows["key"]), _SEED)
    return rows if last.all() else rows.filter(pa.array(last))


def concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows as one batch, without changing the order."""
    filled = [batch for batch in batches if batch.num_rows]
    if not filled:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    return filled[0] if len(filled) == 1 else pa.concat_batches(filled)


def split_at(rows: pa.RecordBatch, ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The rows up to a ts, and those after it, without changing the order in each part."""
    early = columns.numbers(rows["ts"]) <= np.uint64(ts)
    if early.all():
        return rows, rows.slice(rows.num_rows)
    if not early.any():
        return rows.slice(0, 0), rows
    return rows.filter(pa.array(early)), rows.filter(pa.array(~early))


def pieces(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about `size` bytes: merges small batches and splits large ones.

    The given batches must be in order, and no ts may be in two of them; the same holds for the result.
    """
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(part.nbytes for part in pending) >= size:
            yield from _split(concatenate(pending), size)
            pending = []
    if pending:
        yield from _split(concatenate(pending), size)


def _split(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Split only between two ts: a part is larger than `size` if the rows of one ts are."""
    ts = columns.numbers(rows["ts"])
    ends = np.cumsum(columns.row_sizes(rows) + ROW_BYTES)
    first = 0
    while first < rows.num_rows:
        start = ends[first - 1] if first else 0
        last = min(max(int(np.searchsorted(ends, start + size)), first), rows.num_rows - 1)
        end = int(np.searchsorted(ts, ts[last], side="right"))
        yield rows.slice(first, end - first)
        first = end
