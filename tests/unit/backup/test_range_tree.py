"""Newer answers replace older ones, and what they leave open is a gap again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backup.store_responses import ResponseSet, StoreAnswer, StoredSst
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.keys.ranges import KeyRange

KEYS = [b"", b"a", b"b", b"c", b"d", b"e", b"f"]


def answer(start: bytes, end: bytes, *names: str) -> StoreAnswer:
    """Return an answer with files of these names."""
    return StoreAnswer(KeyRange(start, end), tuple(StoredSst(name, brpb_pb2.File(name=name)) for name in names))


def test_gaps_close_as_answers_come() -> None:
    """In any order; an answer without files covers too."""
    tree = ResponseSet(KeyRange(b"a", b""))
    assert tree.gaps() == [KeyRange(b"a", b"")]
    assert tree.add(answer(b"d", b"", "2")) == []
    assert tree.add(answer(b"b", b"c")) == []
    assert tree.gaps() == [KeyRange(b"a", b"b"), KeyRange(b"c", b"d")]
    tree.add(answer(b"a", b"b", "1"))
    tree.add(answer(b"c", b"d"))
    assert tree.gaps() == []
    assert [file.name for file in tree.files()] == ["1", "2"]


def test_a_newer_answer_replaces_all_that_it_touches() -> None:
    """Two files never have a key in common; what the older one covered besides is missing again."""
    tree = ResponseSet(KeyRange(b"", b""))
    old, touching = answer(b"", b"c", "old"), answer(b"c", b"", "touching")
    tree.add(old)
    tree.add(touching)
    assert tree.add(answer(b"b", b"c", "new")) == [old]
    assert tree.gaps() == [KeyRange(b"", b"b")]
    assert [file.name for file in tree.files()] == ["new", "touching"]


def test_an_answer_of_no_range_is_none() -> None:
    """Nothing is covered by it and nothing is replaced."""
    tree = ResponseSet(KeyRange(b"a", b"z"))
    tree.add(answer(b"a", b"z", "whole"))
    assert tree.add(answer(b"b", b"b", "none")) == []
    assert [file.name for file in tree.files()] == ["whole"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)).filter(lambda pair: pair[0] < pair[1]), max_size=12))
def test_counted_answers_are_disjoint_and_adjoin_the_gaps(pairs: list[tuple[int, int]]) -> None:
    """Of each key the newest answer counts, unless another one that shared a key with it was replaced."""
    tree, owners = ResponseSet(KeyRange(b"", b"")), dict.fromkeys(range(7), "")
    for number, (low, high) in enumerate(pairs):
        name = str(number)
        tree.add(answer(KEYS[low], KEYS[high] if high < len(KEYS) else b"", name))
        gone = {owners[place] for place in range(low, high)}
        owners = {place: "" if owner in gone else owner for place, owner in owners.items()}
        owners |= dict.fromkeys(range(low, high), name)
    assert [file.name for file in tree.files()] == list(dict.fromkeys(owner for owner in owners.values() if owner))
    missing = {place for place in range(7) if any(_holds(gap, KEYS[place]) for gap in tree.gaps())}
    assert missing == {place for place, owner in owners.items() if not owner}


def _holds(gap: KeyRange, key: bytes) -> bool:
    return gap.start <= key and (not gap.end or key < gap.end)
