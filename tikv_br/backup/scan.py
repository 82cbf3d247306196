"""The task of the scan engine: scans one interval page by page, converts the rows, and writes the files."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise

from msgspec import Struct, field

from tikv_br.backupset.ledger import FinishedTask, LedgerEntry, write_entry
from tikv_br.cancellation import inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.scan import Prefetcher
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.dataflow.convert import BatchStats, Converter
from tikv_br.dataflow.plan import cut_at
from tikv_br.dataflow.write import BackupJob, DataFiles, PhaseSeconds, RegionCounts, TaskResult, try_task
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage, ScanPage
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.tasks.task import TaskContext

PROBE_BYTES = 32 << 20
"""Bytes of a task after which the time that it waits for pages is known."""
MAX_PARALLEL_SCANS = 4
"""Maximum number of parallel scans of a task. Each holds its own pages and file buffers in memory."""

ScanPart = Callable[[KeyRange], Iterator[RawPage]]


class ScanProbe:
    """Measures at the start of a task how much of its time it waits for pages, leaving out the small first ones."""

    def __init__(self, pages: Prefetcher[RawPage]) -> None:
        self._pages = pages
        self._began = self._waited = 0.0

    def parallel_scans(self, copied: int) -> int:
        """Return the number of parallel scans that keeps the processor busy; 0 = unknown before `PROBE_BYTES` are ``copied``.

        The first quarter of them is not measured: pages start small.
        """
        now, waited = time.perf_counter(), self._pages.seconds_waiting
        if copied < PROBE_BYTES // 4:
            self._began, self._waited = now, waited
        if copied < PROBE_BYTES:
            return 0
        waited -= self._waited
        # Each scan waits so many times as long as the processor works on its rows: so many others keep it busy meanwhile.
        return min(MAX_PARALLEL_SCANS, 1 + int(waited / max(now - self._began - waited, 1e-6)))


class RangeScan(Struct):
    """Copies a part of the interval: scans it page by page, one page ahead, converts the rows and writes files. For one thread."""

    part: KeyRange
    files: DataFiles
    converter: Converter
    context: TaskContext
    regions: RegionCounts
    scan: ScanPart
    ttls: TtlFetcher | None
    """Fetches each row's expiry; None if rows have none."""
    source: Checksum = field(default_factory=Checksum)
    dropped_ttls: int = 0
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)

    def copy(self, *, probe: bool, failed: threading.Event | None = None) -> tuple[KeyRange, int] | None:
        """Copy the range. With ``probe``, stop as soon as parallel scans would be faster; return the remaining range and their number.

        Ends early if ``failed`` is set.
        """
        pages = Prefetcher(self.scan(self.part))
        scan_probe = ScanProbe(pages) if probe else None
        parallel, page = 0, None
        for page in pages:
            self._copy_page(page)
            if failed and failed.is_set():
                break
            if scan_probe and parallel < 2:
                parallel = scan_probe.parallel_scans(self.source.total_bytes)
                if parallel > 1:
                    pages.stop()  # after the page in progress
        self.seconds.scan += pages.seconds
        return (KeyRange(page.last_key + b"\0", self.part.end), parallel) if page and parallel > 1 else None

    def narrow(self, part: KeyRange) -> None:
        """Continue with this part of the range only."""
        self.part = part
        self.files.narrow(self.converter.target_range(part).end)
        self.regions.narrow(part.end)

    def _copy_page(self, page: RawPage) -> None:
        if self.ttls is not None:
            self._copy_expiring(page.split(), page.first_key, self.ttls)
            return
        began = time.perf_counter()
        counted = self.files.add_page(page)
        self.regions.add(page.first_key, counted.target)
        self._count(counted, PhaseSeconds(encode=time.perf_counter() - began))

    def _copy_expiring(self, page: ScanPage, first_key: bytes, ttls: TtlFetcher) -> None:

        marks = [time.perf_counter()]
        page, expire_ts = ttls.live_rows(page)
        marks.append(time.perf_counter())
        if len(page.keys):
            converted = self.converter.convert_page(page, expire_ts)
            marks.append(time.perf_counter())
            self.files.add(converted)
            marks.append(time.perf_counter())
            self.regions.add(first_key, converted.target)
            ttl, convert, encode = (after - before for before, after in pairwise(marks))
            self._count(converted, PhaseSeconds(ttl=ttl, convert=convert, encode=encode))

    def _count(self, rows: BatchStats, seconds: PhaseSeconds) -> None:
        self.source += rows.source
        self.dropped_ttls += rows.dropped_ttls
        self.seconds.add(seconds)
        self.context.report(data_bytes=rows.source.total_bytes, keys=rows.source.total_kvs)


