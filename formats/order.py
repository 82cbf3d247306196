"""Sorts rows by key, with all versions of a key, only the newest or only its last row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.formats import columns

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
