"""How a part of a file gets to the replicas of a region: each replica's store fetches it from the storage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from formats.keys import KeyCodec
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, import_sstpb_pb2
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Peer, Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import BackupDamaged, ClusterUnreachable, StorageDenied, StorageObjectMissing
from tikv_br.proof.rewrite import Rewrite, encoded_prefix
from tikv_br.restore.job import IngestJob
from tikv_br.restore.plan import FilePart

_DAMAGED = ("Corruption", "downloaded size", "sst magic number", "Bad table magic")
_MISSING = ("No such file or directory", "NoSuchKey", "NotFound", "404")
_DENIED = ("AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Permission denied")
_LOCAL_HINT = (
    "A local:// path must be the same directory on every store's machine; use s3:// where it is not, or --via upload."
)
_DENIED_HINT = "Give the stores rights to read the storage, or say --via upload."


class Download:
    """Has stores fetch one part."""

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._rewrite = part.rewrite
        self._rule = _rule(part.rewrite, job)
        self._backend = brpb_pb2.StorageBackend.FromString(job.backend)
        self._slow_seconds = job.slow_seconds
        self._fetched: dict[tuple[bytes, int], import_sstpb_pb2.Range | None] = {}
        self._cipher_info = brpb_pb2.CipherInfo.FromString(job.cipher_info)

    def bring(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep what lies in ``span``; False when the file has no row there.

        Completes ``meta`` with what the stores keep. Raises `RegionErrorSeen` and `ClusterUnreachable` where another try may
        help, `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores say of the file.
        """
        start, end = self._rewrite.bounds(self._codec, span)
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=start, end=end))
        meta.length, meta.end_key_exclusive, meta.cipher_iv = self._file.size, True, self._file.cipher_iv
        with ThreadPoolExecutor(len(region.peers)) as pool:
            found = list(pool.map(lambda peer: self._download(peer, meta), region.peers))
        if found[0] is None:
            return False
        meta.range.CopyFrom(found[0])
        return True

    def _download(self, peer: Peer, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range | None:
        """Have one store fetch the file, once; the range that it found, or None when it holds no row of the part."""
        asked = meta.uuid, peer.store_id
        if asked not in self._fetched:
            self._fetched[asked] = self._fetch(peer, meta)
        return self._fetched[asked]

    def _fetch(self, peer: Peer, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range | None:
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
        if any(mark in error.message for mark in _DENIED):
            return StorageDenied(message, hint=_DENIED_HINT)
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
