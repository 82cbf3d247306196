"""Orders of changes, against Python's own sorting and dicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.incremental.changes import Change, batch, changes
from tikv_br.formats.order import by_key
from tikv_br.incremental import sorter

keys = st.one_of(
    st.sampled_from([b"", b"k", b"k\0", b"k\0\0\0\0\0\0\0\0", b"common-1", b"common-12345678a", b"common-12345678b"]),
    st.binary(max_size=12).map(lambda end: b"common-" + end),
    st.binary(max_size=3),
)
rows = st.lists(st.tuples(keys, st.integers(1, 6)), max_size=40).map(
    lambda found: [Change(ts, key, b"%d" % at) for at, (key, ts) in enumerate(found)]
)


@given(rows, st.integers(0, 40))
def test_rows_come_into_order(found: list[Change], cut: int) -> None:
    """By ts, then key; of the same ts and key the last that came, whatever batches they came in."""
    last = {(row.ts, row.key): row for row in found}
    expected = [last[at] for at in sorted(last)]
    assert changes([sorter.in_order([batch(found[:cut]), batch(found[cut:])])]) == expected


@given(rows)
def test_the_last_row_of_each_key_stays_in_its_place(found: list[Change]) -> None:
    """As a dict of the rows would have it, in the order of the rows that stay."""
    last = {row.key: row for row in found}
    assert changes([sorter.last_of_keys(batch(found))]) == [row for row in found if last[row.key] is row]


@given(rows)
def test_rows_come_by_key(found: list[Change]) -> None:
    """Ascending by key, the last row of each: also where keys have much in common, and end in zeros."""
    last = {row.key: row for row in found}
    assert changes([by_key(batch(found))]) == [last[key] for key in sorted(last)]


def test_thousands_of_rows_come_by_key() -> None:
    """With keys that differ only far behind, many of them twice."""
    found = [Change(at + 1, b"prefix-%d" % (at * 7919 % 3000), b"%d" % at) for at in range(5000)]
    last = {row.key: row for row in found}
    assert changes([by_key(batch(found))]) == [last[key] for key in sorted(last)]
    assert changes([sorter.last_of_keys(batch(found))]) == [row for row in found if last[row.key] is row]
