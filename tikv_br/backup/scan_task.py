"""The scan engine's task: page through one interval, convert, write SSTs, and record it in the ledger.

Runs in a Spark Python worker or a thread.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from tikv_br.backup.convert import Conversion, Converter
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.plan import cut_at
from tikv_br.backup.region_tally import RegionTally
from tikv_br.backup.row_writer import FileForm
from tikv_br.backup.scan_lane import Lane, Rest, copy_all, parts_of
from tikv_br.backup.task import PhaseSeconds, Task, TaskResult, try_task
from tikv_br.backupset.coverage import KeyRange
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

    run: str
    """See `LedgerEntry`."""
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
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    lanes: list[Lane] = field(default_factory=list)

    def run(self) -> TaskResult:
        """Write the files and the ledger entry, or nothing."""
        converter = self.job.conversion.of(self.task.interval)
        raw = RawClient(self.cluster.router, converter.source, self.cluster.cluster_id)
        try:
            rest = self._open_lane(raw, converter, self.task.interval).copy(alone=not self.job.rate_limit)
            if rest is not None:
                self._copy_rest(raw, converter, rest)
            return self._finish()
        except BaseException:
            for lane in self.lanes:
                lane.files.abandon()
            source = self._source
            self.context.report(data_bytes=-source.total_bytes, keys=-source.total_kvs)
            raise

    def _copy_rest(self, raw: RawClient, converter: Converter, rest: Rest) -> None:
        """Go on in the lane there is, and in others beside it where there are regions enough."""
        codec, part = converter.source, rest.part
        regions = self.cluster.pd.scan_regions(codec.bound(part.start), codec.bound(part.end))
        parts = parts_of(part, [cut_at(region.start, codec) for region in regions], rest.lanes)
        self.lanes[0].narrow(parts[0])
        for part in parts[1:]:
            self._open_lane(raw, converter, part)
        copy_all(self.lanes)

    def _open_lane(self, raw: RawClient, converter: Converter, part: KeyRange) -> Lane:
        job = self.job
        files = DataFiles(
            self.store,
            self.task.interval,
            converter.target_range(part),
            f"{self.name}{len(self.lanes) or ''}",
            form=job.form,
            codec=converter.target,
            file_bytes=job.file_bytes,
        )
        throttle = shared_throttle(job.cluster, job.rate_limit) if job.rate_limit else None
        lane = Lane(
            part,
            files,
            converter,
            self.context,
            RegionTally(self.cluster.regions, converter, part),
            lambda part: raw.scan_raw_pages(part.start, part.end, throttle=throttle),
            self._ttl_fetcher(raw) if job.with_ttl else None,
        )
        self.lanes.append(lane)
        return lane

    def _finish(self) -> TaskResult:
        began = time.perf_counter()
        entry = LedgerEntry(
            self.task.start,
            self.task.end,
            self.name,
            tuple(file for lane in self.lanes for file in lane.files.finish()),
            source=self._source,
            vanished=sum(lane.vanished for lane in self.lanes),
            dropped_ttls=sum(lane.dropped_ttls for lane in self.lanes),
            run=self.job.run,
            regions=tuple(region for lane in self.lanes for region in lane.regions.parts()),
        )
        write_entry(self.store, entry)
        uploading = sum(lane.files.seconds_uploading for lane in self.lanes)
        seconds = PhaseSeconds(encode=time.perf_counter() - began - uploading, upload=uploading)
        for lane in self.lanes:
            seconds.add(lane.seconds)
        return TaskResult(entry, seconds)

    @property
    def _source(self) -> Checksum:
        """Of all rows so far."""
        return sum((lane.source for lane in self.lanes), Checksum())

    def _ttl_fetcher(self, raw: RawClient) -> TtlFetcher:
        from tikv_br.backup.ttl import TtlFetcher

        return TtlFetcher(self.cluster, raw)
