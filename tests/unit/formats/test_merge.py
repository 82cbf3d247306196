"""`rows_at` against a plain model of versions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.order import newest_versions, rows_at

Row = tuple[bytes, bytes, int, int, bool]  # key, value, expire_ts, ts, deleted

keys = st.one_of(st.binary(max_size=2), st.sampled_from([b"a" * 9, b"a" * 9 + b"b", b"a" * 10]))
rows = st.builds(
    lambda key, ts, expiry, deleted: (key, b"%d" % ts, 0 if deleted else expiry, ts, deleted),
    keys,
    st.integers(1, 12),
    st.sampled_from([0, 0, 5, 6, 7]),
    st.booleans(),
)
histories = st.lists(rows, max_size=60, unique_by=lambda row: (row[0], row[3]))
NOW = 6


def batch_of(part: list[Row]) -> pa.RecordBatch:
    """The rows as one batch."""
    key, value, expire_ts, ts, deleted = zip(*part, strict=True) if part else ((), (), (), (), ())
    return columns.records(
        columns.from_list(key),
        columns.from_list(value),
        expire_ts=np.array(expire_ts, np.uint64),
        ts=np.array(ts, np.uint64),
        deleted=np.array(deleted, np.bool_),
    )


def seen_at(history: list[Row], ts: int) -> list[Row]:
    """The model: what a reader saw at a timestamp."""
    newest: dict[bytes, Row] = {}
    for row in sorted(history, key=lambda row: row[3]):
        if row[3] <= ts:
            newest[row[0]] = row
    return [row for _, row in sorted(newest.items()) if not row[4] and (not row[2] or row[2] > NOW)]


@given(histories, st.integers(0, 13), st.integers(1, 4), st.integers(1, 5), st.data())
def test_rows_are_those_of_the_model(history: list[Row], ts: int, runs: int, size: int, data: st.DataObject) -> None:
    """For any history, cut into runs that may repeat rows, in batches of any size."""
    parts: list[list[Row]] = [[] for _ in range(runs)]
    for row in history:
        for run in data.draw(st.sets(st.integers(0, runs - 1), min_size=1)):
            parts[run].append(row)
    sources = []
    for part in parts:
        newest_first = data.draw(st.booleans())
        part.sort(key=lambda row: (row[0], -row[3] if newest_first else row[3]))
        sources.append([batch_of(part[at : at + size]) for at in range(0, len(part), size)])
    found = [tuple(row.values()) for batch in rows_at(sources, ts, NOW) for row in batch.to_pylist()]
    assert found == seen_at(history, ts)


def test_batches_are_records_and_not_empty() -> None:
    """Nothing is yielded for keys that are all deleted."""
    alive, dead = batch_of([(b"a", b"1", 0, 1, False)]), batch_of([(b"b", b"", 0, 2, True)])
    found = list(rows_at([[alive], [dead]], 9, NOW))
    assert [batch.num_rows for batch in found] == [1]
    assert found[0].schema == SCHEMA
    assert not list(rows_at([[dead], []], 9, NOW))
    assert not list(rows_at([], 9, NOW))


@given(histories, st.integers(0, 13), st.integers(1, 5), st.integers(0, 300))
def test_newest_versions_keep_what_is_deleted(history: list[Row], ts: int, size: int, buffer_bytes: int) -> None:
    """For rows in any order, and however often they are merged."""
    newest: dict[bytes, Row] = {}
    for row in sorted(history, key=lambda row: row[3]):
        if row[3] <= ts:
            newest[row[0]] = row
    batches = [batch_of(history[at : at + size]) for at in range(0, len(history), size)]
    found = [tuple(row.values()) for row in newest_versions(batches, ts, buffer_bytes).to_pylist()]
    assert found == [row for _, row in sorted(newest.items())]
