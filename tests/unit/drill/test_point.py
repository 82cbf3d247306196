"""The time that a drill chooses, and its own evaluation of versions."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from tikv_br.cluster.timestamps import compose
from tikv_br.drill import point
from tikv_br.formats.columns import SCHEMA


def test_a_time_is_never_chosen_where_rows_are_not_known() -> None:
    """Windows that overlap neither end, the begin, or nothing; over many seeds every possible time is chosen."""
    inexact = [(0, 5), (8, 12), (15, 16), (20, 24), (40, 50)]
    possible = {*range(10, 31)} - {10, 11, 21, 22, 23}
    assert {point.choose_ts(inexact, 10, 30, seed) for seed in range(2000)} == possible
    assert point.choose_ts(inexact, 10, 30, 7) == point.choose_ts(inexact, 10, 30, 7)
    assert {point.choose_ts([], 10, 10, seed) for seed in range(9)} == {10}
    assert {point.choose_ts([(5, 30)], 10, 30, seed) for seed in range(9)} == {30}


@pytest.mark.parametrize("buffer", [1, 2000, 64 << 20])
def test_rows_are_the_newest_versions_that_a_reader_saw(monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    """Versions in any order, the same ones several times, tombstones and expiries: as a loop over all of them finds."""
    monkeypatch.setattr(point, "BUFFER_BYTES", buffer)
    chance = random.Random(11)
    rows: list[dict[str, Any]] = []
    for number in range(500):
        row: dict[str, Any] = {
            "key": b"%d" % chance.randrange(60),
            "value": b"%d" % number,
            "deleted": chance.random() < 0.2,
        }
        rows.append(
            {**row, "expire_ts": chance.choice([0, 0, 4, 5, 6, 90]), "ts": compose(chance.randrange(9000), number)}
        )
    chosen = compose(5500)
    newest = {row["key"]: row for row in sorted(rows, key=lambda row: row["ts"]) if row["ts"] <= chosen}
    expected = [newest[key] for key in sorted(newest)]
    expected = [row for row in expected if not row["deleted"] and (row["expire_ts"] == 0 or row["expire_ts"] > 5)]
    assert 10 < len(expected) < 60
    chance.shuffle(rows)
    batches = pa.Table.from_pylist([*rows, *rows[::3]], SCHEMA).to_batches(max_chunksize=23)
    assert point.rows_at(batches, chosen).to_pylist() == expected
    assert point.rows_at([], chosen).num_rows == 0
    assert point.rows_at(batches, 1).num_rows == 0
