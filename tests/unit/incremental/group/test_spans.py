from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.coverage import require_coverage
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.group.owner import cut

KEYS = st.binary(min_size=1, max_size=3)


@given(st.sets(KEYS, min_size=2, max_size=2), st.sets(KEYS, max_size=40), st.integers(1, 12))
def test_parts_make_up_the_whole_along_borders(ends: set[bytes], borders: set[bytes], parts: int) -> None:
    """No hole and no overlap, each cut at a border, as many parts as asked for or as there are regions, alike in regions."""
    whole, ordered = KeyRange(*sorted(ends)), sorted(borders)
    made = cut(whole, ordered, parts)
    require_coverage([whole], made)
    inner = [key for key in ordered if whole.start < key < whole.end]
    assert len(made) == min(parts, len(inner) + 1)
    assert {part.start for part in made[1:]} <= set(inner)
    regions = [1 + sum(part.start < key < part.end for key in inner) for part in made]
    assert max(regions) - min(regions) <= 1
