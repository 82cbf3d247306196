"""Rows by key, each key once: what writers want."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from formats import columns


def by_key(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each key, by ascending key."""
    from formats.kernels.order import codes
    from formats.kernels.rows import compare_neighbours

    if rows.num_rows < 2:
        return rows
    found = rows.take(pa.array(np.argsort(codes(*columns.view(rows["key"])), kind="stable")))
    signs = compare_neighbours(*columns.view(found["key"]))
    if (signs < 0).any():  # some keys differ later than in eight bytes
        found = rows.take(pc.sort_indices(rows["key"]))  # a stable sort
        signs = compare_neighbours(*columns.view(found["key"]))
    return without_earlier(found, signs == 0)


def without_earlier(rows: pa.RecordBatch, again: columns.Flags) -> pa.RecordBatch:
    """The rows but for those that the next one is again; `again`, shape (rows,), says so of each and the one before it."""
    return rows.filter(pa.array(np.append(~again[1:], True))) if again.any() else rows
