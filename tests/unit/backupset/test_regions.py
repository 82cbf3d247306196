"""Parts by region, put together where there are many."""

from __future__ import annotations

from tikv_br.backupset.coverage import RegionPart, merge_regions

PARTS = [RegionPart(b"%02d" % at, b"%02d" % (at + 1), at, 10 * at) for at in range(10)]


def test_neighbours_are_put_together_and_nothing_is_lost() -> None:
    """No more than were asked for, by their keys; rows, bytes and regions add up."""
    found = merge_regions(PARTS[::-1], 4)
    assert [(part.start, part.end, part.regions) for part in found] == [
        (b"00", b"03", 3),
        (b"03", b"06", 3),
        (b"06", b"09", 3),
        (b"09", b"10", 1),
    ]
    assert (sum(part.total_kvs for part in found), sum(part.total_bytes for part in found)) == (45, 450)
    assert merge_regions(PARTS, 10) == tuple(PARTS)
    assert merge_regions([]) == ()


def test_how_many_regions_is_not_guessed() -> None:
    """One part that does not say makes the whole one that does not."""
    [one] = merge_regions([*PARTS, RegionPart(b"10", b"", 1, 1, 0)], 1)
    assert (one.regions, one.end) == (0, b"")
