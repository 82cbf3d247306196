"""A part of a task's interval, from pages to files; and the rule by which an interval is parted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from formats.rawscan import RawPage, ScanPage
from tikv_br.backup.ahead import Ahead
from tikv_br.backup.convert import Converter, Counted
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.region_tally import RegionTally
from tikv_br.backup.task import PhaseSeconds
from tikv_br.backupset.coverage import KeyRange
from tikv_br.spark.task import TaskContext

if TYPE_CHECKING:
    from tikv_br.backup.ttl import TtlFetcher

TRIAL_BYTES = 32 << 20
"""After so many of a task it is known whether its pages are worked on or waited for."""
MOST_LANES = 4
"""Of a task: so many times its pages and its files' buffers lie in memory then."""

ScanPart = Callable[[KeyRange], Iterator[RawPage]]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a part, and in how many lanes it should be copied."""

    part: KeyRange
    lanes: int


class Trial:
    """Finds out whether pages are worked on or waited for: once, after the small first ones."""

    def __init__(self, pages: Ahead[RawPage]) -> None:
        self._pages = pages
        self._began = self._waited = 0.0

    def lanes(self, copied: int) -> int:
        """How many lanes let pages be waited for while those of others are worked on, after so many bytes; 0 = not known."""
        now, waited = time.perf_counter(), self._pages.seconds_waiting
        if copied < TRIAL_BYTES // 4:
            self._began, self._waited = now, waited
        if copied < TRIAL_BYTES:
            return 0
        waited -= self._waited
        return min(MOST_LANES, 1 + int(waited / max(now - self._began - waited, 1e-6)))


@dataclass(slots=True)
class Lane:
    """Reads a part of the interval page by page, one page ahead, converts it and writes its files. In one thread."""

    part: KeyRange
    files: DataFiles
    converter: Converter
    context: TaskContext
    regions: RegionTally
    scan: ScanPart
    ttls: TtlFetcher | None
    """Fetches each row's expiry; None where rows have none."""
    source: Checksum = field(default_factory=Checksum)
    vanished: int = 0
    dropped_ttls: int = 0
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)

    def copy(self, *, alone: bool, failed: threading.Event | None = None) -> Rest | None:
        """Copy the part; where pages of one that is `alone` are waited for, only its beginning: then what is left of it.

        Ends early when something has `failed` elsewhere.
        """
        pages = Ahead(self.scan(self.part))
        trial = Trial(pages) if alone else None
        rest = None
        for page in pages:
            self._copy_page(page)
            if failed and failed.is_set():
                break
            if trial and not rest and (lanes := trial.lanes(self.source.total_bytes)) > 1:
                pages.stop()
                rest = Rest(self.part, lanes)
            if rest:
                rest = Rest(KeyRange(page.last_key + b"\0", self.part.end), rest.lanes)
        self.seconds.scan += pages.seconds
        return rest

    def narrow(self, part: KeyRange) -> None:
        """Go on with no more than this part."""
        self.part = part
        self.files.narrow(self.converter.target_range(part).end)
        self.regions.narrow(part.end)

    def _copy_page(self, page: RawPage) -> None:
        if self.ttls is not None:
            self._copy_expiring(page.split(), page.first_key, self.ttls)
            return
        began = time.perf_counter()
        counted = self.files.add_page(page, self.converter)
        self.regions.add(page.first_key, counted.target)
        self._count(counted, PhaseSeconds(encode=time.perf_counter() - began))

    def _copy_expiring(self, page: ScanPage, first_key: bytes, ttls: TtlFetcher) -> None:
        import pyarrow as pa

        marks = [time.perf_counter()]
        expire_ts, there = ttls.fetch(page.keys)
        mask = pa.array(there)
        page, expire_ts = ScanPage(page.keys.filter(mask), page.values.filter(mask)), expire_ts[there]
        self.vanished += len(there) - len(expire_ts)
        marks.append(time.perf_counter())
        if len(page.keys):
            converted = self.converter.convert_page(page, expire_ts)
            marks.append(time.perf_counter())
            self.files.add(converted)
            marks.append(time.perf_counter())
            self.regions.add(first_key, converted.target)
            ttl, convert, encode = (after - before for before, after in pairwise(marks))
            self._count(converted, PhaseSeconds(ttl=ttl, convert=convert, encode=encode))

    def _count(self, rows: Counted, seconds: PhaseSeconds) -> None:
        """Book a page: its rows, and what they took."""
        self.source += rows.source
        self.dropped_ttls += rows.dropped_ttls
        self.seconds.add(seconds)
        self.context.report(data_bytes=rows.source.total_bytes, keys=rows.source.total_kvs)


def copy_all(lanes: Sequence[Lane]) -> None:
    """Copy all parts at once. Raises the first error, when no lane works any more."""
    failed = threading.Event()

    def copy(lane: Lane) -> None:
        try:
            lane.copy(alone=False, failed=failed)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(lanes), thread_name_prefix="lane") as pool:
        try:
            for done in as_completed([pool.submit(copy, lane) for lane in lanes]):
                done.result()
        finally:
            failed.set()


def parts_of(rest: KeyRange, starts: Sequence[bytes], lanes: int) -> list[KeyRange]:
    """A range cut into at most so many parts, at some of the ascending keys: as many regions to each as can be."""
    inside = [start for start in starts if start > rest.start and (not rest.end or start < rest.end)]
    lanes = min(lanes, len(inside) + 1)
    cuts = [inside[len(inside) * number // lanes] for number in range(1, lanes)]
    return [KeyRange(start, end) for start, end in pairwise([rest.start, *cuts, rest.end])]
