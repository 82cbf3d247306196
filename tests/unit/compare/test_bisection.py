"""From sums to small ranges, on sides that are dictionaries."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.fakes import FakeSide
from tikv_br.compare import ranges
from tikv_br.compare.ranges import different_ranges
from tikv_br.formats.keys.ranges import KeyRange

ALL = KeyRange(b"", b"")
KEYS = st.binary(max_size=4)
ROWS = st.dictionaries(KEYS, st.binary(max_size=3), max_size=60)


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of three rows: cuts are many."""
    monkeypatch.setattr(ranges, "LEAF_ROWS", 3)


def inside(key: bytes, span: KeyRange) -> bool:
    """Whether a key lies in a range."""
    return key >= span.start and (not span.end or key < span.end)


def narrowed(a: FakeSide, b: FakeSide) -> list[KeyRange]:
    """All ranges that differ."""
    return list(different_ranges(a, b, ALL, b.sums(ALL)))


@given(rows=ROWS, lost=st.sets(KEYS, max_size=4), changed=st.sets(KEYS, max_size=4), added=st.sets(KEYS, max_size=4))
def test_planted_differences_lie_in_the_ranges_found(
    rows: dict[bytes, bytes], lost: set[bytes], changed: set[bytes], added: set[bytes]
) -> None:
    """Whatever is lost, changed and added: every such key is in one of the ranges; ranges ascend and do not overlap."""
    a, b = FakeSide(rows), FakeSide(rows)
    for key in lost:
        b.rows.pop(key, None)
    for key in changed & b.rows.keys():
        b.rows[key] += b"!"
    b.rows |= dict.fromkeys(added - rows.keys(), b"added")
    found = narrowed(a, b)
    planted = {key for key in a.rows.keys() | b.rows.keys() if a.rows.get(key) != b.rows.get(key)}
    assert all(sum(inside(key, span) for span in found) == 1 for key in planted)
    assert bool(found) == bool(planted)
    assert all(one.end and one.end <= other.start for one, other in pairwise(found))


@given(rows=ROWS)
def test_equal_sides_are_asked_once(rows: dict[bytes, bytes]) -> None:
    """One sum each, nothing is scanned."""
    a, b = FakeSide(rows), FakeSide(rows)
    assert narrowed(a, b) == []
    assert a.asked == b.asked == [ALL]


@pytest.mark.parametrize("form", ["row%06d", "%06d-user", "a/b/c/%x"])
def test_one_difference_among_many_rows_is_narrowed_down(form: str) -> None:
    """The range found is small, and the sums asked for are about one a halving, whatever keys look like."""
    rows = {(form % number).encode(): b"value" for number in range(20_000)}
    victim = (form % 13_579).encode()
    a, b = FakeSide(rows), FakeSide({**rows, victim: b"other"})
    [span] = narrowed(a, b)
    assert inside(victim, span)
    assert len(a.keys(span)) <= 3
    assert len(b.asked) < 80


def test_differences_everywhere_are_not_cut_for_ever() -> None:
    """Where all differs, few sums are asked before the range is given up to a scan."""
    rows = {b"%06d" % number: b"value" for number in range(5000)}
    a, b = FakeSide(rows), FakeSide({key: b"%09d" % int(key) ** 2 for key in rows})
    found = narrowed(a, b)
    assert len(found) == 2**ranges.MAX_FRUITLESS_SPLITS
    assert sum(len(a.keys(span)) for span in found) == len(rows)


def test_equal_changes_cancel_out_in_sums() -> None:
    """What the sums are blind to, and `exact` is for: CRC is linear, so the same change in two rows leaves no trace."""
    rows = {b"%03d" % number: b"pending" for number in range(10)}
    a, b = FakeSide(rows), FakeSide({**rows, b"002": b"settled", b"007": b"settled"})
    assert narrowed(a, b) == []


def test_large_values_make_small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf is bounded by bytes, too."""
    monkeypatch.setattr(ranges, "LEAF_ROWS", 1000)
    monkeypatch.setattr(ranges, "LEAF_BYTES", 5000)
    rows = {b"%03d" % number: bytes(1000) for number in range(100)}
    a, b = FakeSide(rows), FakeSide({**rows, b"050": b""})
    [span] = narrowed(a, b)
    assert len(a.keys(span)) <= 5


def test_what_becomes_equal_meanwhile_is_no_difference() -> None:
    """The whole differed, the halves do not any more."""

    class Healing(FakeSide):
        def middle(self, span: KeyRange) -> bytes | None:
            self.rows = dict(rows)
            return super().middle(span)

    rows = {b"%03d" % number: b"x" for number in range(100)}
    lacking = {key: value for key, value in rows.items() if key != b"050"}
    assert narrowed(Healing(lacking | {b"1": b"", b"2": b""}), FakeSide(rows)) == []
