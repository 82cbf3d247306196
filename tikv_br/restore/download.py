"""Downloads: each replica's store gets a part of a file from the storage."""

from __future__ import annotations

import itertools
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tikv_br.backupset.files import FileEntry
from tikv_br.cancellation import inherit
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, import_sstpb_pb2, metapb_pb2
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.regions import Peer, Region
from tikv_br.cluster.store import StoreClient
from tikv_br.compare.files import FilePart
from tikv_br.errors import (
    BackupDamaged,
    ClusterUnreachable,
    StorageDenied,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import Rewrite, encoded_prefix
from tikv_br.restore.options import Via
from tikv_br.restore.record import RestoreRecord
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.credentials import strip_names


@dataclass(frozen=True, slots=True)
class IngestJob:
    """Parameters that all tasks of a restore share.

    Picklable; `backend` and `cipher_info` may hold secrets and are never shown.
    """

    cluster: ClusterConfig
    api_version: ApiVersion
    """API version of the files."""
    codec: KeyCodec
    """That of the target, in any keyspace."""
    store: ObjectStore
    """Storage of the files, for this process."""
    via: Via
    backend: bytes
    """A serialized ``StorageBackend``: where they are for the stores."""
    cipher_info: bytes
    """Serialized ``CipherInfo``."""
    upload_limit: RateLimit
    """Maximum rate of uploads. Downloads are limited at the stores."""
    slow_seconds: float = 0.0
    """Additional seconds for a download or an upload, because of a limit."""
    new_timestamp: int = 0
    """The new timestamp of all rows; 0 = they keep their own."""
    fenced: frozenset[str] = frozenset()
    """Names of files with GC fences, whose rows are uploaded without them."""
    record: RestoreRecord | None = None
    """Record of restored parts."""

    def __repr__(self) -> str:
        return f"IngestJob({self.api_version.label})"


_DAMAGED = re.compile(r"Corruption|downloaded size|sst magic number|Bad table magic")
_MISSING = re.compile(
    r"No such file or directory|\b(NoSuchKey|NoSuchBucket|BlobNotFound|ContainerNotFound|NotFound)\b|\bstatus: 404\b|\b404 Not Found\b"
)
_DENIED = re.compile(
    r"\b(AccessDenied|Forbidden|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationFailure|AuthorizationPermissionMismatch)\b|Permission denied"
)
_READ_FAILURE = re.compile(r"^Cannot read .*? into .*?: ", re.DOTALL)
"""The prefix that TiKV puts before the storage's own message: the file, and its path on the store's disk."""
STORE_FULL = "No space left on device"
_LOCAL_HINT = "A local:// path must be the same shared directory on every store's machine. Otherwise use a bucket, or pass --via upload."
_DENIED_HINT = "Give the stores permission to read the storage, or pass --via upload."


class Download:
    """Download of one part by stores."""

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._codec = job.codec
        self._files = part.files
        self._rewrite = part.rewrite
        self._request = _request(part.rewrite, job)
        self._slow_seconds = job.slow_seconds
        self.downloads = 0
        """Requests to stores, one per replica."""

    def transfer(self, region: Region, span: KeyRange) -> list[import_sstpb_pb2.SSTMeta]:
        """Have the stores of all replicas keep the rows in ``span``; returns what they have of each file, if anything.

        Raises `RegionErrorSeen` and `ClusterUnreachable` where another try may help, `BackupDamaged`, `StorageObjectMissing` and
        `StorageDenied` for what the stores say of the file, `StorageUnreachable` where the storage fails them in another way, which
        may pass.
        """
        metas = [self._meta(region, file, span) for file in self._files]
        pairs = list(itertools.product(zip(self._files, metas, strict=True), region.peers))
        self.downloads += len(pairs)
        download = inherit(self._download)
        with ThreadPoolExecutor(len(pairs)) as pool:
            found = list(pool.map(lambda each: download(each[1], *each[0]), pairs))
        kept = list(zip(metas, found[:: len(region.peers)], strict=True))
        for meta, outermost in kept:
            if outermost is not None:
                meta.range.CopyFrom(outermost)
        return [meta for meta, outermost in kept if outermost is not None]

    def _meta(self, region: Region, file: FileEntry, span: KeyRange) -> import_sstpb_pb2.SSTMeta:
        meta = sst_meta(region, self._codec, file)
        is_plain = self._request.request_type == import_sstpb_pb2.Keyspace
        wanted = span if is_plain else self._rewrite.storage_range(self._codec, span)
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=wanted.start, end=wanted.end))
        meta.length, meta.end_key_exclusive, meta.cipher_iv = file.size, True, file.cipher_iv
        return meta

    def _download(self, peer: Peer, file: FileEntry, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range | None:
        """Have one store fetch a file; the range that it found, or None when it holds no row of the part."""
        store = self._cluster.store(peer.store_id)
        request = import_sstpb_pb2.DownloadRequest(sst=meta, name=file.name)
        request.MergeFrom(self._request)
        answer = store.download(request, extra_seconds=self._slow_seconds)
        if answer.HasField("error"):
            raise self._classify_error(store, file.name, answer.error)
        return None if answer.is_empty else answer.range

    def _classify_error(self, store: StoreClient, name: str, error: import_sstpb_pb2.Error) -> Exception:
        """Classify a store's error by its message: there are no codes."""
        if error.HasField("store_error"):
            return RegionErrorSeen(error.store_error)
        message = f"{store} cannot use {name}: {error.message}"
        backend = self._request.storage_backend
        stripped = strip_names(error.message, backend, name)
        cause = _READ_FAILURE.sub("", stripped)
        if _DAMAGED.search(cause):
            return BackupDamaged(message)
        if _DENIED.search(cause):
            return StorageDenied(message, hint=_DENIED_HINT)
        if _MISSING.search(cause):
            return StorageObjectMissing(message, hint=_LOCAL_HINT if backend.HasField("local") else None)
        if "maybe it's not a replica of this store" in cause:
            return RegionErrorSeen(errorpb_pb2.Error(message=message, region_not_found=errorpb_pb2.RegionNotFound()))
        if STORE_FULL in cause:
            return disk_full(cause, store.store.id)
        if cause != stripped:
            return StorageUnreachable(message)
        return ClusterUnreachable(message)


def disk_full(message: str, *store_ids: int) -> RegionErrorSeen:
    """A store's message as the error that it has for a full disk in other answers: the same store is tried again."""
    return RegionErrorSeen(errorpb_pb2.Error(message=message, disk_full=errorpb_pb2.DiskFull(store_id=store_ids)))


def sst_meta(region: Region, codec: KeyCodec, file: FileEntry) -> import_sstpb_pb2.SSTMeta:
    """A new meta for the rows of a file in a region: a store may still be at work on an older one."""
    return import_sstpb_pb2.SSTMeta(
        uuid=uuid.uuid4().bytes,
        cf_name=file.cf,
        region_id=region.id,
        region_epoch=metapb_pb2.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
        total_kvs=file.total_kvs,
        total_bytes=file.total_bytes,
        api_version=codec.api_version.value,  # type: ignore[arg-type]
    )


def _request(rewrite: Rewrite, job: IngestJob) -> import_sstpb_pb2.DownloadRequest:
    """The fields that are the same for all stores and regions, with the rule by which a store rewrites keys and timestamps."""
    is_raw = job.codec.mode is KeyMode.RAW
    request = import_sstpb_pb2.DownloadRequest(
        storage_backend=brpb_pb2.StorageBackend.FromString(job.backend),
        is_raw_kv=is_raw,
        cipher_info=brpb_pb2.CipherInfo.FromString(job.cipher_info),
    )
    if not rewrite.changes and not job.new_timestamp:
        return request
    old, new = (rewrite.old, rewrite.new) if rewrite.changes else (b"", b"")
    if rewrite.changes and not is_raw:
        request.request_type = import_sstpb_pb2.Keyspace  # keys and ranges are plain, of the new prefix
    else:
        old, new = (encoded_prefix(job.api_version, each) for each in (old, new))
    rule = import_sstpb_pb2.RewriteRule(old_key_prefix=old, new_key_prefix=new, new_timestamp=job.new_timestamp)
    request.rewrite_rule.CopyFrom(rule)
    return request