def copy_parallel(scans: Sequence[RangeScan]) -> None:
    """Run all scans in parallel. Raises the first error, once all scans have stopped."""
    failed = threading.Event()

    def copy(scan: RangeScan) -> None:
        try:
            scan.copy(probe=False, failed=failed)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(scans), thread_name_prefix="scan") as pool:
        try:
            for done in as_completed([pool.submit(inherit(copy), scan) for scan in scans]):
                done.result()
        finally:
            failed.set()


def split_range(rest: KeyRange, starts: Sequence[bytes], count: int) -> list[KeyRange]:
    """Split a range into at most ``count`` parts at some of the ascending ``starts``, with about equally many regions each."""
    inside = [start for start in starts if start > rest.start and (not rest.end or start < rest.end)]
    count = min(count, len(inside) + 1)
    cuts = [inside[len(inside) * number // count] for number in range(1, count)]
    return [KeyRange(start, end) for start, end in pairwise([rest.start, *cuts, rest.end])]


def run_scan_task(job: BackupJob, interval: KeyRange, context: TaskContext) -> TaskResult:
    """Copy one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    options, clusters = job.options, context.shared(ClusterPool)
    return try_task(
        context,
        lambda: _ScanAttempt(job, interval, context, clusters.get(options.cluster), open_store(options.storage)).run(),
    )


class _ScanAttempt(Struct):
    job: BackupJob
    interval: KeyRange
    context: TaskContext
    cluster: Cluster
    store: ObjectStore
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    scans: list[RangeScan] = field(default_factory=list)

    def run(self) -> TaskResult:
        """Write the files and the ledger entry; after an error the files are removed."""
        converter = self.job.conversion.of(self.interval)
        raw = RawClient(self.cluster.router, converter.source, self.cluster.cluster_id)
        try:
            rest = self._add_scan(raw, converter, self.interval).copy(probe=not self.job.rate_limit)
            if rest is not None:
                self._copy_rest(raw, converter, *rest)
            return self._finish()
        except BaseException:
            for scan in self.scans:
                scan.files.abandon()
            raise

    def _copy_rest(self, raw: RawClient, converter: Converter, rest: KeyRange, parallel: int) -> None:
        """Continue with the first scan and, if the rest has enough regions, with further ones in parallel."""
        codec = converter.source
        regions = self.cluster.pd.scan_regions(codec.bound(rest.start), codec.bound(rest.end))
        parts = split_range(rest, [cut_at(region.start, codec) for region in regions], parallel)
        self.scans[0].narrow(parts[0])
        for part in parts[1:]:
            self._add_scan(raw, converter, part)
        copy_parallel(self.scans)

    def _add_scan(self, raw: RawClient, converter: Converter, part: KeyRange) -> RangeScan:
        job = self.job
        files = DataFiles(
            self.store,
            self.interval,
            f"{self.name}_{len(self.scans)}" if self.scans else self.name,
            converter,
            job.options,
            part,
        )
        scan = RangeScan(
            part,
            files,
            converter,
            self.context,
            RegionCounts(self.cluster.regions, converter, part),
            lambda part: raw.scan_raw_pages(part, rate_limit=job.rate_limit),
            TtlFetcher(self.cluster, raw) if job.with_ttl else None,
        )
        self.scans.append(scan)
        return scan

    def _finish(self) -> TaskResult:
        began = time.perf_counter()
        entry = LedgerEntry(
            self.interval.start,
            self.interval.end,
            self.name,
            tuple(file for scan in self.scans for file in scan.files.finish()),
            source=self._source,
            vanished=sum(scan.ttls.vanished if scan.ttls else 0 for scan in self.scans),
            dropped_ttls=sum(scan.dropped_ttls for scan in self.scans),
            expiry_error_seconds=max(scan.ttls.error_seconds if scan.ttls else 0 for scan in self.scans),
            run=self.job.run,
            regions=tuple(region for scan in self.scans for region in scan.regions.parts()),
        )
        write_entry(self.store, entry)
        uploading = sum(scan.files.seconds_uploading for scan in self.scans)
        seconds = PhaseSeconds(encode=time.perf_counter() - began - uploading, upload=uploading)
        for scan in self.scans:
            seconds.add(scan.seconds)
        return TaskResult(FinishedTask.of(entry), seconds)

    @property
    def _source(self) -> Checksum:
        return sum((scan.source for scan in self.scans), Checksum())
