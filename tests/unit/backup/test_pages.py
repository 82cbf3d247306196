"""Pages of bounded bytes, without loss or repetition at the seams, fetched one ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from formats import columns
from formats.rawscan import ScanPage
from tikv_br.backup.pages import FIRST_ROWS, MOST_ROWS, Ahead, PageRows, scan
from tikv_br.errors import ClusterUnreachable

Rows = list[tuple[bytes, bytes]]


class Cluster:
    """Holds sorted rows in regions that end at ``bounds``; answers as a store does: a page ends with its region."""

    def __init__(self, rows: Rows, bounds: list[bytes]) -> None:
        self.rows = rows
        self.bounds = bounds
        self.asked: list[int] = []
        self.largest_page = 0

    def scan_pages(self, start: bytes, end: bytes, page_rows: int) -> Iterator[ScanPage]:
        """Yield pages of the range, also empty ones."""
        for stop in [bound for bound in self.bounds if bound > start and (not end or bound < end)] + [end]:
            inside = [row for row in self.rows if start <= row[0] and (not stop or row[0] < stop)]
            for at in range(0, len(inside) or 1, page_rows):
                page = inside[at : at + page_rows]
                self.asked.append(page_rows)
                self.largest_page = max(self.largest_page, sum(len(key) + len(value) for key, value in page))
                yield ScanPage(columns.from_list([key for key, _ in page]), columns.from_list([v for _, v in page]))
            start = stop


def pairs(page: ScanPage) -> Rows:
    """Return the rows of a page as Python sees them."""
    return list(zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True))


row_maps = st.dictionaries(st.binary(max_size=4), st.binary(max_size=300), max_size=200)
key_sets = st.sets(st.binary(min_size=1, max_size=4), max_size=5)


@given(row_maps, key_sets, st.binary(max_size=2), st.binary(max_size=2), st.integers(1, 3000))
def test_pages_hold_every_row_once(
    table: dict[bytes, bytes], bounds: set[bytes], start: bytes, end: bytes, page_bytes: int
) -> None:
    """Whatever sizes rows have and however the page size changes, the pages join up to the range."""
    if end and end <= start:
        end = b""
    rows = sorted(table.items())
    pages = list(scan(Cluster(rows, sorted(bounds)), start, end, PageRows(page_bytes, most=50)))
    assert [row for page in pages for row in pairs(page)] == [
        row for row in rows if start <= row[0] and (not end or row[0] < end)
    ]
    assert all(len(page.keys) for page in pages)


@pytest.mark.parametrize("value_size", [1, 100, 5_000, 200_000])
def test_pages_come_to_the_wanted_bytes(value_size: int) -> None:
    """After a few pages a page has about the wanted bytes, whatever the size of values, or the most rows."""
    rows = [(index.to_bytes(4, "big"), bytes(value_size)) for index in range(min(60_000, 20_000_000 // value_size))]
    page_rows = PageRows(page_bytes=1 << 20)
    pages = list(scan(Cluster(rows, []), b"", b"", page_rows))
    whole = pages[-2]
    size = whole.values.nbytes + whole.keys.nbytes
    assert 0.5 * (1 << 20) < size < 2 * (1 << 20) or len(whole.keys) == MOST_ROWS


def test_large_values_after_small_ones_shrink_the_page() -> None:
    """The first page of large rows may be large, bounded by the most rows; the ones after it are not."""
    page_rows = PageRows(page_bytes=1 << 20)
    assert page_rows.rows == FIRST_ROWS
    for _ in range(5):
        page_rows.saw(page_rows.rows, page_rows.rows * 20)
    assert page_rows.rows == MOST_ROWS
    page_rows.saw(MOST_ROWS, MOST_ROWS << 20)
    assert page_rows.rows == 1
    page_rows.saw(0, 0)
    assert page_rows.rows == 1


def test_the_next_page_is_fetched_while_one_is_worked_on() -> None:
    """When the consumer holds page n, page n + 1 has been asked for, and no further one."""
    asked: list[int] = []
    progress = threading.Condition()

    def pages() -> Iterator[ScanPage]:
        for number in range(5):
            with progress:
                asked.append(number)
                progress.notify_all()
            yield ScanPage(columns.from_list([b"%d" % number]), columns.from_list([b""]))

    for number, page in enumerate(Ahead(pages())):
        assert pairs(page) == [(b"%d" % number, b"")]
        with progress:
            assert progress.wait_for(lambda: len(asked) >= min(number + 2, 5), timeout=10)  # noqa: B023
            assert len(asked) <= number + 2


def test_an_error_of_the_scan_reaches_the_consumer() -> None:
    """The thread in between neither swallows nor changes it."""

    def pages() -> Iterator[ScanPage]:
        yield ScanPage(columns.from_list([b"k"]), columns.from_list([b"v"]))
        raise ClusterUnreachable("store 4 is away")

    with pytest.raises(ClusterUnreachable, match="store 4"):
        list(Ahead(pages()))
