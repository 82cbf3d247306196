"""One task of a restore: every replica's store gets a part of a file, by download or upload; the leader ingests it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tikv_br import cancellation
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.pb import import_sstpb_pb2, metapb_pb2
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
from tikv_br.formats.keys.codec import KeyCodec
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

    def transfer(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have the stores of all replicas keep the rows in ``span`` and complete ``meta``; False when nothing does.

        After an error another try takes another ``meta``: a store may still be at work on this one.
        """


def ingest_part(job: IngestJob, part: FilePart, context: TaskContext) -> IngestResult:
    """Restore one part, region by region.

    Raises `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores, or we, find of the file, else
    `ClusterError`.
    """
    cluster = context.shared(ClusterPool).get(job.cluster)
    try:
        result = _ingest(cluster, job, part, Upload if job.via is Via.UPLOAD else Download)
    except (StorageObjectMissing, StorageDenied) as refusal:
        if job.via is not Via.AUTO:
            raise
        result = _upload_instead(cluster, job, part, refusal)
    cancellation.check()
    if job.record is not None:
        job.record.add(part.span)
    context.report(data_bytes=part.file.total_bytes, keys=part.file.total_kvs)
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
    regions = sum(1 for _region in work.regions())
    return IngestResult(regions=regions, uploaded=int(work.uploads), downloads=work.downloads)


@dataclass(slots=True)
class _StagedSst:
    """Transfer of one span to the stores of one region, for its current epoch."""

    place: tuple[int, int, int, KeyRange]
    """Id, conf_ver and version of the region, and the span."""
    meta: import_sstpb_pb2.SSTMeta
    found: bool | None = None
    """True if the file has rows there; None until all stores have answered."""


class _Ingestion:
    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart, transfer: Transfer) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._span = part.target
        self._transfer = transfer
        self._fetches = 0
        self._regions_done = 0
        self._earlier_downloads = 0
        self._staged: _StagedSst | None = None
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
        what, bound = f"ingest {self._file.name}", self._codec.bound(rest.start)
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
        """Transfer the rows to every replica of a region, then ingest them at the leader."""
        here = KeyRange(self._codec.from_bound(region.start), self._codec.from_bound(region.end))
        held = self._stage(region, intersection(rest, here))
        if held.found is None:
            self._staged = None  # until all have answered: two downloads of one name at one store would conflict
            if self._job.via is Via.AUTO and not self.uploads and self._spans_many_regions(rest):
                self._earlier_downloads = self.downloads
                self._transfer = Upload(self._cluster, self._job, self._part)
            held.found = self._transfer.transfer(region, held.meta, held.place[-1])
            self._fetches += 1
            self._staged = held
        if held.found:
            self._ingest_at_leader(region, leader, held)
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

    def _stage(self, region: Region, span: KeyRange) -> _StagedSst:
        """Return the state of an earlier attempt for the same span and epoch, or a new one."""
        place = region.id, region.conf_ver, region.version, span
        if self._staged is None or self._staged.place != place:
            self._staged = _StagedSst(place, self._meta(region))
        return self._staged

    def _ingest_at_leader(self, region: Region, leader: StoreClient, held: _StagedSst) -> None:
        self._staged = None  # a replica that has started the ingest does not have the file any more
        context = region.context(self._codec.api_version, self._cluster.cluster_id)
        answer = leader.ingest(import_sstpb_pb2.IngestRequest(context=context, sst=held.meta))
        if answer.HasField("error"):
            refusal = RegionErrorSeen(answer.error)
            if refusal.kind in _NOT_STARTED:
                self._staged = held
            raise disk_full(STORE_FULL, leader.store.id) if STORE_FULL in answer.error.message else refusal

    def _meta(self, region: Region) -> import_sstpb_pb2.SSTMeta:
        return import_sstpb_pb2.SSTMeta(
            uuid=uuid.uuid4().bytes,
            cf_name="default",
            region_id=region.id,
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
            total_kvs=self._file.total_kvs,
            total_bytes=self._file.total_bytes,
            api_version=self._codec.api_version.value,  # type: ignore[arg-type]
        )
