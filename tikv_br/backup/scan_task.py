"""The scan engine's task: page through one interval, convert, write SSTs, and record it in the ledger.

Runs in a Spark Python worker or a thread.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from formats.rawscan import ScanPage
from tikv_br.backup.ahead import Ahead
from tikv_br.backup.convert import Conversion, Converter
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.row_writer import FileForm
from tikv_br.backup.task import PhaseSeconds, Task, TaskResult, try_task
from tikv_br.backupset.ledger import LedgerEntry, write_entry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.throttle import shared_throttle
from tikv_br.spark.task import TaskContext
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.backup.ttl import TtlFetcher


@dataclass(frozen=True, slots=True)
class ScanJob:
    """What all tasks of a run share. Pickles."""

    cluster: ClusterConfig
    storage: StorageLocation
    conversion: Conversion
    form: FileForm
    file_bytes: int
    """Keys and values of a file, before encoding and compression."""
    with_ttl: bool
    """Whether each row's expiry is fetched; never of a cluster without TTL."""
    rate_limit: int
    """Bytes a second that this process may read from each store; 0 = no limit."""


def run_scan_task(job: ScanJob, task: Task, context: TaskContext) -> TaskResult:
    """Do one interval, anew where an error may pass. Raises the `TikvBrError` of the last attempt."""
    return try_task(lambda: _Attempt(job, task, context, shared_cluster(job.cluster), open_store(job.storage)).run())


@dataclass(slots=True)
class _Attempt:
    """One try at a task."""

    job: ScanJob
    task: Task
    context: TaskContext
    cluster: Cluster
    store: ObjectStore
    converter: Converter = field(init=False)
    source: Checksum = field(default_factory=Checksum)
    vanished: int = 0
    dropped_ttls: int = 0
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)

    def __post_init__(self) -> None:
        self.converter = self.job.conversion.of(self.task.interval)

    def run(self) -> TaskResult:
        """Write the files and the ledger entry, or nothing."""
        name = secrets.token_hex(8)
        files = self._files(name)
        try:
            self._copy(files)
            began = time.perf_counter()
            entry = LedgerEntry(
                self.task.start,
                self.task.end,
                name,
                files.finish(),
                source=self.source,
                vanished=self.vanished,
                dropped_ttls=self.dropped_ttls,
            )
            write_entry(self.store, entry)
            self.seconds.encode += time.perf_counter() - began - files.seconds_uploading
        except BaseException:
            files.abandon()
            self.context.report(data_bytes=-self.source.total_bytes, keys=-self.source.total_kvs)
            raise
        self.seconds.upload = files.seconds_uploading
        return TaskResult(entry, self.seconds)

    def _copy(self, files: DataFiles) -> None:
        raw = RawClient(self.cluster.router, self.converter.source, self.cluster.cluster_id)
        ttls = self._ttl_fetcher(raw) if self.job.with_ttl else None
        limit = self.job.rate_limit
        throttle = shared_throttle(self.job.cluster, limit) if limit else None
        pages = Ahead(raw.scan_pages(self.task.start, self.task.end, throttle=throttle))
        for page in pages:
            self._copy_page(page, ttls, files)
        self.seconds.scan = pages.seconds

    def _copy_page(self, page: ScanPage, ttls: TtlFetcher | None, files: DataFiles) -> None:
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
            converted = self.converter.convert_page(page, expire_ts)
            marks.append(time.perf_counter())
            files.add(converted)
            marks.append(time.perf_counter())
            self.dropped_ttls += converted.dropped_ttls
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

    def _files(self, name: str) -> DataFiles:
        return DataFiles(
            self.store,
            self.task.interval,
            self.converter.target_range(self.task.interval),
            name,
            form=self.job.form,
            codec=self.converter.target,
            file_bytes=self.job.file_bytes,
        )
