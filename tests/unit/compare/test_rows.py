"""Rows of both sides, page by page."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.fakes import FakeSide
from tikv_br.cluster.clock import CLOCK_SECONDS
from tikv_br.compare.ranges import recheck_keys
from tikv_br.compare.report import DifferenceKind, KeyDifference
from tikv_br.compare.rows import SOON_SECONDS, compare_batches, compare_rows
from tikv_br.formats import columns
from tikv_br.formats.keys.ranges import KeyRange

NOW = 1_800_000_000
ROWS = st.dictionaries(st.binary(max_size=2), st.binary(max_size=2), max_size=40)
ALL = KeyRange(b"", b"")


def batch(rows: dict[bytes, tuple[bytes, int]]) -> pa.RecordBatch:
    """Rows with expiries."""
    keys = sorted(rows)
    return columns.records(
        columns.from_list(keys),
        columns.from_list([rows[key][0] for key in keys]),
        expire_ts=np.array([rows[key][1] for key in keys], np.uint64),
    )


@given(a=ROWS, b=ROWS, pages=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_every_key_that_differs_is_found_whatever_the_pages(
    a: dict[bytes, bytes], b: dict[bytes, bytes], pages: tuple[int, int]
) -> None:
    """The three kinds of differences of two dictionaries, exactly; no key is seen twice."""
    same, only_a, only_b, value = [], [], [], []
    for found in compare_rows(FakeSide(a, pages[0]).pages(ALL), FakeSide(b, pages[1]).pages(ALL), lambda: NOW):
        same += found.same["key"].to_pylist()
        only_a += found.only_a["key"].to_pylist()
        only_b += found.only_b.to_pylist()
        value += found.value["key"].to_pylist()
        assert found.expiring == 0
    assert same == sorted(key for key in a.keys() & b.keys() if a[key] == b[key])
    assert only_a == sorted(a.keys() - b.keys())
    assert only_b == sorted(b.keys() - a.keys())
    assert value == sorted(key for key in a.keys() & b.keys() if a[key] != b[key])


def test_rows_that_expire_are_told_apart() -> None:
    """Long gone: as if never there. About to go: may be missing. In an hour: must be there. Another value: differs."""
    a = batch(
        {
            b"gone-a": (b"v", NOW - CLOCK_SECONDS),
            b"gone-b": (b"v", NOW - 1000),
            b"just-gone": (b"v", NOW - CLOCK_SECONDS + 1),
            b"soon": (b"v", NOW + SOON_SECONDS),
            b"soon-other": (b"v", NOW + 1),
            b"later": (b"v", NOW + 3600),
            b"never": (b"v", 0),
        }
    )
    b = batch({b"gone-b": (b"v", 0), b"soon-other": (b"w", 0)})
    found = compare_batches(a, b, NOW)
    assert found.only_a["key"].to_pylist() == [b"later", b"never"]
    assert found.only_b.to_pylist() == [b"gone-b"]
    assert found.value["key"].to_pylist() == [b"soon-other"]
    assert (len(found.only_a), len(found.only_b), len(found.value), found.expiring) == (2, 1, 1, 2)


class Expiring(FakeSide):
    """Knows when its keys expire."""

    ttls: dict[bytes, int | None]

    def ttl(self, key: bytes) -> int | None:
        """As told."""
        return self.ttls.get(key, 0)


def test_a_second_look_drops_what_has_settled() -> None:
    """Equal by now, gone on both sides, about to expire, gone while asked: no differences; the rest says how long it lives."""
    a = Expiring({b"equal": b"v", b"short": b"v", b"long": b"v", b"lasting": b"v", b"changed": b"v", b"goes": b"v"})
    b = Expiring({b"equal": b"v", b"extra": b"v", b"changed": b"w"})
    a.ttls = {b"short": CLOCK_SECONDS, b"long": CLOCK_SECONDS + 1, b"goes": None}
    b.ttls = {}
    keys = [b"changed", b"equal", b"extra", b"goes", b"lasting", b"long", b"short", b"vanished"]
    settled, expiring = recheck_keys([KeyDifference(DifferenceKind.ONLY_A, key) for key in keys], a, b)
    assert settled == [
        KeyDifference(DifferenceKind.VALUE, b"changed"),
        KeyDifference(DifferenceKind.ONLY_B, b"extra"),
        KeyDifference(DifferenceKind.ONLY_A, b"lasting"),
        KeyDifference(DifferenceKind.ONLY_A, b"long", CLOCK_SECONDS + 1),
    ]
    assert expiring == 3


def test_an_expiry_that_may_be_too_early_is_no_difference() -> None:
    """A row that A calls expired may be in B for as long as A's expiries may be wrong."""
    a = batch({b"k": (b"v", NOW - CLOCK_SECONDS - 20)})
    b = batch({b"k": (b"v", 0)})
    assert len(compare_batches(a, b, NOW).only_b) == 1
    found = compare_batches(a, b, NOW, expiry_error=21)
    assert (len(found.only_a), len(found.value), len(found.only_b)) == (0, 0, 0)
