"""One task of a restore: a part of a file gets to every replica's store, then the leader takes it into its region.

Ingesting the same rows twice changes nothing, so whatever goes wrong between the two is answered by doing both again
for the regions as they are then. What a store has fetched for a region is not fetched again while the region stays as it is
and nothing has been made of it yet: a new leader, or one that is busy, finds it where it lies.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import import_sstpb_pb2, metapb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Region
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import StorageDenied, StorageObjectMissing
from tikv_br.restore.download import Download
from tikv_br.restore.job import IngestJob
from tikv_br.restore.options import Via
from tikv_br.restore.plan import Brought, FilePart
from tikv_br.restore.upload import Upload
from tikv_br.spark.task import TaskContext

CUT_UP = 8
"""Regions from which on a file is sent in pieces. Fewer fetch it whole: that is done by machines that do not wait for each other."""
_NOT_BEGUN = frozenset({"not_leader", "server_is_busy", "disk_full", "proposal_in_merging_mode"})
"""Errors of an ingest that is refused before any replica hears of it: the files still lie at all of them."""


class Transfer(Protocol):
    """A way for a part of a file to get to stores."""

    def bring(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep what lies in ``span`` and complete ``meta``; False when nothing does.

        After an error another try takes another ``meta``: a store may still be at work on this one.
        """


def ingest_part(job: IngestJob, part: FilePart, context: TaskContext) -> Brought:
    """Bring one part into the cluster, region by region.

    Raises `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores, or we, find of the file, else
    `ClusterError`.
    """
    cluster = shared_cluster(job.cluster)
    if job.via is Via.UPLOAD or (job.via is Via.AUTO and _is_cut_up(cluster, job, part)):
        brought = _ingest(cluster, job, part, Upload)
    else:
        try:
            brought = _ingest(cluster, job, part, Download)
        except (StorageObjectMissing, StorageDenied) as refusal:
            if job.via is Via.STORES:
                raise
            brought = _upload_instead(cluster, job, part, refusal)
    if job.record is not None:
        job.record.add(part.span)
    context.report(data_bytes=part.file.total_bytes, keys=part.file.total_kvs)
    return brought


def _is_cut_up(cluster: Cluster, job: IngestJob, part: FilePart) -> bool:
    """Whether the part lies in so many regions that it is sent, each region its own piece.

    A store fetches a whole file for each region that is to get a piece of it: there is no other request.
    """
    codec, start, end = KeyCodec(job.api_version), part.target.start, part.target.end
    for _region in range(CUT_UP - 1):
        region = cluster.regions.locate(codec.bound(start))
        start = codec.from_bound(region.end)
        if not start or (end and start >= end):
            return False
    return True


def _upload_instead(cluster: Cluster, job: IngestJob, part: FilePart, refusal: Exception) -> Brought:
    """The stores cannot reach a file that we could; raises their words for it when we cannot either."""
    try:
        return _ingest(cluster, job, part, Upload)
    except (StorageObjectMissing, StorageDenied):
        raise refusal from None


def _ingest(
    cluster: Cluster, job: IngestJob, part: FilePart, way: Callable[[Cluster, IngestJob, FilePart], Transfer]
) -> Brought:
    work = _Ingestion(cluster, job, part, way(cluster, job, part))
    return Brought(regions=sum(1 for _region in work.regions()), uploaded=int(way is Upload))


@dataclass(slots=True)
class _Held:
    """What stores hold, or are about to, of one span for one region as it is now."""

    place: tuple[int, int, int, KeyRange]
    """Id, conf_ver and version of the region, and the span."""
    meta: import_sstpb_pb2.SSTMeta
    found: bool | None = None
    """Whether the file has rows there; None until all stores have answered."""


class _Ingestion:
    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart, transfer: Transfer) -> None:
        self._cluster = cluster
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._span = part.target
        self._transfer = transfer
        self._held: _Held | None = None

    def regions(self) -> Iterator[Region]:
        """Walk the regions of the part, each of them done when it is yielded."""
        start = self._span.start
        while True:
            rest = KeyRange(start, self._span.end)
            region = self._cluster.router.call(
                self._codec.bound(start),
                lambda region, leader, rest=rest: self._bring(region, leader, rest),  # type: ignore[misc]
                f"ingest {self._file.name}",
            )
            yield region
            start = self._codec.from_bound(region.end)
            if not start or (self._span.end and start >= self._span.end):
                return

    def _bring(self, region: Region, leader: StoreClient, rest: KeyRange) -> Region:
        """Get it to every replica of the region, ingest on its leader."""
        here = KeyRange(self._codec.from_bound(region.start), self._codec.from_bound(region.end))
        held = self._hold(region, intersection(rest, here))
        if held.found is None:
            self._held = None  # until all have answered: two fetches of one name at one store would mix
            held.found = self._transfer.bring(region, held.meta, held.place[-1])
            self._held = held
        if held.found:
            self._take_in(region, leader, held)
        return region

    def _hold(self, region: Region, span: KeyRange) -> _Held:
        """What an earlier try has left at the stores, or nothing yet."""
        place = region.id, region.conf_ver, region.version, span
        if self._held is None or self._held.place != place:
            self._held = _Held(place, self._meta(region))
        return self._held

    def _take_in(self, region: Region, leader: StoreClient, held: _Held) -> None:
        self._held = (
            None  # unless it is said that no replica has heard of the ingest: one that has lacks the file later
        )
        context = region.context(self._codec.api_version, self._cluster.cluster_id)
        answer = leader.ingest(import_sstpb_pb2.IngestRequest(context=context, sst=held.meta))
        if answer.HasField("error"):
            refusal = RegionErrorSeen(answer.error)
            if refusal.kind in _NOT_BEGUN:
                self._held = held
            raise refusal

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
