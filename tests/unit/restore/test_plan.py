"""The planner of a restore."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.compare.files import FilePart
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection
from tikv_br.restore.plan import RestoreRange, choose_parts, remaining_parts, split_keys

KEYS = st.binary(max_size=3)
RANGES = st.builds(KeyRange, KEYS, KEYS).filter(lambda span: not span.is_empty)


def file(start: bytes, end: bytes, size: int = 1) -> FileEntry:
    """A file of one range."""
    return FileEntry(
        name=f"{start.hex()}.sst", size=size, start_key=start, end_key=end, crc64xor=0, total_kvs=1, total_bytes=size
    )


def inside(key: bytes, span: KeyRange) -> bool:
    """Membership in a range, written out."""
    return key >= span.start and (span.end == b"" or key < span.end)


@given(RANGES, RANGES, KEYS)
def test_intersection_holds_exactly_the_common_keys(one: KeyRange, other: KeyRange, key: bytes) -> None:
    """A key is in the intersection if and only if it is in both; an unbounded end never becomes an empty range."""
    both = intersection(one, other)
    assert (not both.is_empty and inside(key, both)) == (inside(key, one) and inside(key, other))


def test_a_file_that_only_touches_the_range_is_left_out() -> None:
    """The Go tool takes a file whose end is the start of the range, and fails over it."""
    files = map(FilePair, [file(b"a", b"b"), file(b"b", b"c"), file(b"c", b"")])
    parts = choose_parts(files, [RestoreRange(KeyRange(b"b", b"c"))])
    assert [part.span for part in parts] == [KeyRange(b"b", b"c")]


def test_parts_are_clipped_and_in_key_order() -> None:
    """Files come in any order, and only the wanted part of each counts."""
    parts = choose_parts(map(FilePair, [file(b"m", b""), file(b"", b"m")]), [RestoreRange(KeyRange(b"c", b"x"))])
    assert [part.span for part in parts] == [KeyRange(b"c", b"m"), KeyRange(b"m", b"x")]


def test_splits_stand_at_file_starts_once_a_region_is_full() -> None:
    """Small neighbours share a region; a file is never cut, so that it is downloaded once."""
    files = [
        file(b"a", b"b", 60),
        file(b"b", b"c", 30),
        file(b"c", b"d", 20),
        file(b"d", b"e", 500),
        file(b"e", b"", 1),
    ]
    assert split_keys(choose_parts(map(FilePair, files), [RestoreRange(EVERY_KEY)]), region_bytes=100) == [
        b"c",
        b"d",
        b"e",
    ]


@given(st.lists(RANGES, max_size=4), st.lists(RANGES, max_size=4), KEYS)
def test_exactly_the_finished_parts_are_left_out(wanted: list[KeyRange], done: list[KeyRange], key: bytes) -> None:
    """A key is still to do if and only if a part has it and nothing done has."""
    parts = [FilePart(file(span.start, span.end), span) for span in wanted]
    left = any(inside(key, part.span) for part in remaining_parts(parts, done))
    assert left == (any(inside(key, span) for span in wanted) and not any(inside(key, span) for span in done))


def test_ten_thousand_parts_of_which_half_are_done() -> None:
    """Each part meets only the holes around it: the rest is found at once, in the order of the parts."""
    spans = [KeyRange(b"%05d" % number, b"%05d" % (number + 1)) for number in range(10_000)]
    parts = [FilePart(file(span.start, span.end), span) for span in spans]
    assert [part.span for part in remaining_parts(parts, spans[::2])] == spans[1::2]
