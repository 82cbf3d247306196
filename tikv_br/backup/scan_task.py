"""The scan engine's task: page through one interval, convert, write SSTs, and record it in the ledger.

Runs in a Spark Python worker or a thread. May run again, or twice at once: every attempt writes to names of its own, and
only an attempt that came to its end leaves a ledger entry.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from formats.rawscan import ScanPage
from formats.sst.compression import Compression
from tikv_br.backup.ahead import Ahead
from tikv_br.backup.convert import Converter
from tikv_br.backup.sst_files import SstFiles
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.ledger import LedgerEntry, write_entry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import RetryBudgetExhausted, TikvBrError
from tikv_br.spark.task import TaskContext
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.backup.ttl import TtlFetcher

ATTEMPTS = 3
"""How often a task is tried while its errors may pass; each request inside has retries of its own."""


@dataclass(frozen=True, slots=True)
class ScanJob:
    """What all tasks of a run share. Pickles."""

    cluster: ClusterConfig
    storage: StorageLocation
    converter: Converter
    compression: Compression
    compression_level: int
    file_bytes: int
    """Keys and values of an SST, before encoding and compression."""
    with_ttl: bool
    """Whether each row's expiry is fetched; never of a cluster without TTL."""


@dataclass(frozen=True, slots=True)
class ScanTask:
    """One interval: RPC keys of the source."""

    start: bytes
    end: bytes

    @property
    def interval(self) -> KeyRange:
        """`start` and `end`."""
        return KeyRange(self.start, self.end)

    def __str__(self) -> str:
        return str(self.interval)


@dataclass(slots=True)
class PhaseSeconds:
    """Where a task's time went; scanning and the rest overlap."""

    scan: float = 0.0
    ttl: float = 0.0
    convert: float = 0.0
    """Conversion and checksums."""
    encode: float = 0.0
    """Building and compressing SST blocks."""
    upload: float = 0.0
    """Hashing and handing bytes to the storage."""

    def add(self, other: PhaseSeconds) -> None:
        """Sum up."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a task came to."""

    entry: LedgerEntry
    source: Checksum
    """Of the rows written, as the source's servers count them."""
    vanished: int
    """Rows that had gone when their TTL was asked for."""
    seconds: PhaseSeconds


def run_scan_task(job: ScanJob, task: ScanTask, context: TaskContext) -> ScanResult:
    """Do one interval, anew where an error may pass. Raises the `TikvBrError` of the last attempt."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _Attempt(job, task, context, shared_cluster(job.cluster), open_store(job.storage)).run()
        except TikvBrError as error:
            if attempt == ATTEMPTS or not (error.retryable or isinstance(error, RetryBudgetExhausted)):
                raise
    raise AssertionError


@dataclass(slots=True)
class _Attempt:
    """One try at a task."""

    job: ScanJob
    task: ScanTask
    context: TaskContext
    cluster: Cluster
    store: ObjectStore
    source: Checksum = field(default_factory=Checksum)
    vanished: int = 0
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)

    def run(self) -> ScanResult:
        """Write the files and the ledger entry, or nothing."""
        name = secrets.token_hex(8)
        files = self._files(name)
        try:
            self._copy(files)
            began = time.perf_counter()
            entry = LedgerEntry(self.task.start, self.task.end, name, files.finish())
            write_entry(self.store, entry)
            self.seconds.encode += time.perf_counter() - began - files.seconds_uploading
        except BaseException:
            files.abandon()
            self.context.report(data_bytes=-self.source.total_bytes, keys=-self.source.total_kvs)
            raise
        self.seconds.upload = files.seconds_uploading
        return ScanResult(entry, self.source, self.vanished, self.seconds)

    def _copy(self, files: SstFiles) -> None:
        raw = RawClient(self.cluster.router, self.job.converter.source, self.cluster.cluster_id)
        ttls = self._ttl_fetcher(raw) if self.job.with_ttl else None
        pages = Ahead(raw.scan_pages(self.task.start, self.task.end))
        for page in pages:
            self._copy_page(page, ttls, files)
        self.seconds.scan = pages.seconds

    def _copy_page(self, page: ScanPage, ttls: TtlFetcher | None, files: SstFiles) -> None:
        import pyarrow as pa

        marks = [time.perf_counter()]
        expire_ts = None
        if ttls is not None:
            expire_ts, there = ttls.fetch(page.keys)
            mask = pa.array(there)
            page, expire_ts = ScanPage(page.keys.filter(mask), page.values.filter(mask)), expire_ts[there]
            self.vanished += len(there) - len(expire_ts)
        marks.append(time.perf_counter())
        if len(page.keys):
            converted = self.job.converter.convert(page, expire_ts)
            marks.append(time.perf_counter())
            files.add(converted)
            marks.append(time.perf_counter())
            self._count(converted.source, marks)

    def _count(self, sums: Checksum, marks: list[float]) -> None:
        """Book a page: its rows, and the moments after TTLs, conversion and writing."""
        self.source += sums
        begun, fetched, converted, written = marks
        self.seconds.add(PhaseSeconds(ttl=fetched - begun, convert=converted - fetched, encode=written - converted))
        self.context.report(data_bytes=sums.total_bytes, keys=sums.total_kvs)

    def _ttl_fetcher(self, raw: RawClient) -> TtlFetcher:
        from tikv_br.backup.ttl import TtlFetcher

        return TtlFetcher(self.cluster, raw)

    def _files(self, name: str) -> SstFiles:
        from formats.sst import SstOptions

        return SstFiles(
            self.store,
            self.task.interval,
            self.job.converter.target_range(self.task.interval),
            name,
            options=SstOptions(self.job.compression, self.job.compression_level),
            file_bytes=self.job.file_bytes,
            ts=self.job.converter.ts,
        )
