"""One task of a restore: every replica's store fetches a part of a file, then the leader takes it into its region.

Ingesting the same rows twice changes nothing, so whatever goes wrong between the two is answered by doing both again
for the regions as they are then.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, import_sstpb_pb2, metapb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Peer, Region
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import BackupDamaged, ClusterUnreachable, StorageObjectMissing
from tikv_br.proof.rewrite import Rewrite, encoded_prefix
from tikv_br.restore.plan import Brought, FilePart
from tikv_br.restore.record import RestoreRecord
from tikv_br.spark.task import TaskContext

_DAMAGED = ("Corruption", "downloaded size", "sst magic number", "Bad table magic")
_MISSING = ("No such file or directory", "NoSuchKey", "NotFound", "404")
_LOCAL_HINT = "A local:// path must be the same directory on every store's machine; use s3:// where it is not."


@dataclass(frozen=True, slots=True)
class IngestJob:
    """What all tasks of a restore share. Pickles; `backend` and `cipher_info` may hold secrets and are never shown."""

    cluster: ClusterConfig
    api_version: ApiVersion
    backend: bytes
    """A serialized ``StorageBackend``."""
    cipher_info: bytes
    """A serialized ``CipherInfo``."""
    slow_seconds: float = 0.0
    """How much longer a download may take, because of a limit."""
    new_timestamp: int = 0
    """Which all rows get; 0 = they keep their own."""
    record: RestoreRecord | None = None
    """Where each part is written down when it is in."""

    def __repr__(self) -> str:
        return f"IngestJob({self.api_version.label})"


def ingest_part(job: IngestJob, part: FilePart, context: TaskContext) -> Brought:
    """Bring one part into the cluster, region by region.

    Raises `BackupDamaged` and `StorageObjectMissing` for what the stores say of the file, else `ClusterError`.
    """
    work = _Ingestion(shared_cluster(job.cluster), job, part)
    regions = sum(1 for _region in work.regions())
    if job.record is not None:
        job.record.add(part.span)
    context.report(data_bytes=part.file.total_bytes, keys=part.file.total_kvs)
    return Brought(regions=regions)


class _Ingestion:
    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._span = part.target
        self._rewrite = part.rewrite
        self._rule = _rule(part.rewrite, job)
        self._backend = brpb_pb2.StorageBackend.FromString(job.backend)
        self._slow_seconds = job.slow_seconds
        self._cipher_info = brpb_pb2.CipherInfo.FromString(job.cipher_info)

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
        """Download to every replica of the region, ingest on its leader."""
        here = KeyRange(self._codec.from_bound(region.start), self._codec.from_bound(region.end))
        meta = self._meta(region, intersection(rest, here))
        with ThreadPoolExecutor(len(region.peers)) as pool:
            found = list(pool.map(lambda peer: self._download(peer, meta), region.peers))
        if found[0] is not None:
            meta.range.CopyFrom(found[0])
            context = region.context(self._codec.api_version, self._cluster.cluster_id)
            answer = leader.ingest(import_sstpb_pb2.IngestRequest(context=context, sst=meta))
            if answer.HasField("error"):
                raise RegionErrorSeen(answer.error)
        return region

    def _meta(self, region: Region, span: KeyRange) -> import_sstpb_pb2.SSTMeta:
        start, end = self._rewrite.bounds(self._codec, span)
        return import_sstpb_pb2.SSTMeta(
            uuid=uuid.uuid4().bytes,
            range=import_sstpb_pb2.Range(start=start, end=end),
            length=self._file.size,
            cf_name="default",
            region_id=region.id,
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
            end_key_exclusive=True,
            total_kvs=self._file.total_kvs,
            total_bytes=self._file.total_bytes,
            api_version=self._codec.api_version.value,  # type: ignore[arg-type]
            cipher_iv=self._file.cipher_iv,
        )

    def _download(self, peer: Peer, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range | None:
        """Have one store fetch the file; the range that it found, or None when it holds no row of the part."""
        store = self._cluster.store(peer.store_id)
        request = import_sstpb_pb2.DownloadRequest(
            sst=meta,
            name=self._file.name,
            rewrite_rule=self._rule,
            storage_backend=self._backend,
            is_raw_kv=True,
            cipher_info=self._cipher_info,
        )
        answer = store.download(request, extra_seconds=self._slow_seconds)
        if answer.HasField("error"):
            raise self._meaning(store, answer.error)
        return None if answer.is_empty else answer.range

    def _meaning(self, store: StoreClient, error: import_sstpb_pb2.Error) -> Exception:
        """What a store's words about a download mean: there are no codes."""
        if error.HasField("store_error"):
            return RegionErrorSeen(error.store_error)
        message = f"{store} cannot use {self._file.name}: {error.message}"
        if any(mark in error.message for mark in _DAMAGED):
            return BackupDamaged(message)
        if any(mark in error.message for mark in _MISSING):
            return StorageObjectMissing(message, hint=_LOCAL_HINT if self._backend.HasField("local") else None)
        if "maybe it's not a replica of this store" in error.message:
            return RegionErrorSeen(errorpb_pb2.Error(message=message, region_not_found=errorpb_pb2.RegionNotFound()))
        return ClusterUnreachable(message)


def _rule(rewrite: Rewrite, job: IngestJob) -> import_sstpb_pb2.RewriteRule | None:
    """What a store is told to do with the keys; None for a file that is taken as it is."""
    if not rewrite.changes and not job.new_timestamp:
        return None
    old, new = (rewrite.old, rewrite.new) if rewrite.changes else (b"", b"")
    return import_sstpb_pb2.RewriteRule(
        old_key_prefix=encoded_prefix(job.api_version, old),
        new_key_prefix=encoded_prefix(job.api_version, new),
        new_timestamp=job.new_timestamp,
    )
