from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.coverage import keyspace_codec, require_coverage
from tikv_br.errors import CoverageError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange, gaps

SIZE = 12
"""Keys of the model: b"" (before all), one byte 1..SIZE-1, and the unbounded end as SIZE."""


def key(number: int) -> bytes:
    """The key of a model position; an end at SIZE is unbounded, as is a start at 0 the very first key."""
    return bytes([number]) if 0 < number < SIZE else b""


def key_range(start: int, end: int) -> KeyRange:
    """Positions [start, end)."""
    return KeyRange(key(start), key(end))


def cells(start: int, end: int) -> set[int]:
    """The same as a set of positions: the independent model."""
    return set(range(start, end))


BOUNDS = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE))
FORWARD = BOUNDS.filter(lambda bounds: bounds[0] < bounds[1])


@given(FORWARD, st.lists(FORWARD, max_size=6))
def test_missing_is_what_the_model_says(wanted: tuple[int, int], parts: list[tuple[int, int]]) -> None:
    """The holes are exactly the wanted positions in no part; ordered, disjoint, none empty."""
    holes = gaps(key_range(*wanted), [key_range(*part) for part in parts])
    expected = cells(*wanted).difference(*(cells(*part) for part in parts))
    found = [position for position in range(SIZE) for hole in holes if hole.contains(key_range(position, position + 1))]
    assert found == sorted(expected)
    assert holes == sorted(holes)
    assert not any(hole.is_empty for hole in holes)


@given(
    st.lists(st.lists(st.integers(0, SIZE), min_size=2, max_size=4, unique=True), max_size=3),
    st.lists(FORWARD, max_size=7),
)
def test_proof_holds_exactly_for_partitions(wholes: list[list[int]], parts: list[tuple[int, int]]) -> None:
    """`prove` passes if and only if each position of the wanted ranges lies in exactly one part, and no other in any."""
    wanted = [(cuts[0], cuts[-1]) for cuts in map(sorted, wholes)]
    expected: set[int] = set()
    for whole in wanted:
        if expected & cells(*whole):
            return  # the caller's ranges are disjoint
        expected |= cells(*whole)
    counted = [position for part in parts for position in cells(*part)]
    crossing = any(not any(cells(*part) <= cells(*whole) for whole in wanted) for part in parts)
    partition = sorted(counted) == sorted(expected) and not crossing
    assert _proved([key_range(*whole) for whole in wanted], [key_range(*part) for part in parts]) is partition


def _proved(wanted: list[KeyRange], parts: list[KeyRange]) -> bool:
    try:
        require_coverage(wanted, parts)
    except CoverageError:
        return False
    return True


def test_whole_key_space() -> None:
    """Unbounded on both sides, as V1 clusters are backed up."""
    require_coverage([KeyRange(b"", b"")], [KeyRange(b"k", b""), KeyRange(b"", b"k")])
    with pytest.raises(CoverageError, match=r"no file covers \[6b, end\)"):
        require_coverage([KeyRange(b"", b"")], [KeyRange(b"", b"k")])
    with pytest.raises(CoverageError, match="overlap"):
        require_coverage([KeyRange(b"", b"")], [KeyRange(b"", b""), KeyRange(b"k", b"")])


def test_neighbouring_keys() -> None:
    """A hole of one key, k, between k and k+00, is a hole."""
    parts = [KeyRange(b"a", b"k"), KeyRange(b"k\0", b"z")]
    assert gaps(KeyRange(b"a", b"z"), parts) == [KeyRange(b"k", b"k\0")]
    with pytest.raises(CoverageError, match=r"\[6b, 6b00\)"):
        require_coverage([KeyRange(b"a", b"z")], parts)


def test_empty_and_reversed_parts_are_refused() -> None:
    """A part without any key is no part of a plan."""
    for start, end in ((b"c", b"c"), (b"d", b"c")):
        with pytest.raises(CoverageError, match="outside the ranges"):
            require_coverage([KeyRange(b"a", b"z")], [KeyRange(b"a", b"z"), KeyRange(start, end)])


def test_a_keyspace_that_cannot_exist_is_the_options_fault() -> None:
    """The message names the option; the hint is the caller's."""
    assert keyspace_codec(ApiVersion.V2, 7, "--keyspace").keyspace_id == 7
    with pytest.raises(UsageError, match=r"^--to-keyspace: ") as raised:
        keyspace_codec(ApiVersion.V1, 7, "--to-keyspace", "Leave it out.")
    assert raised.value.hint == "Leave it out."
