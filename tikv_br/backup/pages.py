"""Reading an interval in pages of bounded bytes, the next one already under way while the last is worked on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from formats.rawscan import ScanPage

PAGE_BYTES = 8 << 20
"""The bytes of keys and values that a page should have."""
MOST_ROWS = 10_240
"""A server answers with as many rows as are asked for, whatever their size: this bounds what it must hold at once."""
FIRST_ROWS = 64
GROWTH = 8
"""How many times larger the next page may be: rows yet unseen may be larger than those seen."""
TOLERANCE = 1.25
"""A page this much off is not worth a change."""


class PageSource(Protocol):
    """What is asked of the cluster here: `tikv_br.cluster.rawkv.RawClient`."""

    def scan_pages(self, start: bytes, end: bytes, page_rows: int) -> Iterator[ScanPage]:
        """Pages of at most ``page_rows`` live rows of RPC range ``[start, end)``, in order, across regions."""


class PageRows:
    """Chooses the rows of the next page by the bytes of the last, so that pages have about ``page_bytes``."""

    def __init__(self, page_bytes: int = PAGE_BYTES, most: int = MOST_ROWS) -> None:
        self.rows = min(FIRST_ROWS, most)
        self._page_bytes = page_bytes
        self._most = most

    def saw(self, rows: int, size: int) -> None:
        """Learn from a page of ``rows`` rows and ``size`` bytes; an empty page teaches nothing."""
        if not rows:
            return
        fitting = self._page_bytes * rows // max(size, 1)
        wanted = max(min(fitting, self.rows * GROWTH, self._most), 1)
        if not self.rows / TOLERANCE <= wanted <= self.rows * TOLERANCE:
            self.rows = wanted


def scan(source: PageSource, start: bytes, end: bytes, page_rows: PageRows) -> Iterator[ScanPage]:
    """Yield the pages of RPC range ``[start, end)`` that have rows, of adapting size. Raises what the source raises."""
    while True:
        rows = page_rows.rows
        for page in source.scan_pages(start, end, rows):
            count = len(page.keys)
            if not count:
                continue
            page_rows.saw(count, page.keys.nbytes + page.values.nbytes)
            start = page.keys[count - 1].as_py() + b"\0"
            yield page
            if start == end:
                return
            if page_rows.rows != rows:
                break
        else:
            return


class Ahead:
    """Iterates over ``pages`` in a thread of its own, one page ahead; ``seconds`` is the time spent there."""

    def __init__(self, pages: Iterator[ScanPage]) -> None:
        self.seconds = 0.0
        self._pages = pages

    def __iter__(self) -> Iterator[ScanPage]:
        with ThreadPoolExecutor(1, thread_name_prefix="scan") as pool:
            coming = pool.submit(self._next)
            while (page := coming.result()) is not None:
                coming = pool.submit(self._next)
                yield page

    def _next(self) -> ScanPage | None:
        began = time.perf_counter()
        page = next(self._pages, None)
        self.seconds += time.perf_counter() - began
        return page
