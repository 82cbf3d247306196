"""One task of a restore: every replica's store gets a part of a file, by download or upload; the leader ingests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tikv_br import cancellation
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.compare.files import FilePart
from tikv_br.errors import (
    RetryBudgetExhausted,
    StorageDenied,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.restore.download import STORE_FULL, Download, IngestJob, disk_full
from tikv_br.restore.options import Via
from tikv_br.restore.plan import IngestResult
from tikv_br.restore.upload import Upload
from tikv_br.retry import STORAGE_UNREACHABLE, Backoffer
from tikv_br.storage.outage import patience_policy
from tikv_br.tasks.task import TaskContext

MANY_REGIONS = 8
"""Number of regions from which on a file is uploaded in pieces; checked again when regions split.

A store downloads the whole file for each region that gets a piece of it. For fewer regions that is faster, because stores download
in parallel; but not under a rate limit, and not where a download was in vain because its region has split: then the number is 2.
"""


_NOT_STARTED = frozenset({"not_leader", "server_is_busy", "disk_full", "proposal_in_merging_mode"})
"""Errors of an ingest that is refused before it reaches a replica: all of them still have the file."""


class Transfer(Protocol):
    """A way for a part of a file to get to stores."""

    downloads: int
    """Number of download requests for the file."""

    def transfer(self, region: Region, span: KeyRange) -> list[import_sstpb_pb2.SSTMeta]:
        """Have the stores of all replicas keep the rows in ``span``; returns what they have, in the order of the ingest."""


def ingest_part(job: IngestJob, part: FilePart, context: TaskContext) -> IngestResult:
    """Restore one part, region by region.

    Raises `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores, or we, find of the file, else
    `ClusterError`.
    """
    cluster = context.shared(ClusterPool).get(job.cluster)
    by_upload = job.via is Via.UPLOAD or part.file.name in job.fenced or part.rewrite.lacks_end(part.target)
    try:
        result = _ingest(cluster, job, part, Upload if by_upload else Download)
    except (StorageObjectMissing, StorageDenied) as refusal:
        if job.via is not Via.AUTO:
            raise
        result = _upload_instead(cluster, job, part, refusal)
    cancellation.check()
    if job.record is not None:
        job.record.add(part.span)
    context.report(data_bytes=part.totals.total_bytes, keys=part.totals.total_kvs)
    return result


def _upload_instead(cluster: Cluster, job: IngestJob, part: FilePart, refusal: Exception) -> IngestResult:
    """Upload a file that stores cannot read. Raises their error if it cannot be read here either."""
    try:
        return _ingest(cluster, job, part, Upload)
    except (StorageObjectMissing, StorageDenied):
        raise refusal from None


def _ingest(
    cluster: Cluster, job: IngestJob, part: FilePart, way: Callable[[Cluster, IngestJob, FilePart], Transfer]
) -> IngestResult:
    work = _Ingestion(cluster, job, part, way(cluster, job, part))
    with job.store.awaited():
        regions = sum(1 for _region in work.regions())
    return IngestResult(regions=regions, uploaded=len(part.files) if work.uploads else 0, downloads=work.downloads)


@dataclass(slots=True)
class _StagedSsts:
    """The files of one span that the stores of one region have staged and ingested, for its current epoch."""

    place: tuple[int, int, int, KeyRange]
    """Id, conf_ver and version of the region, and the span."""
    metas: list[import_sstpb_pb2.SSTMeta]
    """The files left to ingest, in this order."""


class _Ingestion:
    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart, transfer: Transfer) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = job.codec
        self._span = part.target
        self._transfer = transfer
        self._fetches = 0
        self._regions_done = 0
        self._earlier_downloads = 0
        self._staged: _StagedSsts | None = None
        self._storage_patience = job.store.location.patience

    @property
    def uploads(self) -> bool:
        """Return whether the file is uploaded instead of downloaded."""
        return isinstance(self._transfer, Upload)

    @property
    def downloads(self) -> int:
        """Return the number of download requests for the file."""
        return self._earlier_downloads + self._transfer.downloads

    def regions(self) -> Iterator[Region]:
        """Walk the regions of the part, each of them done when it is yielded."""
        start = self._span.start
        while True:
            region = self._ingest_next(KeyRange(start, self._span.end))
            self._regions_done += 1
            yield region
            start = self._codec.from_bound(region.end)
            if not start or (self._span.end and start >= self._span.end):
                return

    def _ingest_next(self, rest: KeyRange) -> Region:
        """Ingest into the first region of ``rest``. If it has split, the retry budget starts again.

        Rides out an outage of the storage that the stores read.
        """
        what, bound = f"ingest {self._part}", self._codec.bound(rest.start)
        end = self._cluster.regions.locate(bound).end
        outage = Backoffer(what, patience_policy(self._storage_patience))
        while True:
            try:
                return self._cluster.router.call(
                    bound, lambda region, leader: self._ingest_region(region, leader, rest), what
                )
            except StorageUnreachable as error:
                outage.wait(STORAGE_UNREACHABLE, error)
            except RetryBudgetExhausted:
                before, end = end, self._cluster.regions.locate(bound).end
                if not end or (before and end >= before):
                    raise

    def _ingest_region(self, region: Region, leader: StoreClient, rest: KeyRange) -> Region:
        """Transfer the rows to every replica of a region, then ingest them at the leader. Another epoch begins with the first file."""
        here = KeyRange(self._codec.from_bound(region.start), self._codec.from_bound(region.end))
        span = intersection(rest, here)
        place = region.id, region.conf_ver, region.version, span
        if self._staged is None or self._staged.place != place:
            self._staged = None
            if self._job.via is Via.AUTO and not self.uploads and self._spans_many_regions(rest):
                self._earlier_downloads = self.downloads
                self._transfer = Upload(self._cluster, self._job, self._part)
            self._staged = _StagedSsts(place, self._transfer.transfer(region, span))
            self._fetches += 1
        while self._staged.metas:
            self._ingest_at_leader(region, leader, self._staged)
        return region

    def _spans_many_regions(self, rest: KeyRange) -> bool:
        """Return whether the rest of the file is in so many regions that each store would fetch all of it too often."""
        most = MANY_REGIONS - 1 - self._fetches
        if self._job.upload_limit or self._fetches > self._regions_done:  # the latter: a region has split
            most = min(most, 1)
        start = rest.start
        for _region in range(most):
            region = self._cluster.regions.locate(self._codec.bound(start))
            start = self._codec.from_bound(region.end)
            if not start or (rest.end and start >= rest.end):
                return False
        return True

    def _ingest_at_leader(self, region: Region, leader: StoreClient, staged: _StagedSsts) -> None:
        self._staged = None  # a replica that has started the ingest does not have the file any more
        context = region.context(self._codec.api_version, self._cluster.cluster_id)
        answer = leader.ingest(import_sstpb_pb2.IngestRequest(context=context, sst=staged.metas[0]))
        if answer.HasField("error"):
            refusal = RegionErrorSeen(answer.error)
            if refusal.kind in _NOT_STARTED:
                self._staged = staged
            raise disk_full(STORE_FULL, leader.store.id) if STORE_FULL in answer.error.message else refusal
        del staged.metas[0]
        self._staged = staged
