"""One task of a restore: every replica's store gets a part of a file, by download or upload; the leader ingests it.

Downloads: each replica's store gets a part of a file from the storage.

Uploads: tikv-br reads a part of a file and sends it to each replica's store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from msgspec import Struct

from tikv_br import cancellation
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.cancellation import Cancellation, TaskCancelled, inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool, refuse_beyond
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
    RequestRefused,
    RetryBudgetExhausted,
    StorageDenied,
    StorageObjectMissing,
    StorageUnreachable,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import Rewrite, encoded_prefix
from tikv_br.formats.limits import RowLimits
from tikv_br.restore.options import Via
from tikv_br.restore.plan import IngestResult
from tikv_br.restore.record import RestoreRecord
from tikv_br.retry import STORAGE_UNREACHABLE, Backoffer
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.credentials import strip_names
from tikv_br.storage.outage import patience_policy
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa


class IngestJob(Struct, frozen=True):
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
    limits: RowLimits | None = None
    """Limits of rows that are read here; None = they are not checked."""

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


CHUNK_SIZE = 1 << 20


class _RowCursor:
    """Reads batches of ascending user keys once, range by range."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None
        self._end: bytes | None = b""

    def is_before(self, start: bytes) -> bool:
        """Return whether no row at or above ``start`` was skipped."""
        return self._end is not None and start >= self._end

    def within(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in a range of user keys; rows before it are skipped."""
        from tikv_br.formats.rows import within

        self._end = span.end or None
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                return
            self._rest = batch if span.end and batch["key"][-1].as_py() >= span.end else None
            rows = within(batch, span)
            if rows.num_rows:
                yield rows
            if self._rest is not None:
                return


class _TemporarySst:
    """An SST in a temporary file, as a context manager."""

    def __init__(self) -> None:
        from tikv_br.formats.sst.writer import SstWriter

        self.file = tempfile.TemporaryFile(prefix="tikv-br-")  # noqa: SIM115 - closed by `__exit__`
        self._writer = SstWriter(self._write)
        self._crc32 = 0
        self._is_empty = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.file.close()

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of ``STORAGE_SCHEMA``."""
        self._writer.append(rows)
        self._is_empty = self._is_empty and not rows.num_rows

    def finish(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        """Complete the file and its meta; False when there are no rows."""
        if self._is_empty:
            return False
        start, end = (key[len(DATA_PREFIX) :] for key in self._writer.finish())
        self.file.flush()
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=start, end=end))
        meta.length, meta.crc32 = self.file.tell(), self._crc32
        return True

    def _write(self, data: bytes) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        self.file.write(data)


class Upload:
    """Sends one part to stores."""

    downloads = 0

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = codec_of(job.codec.api_version, part.target, job.codec.mode)
        self._walk = _RowCursor(self._all_rows())

    def transfer(self, region: Region, span: KeyRange) -> list[import_sstpb_pb2.SSTMeta]:
        """Have all replicas' stores keep the rows in ``span``; returns what they have of each column family, if anything.

        Raises `BackupDamaged` and `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
        """
        metas = []
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(region.peers)) as pool:
            ssts = [stack.enter_context(_TemporarySst()) for _ in self._part.files]
            for rows in self._rows(span):
                for sst, stored in zip(ssts, self._stored(rows), strict=True):
                    sst.append(stored)
            store_ids = [peer.store_id for peer in region.peers]
            for file, sst in zip(self._part.files, ssts, strict=True):
                meta = sst_meta(region, self._job.codec, file)
                if sst.finish(meta):
                    send = partial(self._send, meta=meta, descriptor=sst.file.fileno())
                    list(pool.map(inherit(send), store_ids))
                    metas.append(meta)
        return metas

    def _stored(self, rows: pa.RecordBatch) -> Sequence[pa.RecordBatch]:
        """Rows as a store holds them, for each file of the part."""
        if self._codec.mode is KeyMode.RAW:
            from tikv_br.formats.rows import to_storage

            return [to_storage(rows, self._codec)]
        from tikv_br.formats.mvcc import split

        return split(rows, self._codec.prefix)[-len(self._part.files) :]  # without values there is no file for them

    def _send(self, store_id: int, *, meta: import_sstpb_pb2.SSTMeta, descriptor: int) -> None:
        chunks = self._chunks(store_id, descriptor, meta.length, cancellation.current() or Cancellation())
        store = self._cluster.store(store_id)
        try:
            store.upload(meta, chunks, verified=True, extra_seconds=self._job.slow_seconds)
        except RequestRefused as error:
            if STORE_FULL not in error.message:
                raise
            raise disk_full(STORE_FULL, store_id) from None

    def _chunks(self, store_id: int, descriptor: int, size: int, work: Cancellation) -> Iterator[bytes]:
        """The bytes of a file, no faster than the limit; for a thread of gRPC's, until ``work`` is cancelled."""
        for offset in range(0, size, CHUNK_SIZE):
            yield (chunk := os.pread(descriptor, CHUNK_SIZE, offset))
            with work.active(), contextlib.suppress(TaskCancelled):
                self._job.upload_limit.spend(store_id, len(chunk))
            if work.is_cancelled:
                return

    def _rows(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in ``span``: the file is read once for all regions, unless a region is retried."""
        wanted = self._codec.user_range(span)
        if not self._walk.is_before(wanted.start):
            self._walk = _RowCursor(self._all_rows())
        yield from self._walk.within(wanted)

    def _all_rows(self) -> Iterator[pa.RecordBatch]:
        """The newest row of each key of the part, under the name and with the timestamp that it gets."""
        rows, span = self._part.rows(self._job.store, self._job.api_version, self._job.codec)
        return map(self._prepare, rows.pages(span))

    def _prepare(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if self._job.limits is not None:
            refuse_beyond(self._job.limits, rows, self._codec)
        if not self._job.new_timestamp:
            return rows
        stamps = pa.array(np.full(rows.num_rows, self._job.new_timestamp, np.uint64))
        return rows.set_column(rows.schema.get_field_index("ts"), rows.schema.field("ts"), stamps)


MANY_REGIONS = 8
"""Number of regions from which on a file is uploaded in pieces; checked again when regions split.

A store downloads the whole file for each region that gets a piece of it. For fewer regions that is faster, because stores download
in parallel. Under a rate limit, or after a download was in vain because its region has split, the number is 2.
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


class _StagedSsts(Struct):
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
            start = region.end_within(self._codec, KeyRange(start, self._span.end))
            if start == self._span.end:
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
        span = KeyRange(rest.start, region.end_within(self._codec, rest))
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
        if self._job.upload_limit or self._fetches > self._regions_done:  # a fetch was in vain, as its region has split
            most = min(most, 1)
        start = rest.start
        for _region in range(most):
            region = self._cluster.regions.locate(self._codec.bound(start))
            start = region.end_within(self._codec, KeyRange(start, rest.end))
            if start == rest.end:
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
