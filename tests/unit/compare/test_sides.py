"""Rows of side A in chunks."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.fakes import FakeSide
from tikv_br.compare import sides
from tikv_br.compare.sides import row_chunks
from tikv_br.formats.keys.ranges import KeyRange


@given(
    rows=st.dictionaries(st.binary(max_size=2), st.binary(max_size=2), max_size=40),
    span=st.tuples(st.binary(max_size=1), st.sampled_from([b"", b"\xf0"])),
    page_rows=st.integers(1, 9),
)
def test_chunks_cover_the_range_and_have_its_rows(
    rows: dict[bytes, bytes], span: tuple[bytes, bytes], page_rows: int
) -> None:
    """Ranges of chunks follow one another from start to end, and each chunk has exactly the rows of its range."""
    a, wanted = FakeSide(rows, page_rows), KeyRange(*span)
    if wanted.is_empty:
        return
    with patch.object(sides, "CHUNK_ROWS", 5):
        chunks = list(row_chunks(a.pages(wanted), wanted))
    spans = [part for _, part in chunks]
    assert (spans[0].start, spans[-1].end) == span
    assert all(one.end == other.start for one, other in pairwise(spans))
    assert [found["key"].to_pylist() for found, _ in chunks] == [a.keys(part) for part in spans]
