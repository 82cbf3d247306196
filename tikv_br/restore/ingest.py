"""One task of a restore: a part of a file gets to every replica's store, then the leader takes it into its region.

Ingesting the same rows twice changes nothing, so whatever goes wrong between the two is answered by doing both again
for the regions as they are then.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
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


class Transfer(Protocol):
    """A way for a part of a file to get to stores."""

    def bring(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep what lies in ``span`` and complete ``meta``; False when nothing does."""


def ingest_part(job: IngestJob, part: FilePart, context: TaskContext) -> Brought:
    """Bring one part into the cluster, region by region.

    Raises `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores, or we, find of the file, else
    `ClusterError`.
    """
    cluster = shared_cluster(job.cluster)
    if job.via is Via.UPLOAD:
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


class _Ingestion:
    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart, transfer: Transfer) -> None:
        self._cluster = cluster
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._span = part.target
        self._transfer = transfer

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
        meta = self._meta(region)
        if self._transfer.bring(region, meta, intersection(rest, here)):
            context = region.context(self._codec.api_version, self._cluster.cluster_id)
            answer = leader.ingest(import_sstpb_pb2.IngestRequest(context=context, sst=meta))
            if answer.HasField("error"):
                raise RegionErrorSeen(answer.error)
        return region

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
