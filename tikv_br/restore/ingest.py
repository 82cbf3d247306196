"""One task of a restore: every replica's store gets a part of a file, by download or upload; the leader ingests it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from tikv_br import cancellation
from tikv_br.backupset.coverage import codec_of
from tikv_br.cancellation import Cancellation, TaskCancelled, inherit
from tikv_br.cluster.cluster import Cluster, ClusterPool
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
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.rewrite import Rewrite, encoded_prefix
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


@dataclass(frozen=True, slots=True)
class IngestJob:
    """Parameters that all tasks of a restore share.

    Picklable; `backend` and `cipher_info` may hold secrets and are never shown.
    """

    cluster: ClusterConfig
    api_version: ApiVersion
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
_STORE_FULL = "No space left on device"
_LOCAL_HINT = "A local:// path must be the same shared directory on every store's machine. Otherwise use a bucket, or pass --via upload."
_DENIED_HINT = "Give the stores permission to read the storage, or pass --via upload."


class Download:
    """Download of one part by stores."""

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._codec = KeyCodec(job.api_version)
        self._file = part.file
        self._rewrite = part.rewrite
        self._rewrite_rule = _rewrite_rule(part.rewrite, job)
        self._backend = brpb_pb2.StorageBackend.FromString(job.backend)
        self._slow_seconds = job.slow_seconds
        self.downloads = 0
        """Requests to stores, one per replica."""
        self._fetched: dict[tuple[bytes, int], import_sstpb_pb2.Range | None] = {}
        self._cipher_info = brpb_pb2.CipherInfo.FromString(job.cipher_info)

    def transfer(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have the stores of all replicas keep the rows in ``span``; False when the file has no row there.

        Completes ``meta`` with what the stores keep. Raises `RegionErrorSeen` and `ClusterUnreachable` where another try may
        help, `BackupDamaged`, `StorageObjectMissing` and `StorageDenied` for what the stores say of the file, `StorageUnreachable`
        where the storage fails them in another way, which may pass.
        """
        wanted = self._rewrite.storage_range(self._codec, span)
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=wanted.start, end=wanted.end))
        meta.length, meta.end_key_exclusive, meta.cipher_iv = self._file.size, True, self._file.cipher_iv
        self.downloads += sum((meta.uuid, peer.store_id) not in self._fetched for peer in region.peers)
        download = inherit(self._download)
        with ThreadPoolExecutor(len(region.peers)) as pool:
            found = list(pool.map(lambda peer: download(peer, meta), region.peers))
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
            rewrite_rule=self._rewrite_rule,
            storage_backend=self._backend,
            is_raw_kv=True,
            cipher_info=self._cipher_info,
        )
        answer = store.download(request, extra_seconds=self._slow_seconds)
        if answer.HasField("error"):
            raise self._classify_error(store, answer.error)
        return None if answer.is_empty else answer.range

    def _classify_error(self, store: StoreClient, error: import_sstpb_pb2.Error) -> Exception:
        """Classify a store's error by its message: there are no codes."""
        if error.HasField("store_error"):
            return RegionErrorSeen(error.store_error)
        message = f"{store} cannot use {self._file.name}: {error.message}"
        stripped = strip_names(error.message, self._backend, self._file.name)
        cause = _READ_FAILURE.sub("", stripped)
        if _DAMAGED.search(cause):
            return BackupDamaged(message)
        if _DENIED.search(cause):
            return StorageDenied(message, hint=_DENIED_HINT)
        if _MISSING.search(cause):
            return StorageObjectMissing(message, hint=_LOCAL_HINT if self._backend.HasField("local") else None)
        if "maybe it's not a replica of this store" in cause:
            return RegionErrorSeen(errorpb_pb2.Error(message=message, region_not_found=errorpb_pb2.RegionNotFound()))
        if _STORE_FULL in cause:
            return _disk_full(cause, store.store.id)
        if cause != stripped:
            return StorageUnreachable(message)
        return ClusterUnreachable(message)


def _disk_full(message: str, *store_ids: int) -> RegionErrorSeen:
    """A store's message as the error that it has for a full disk in other answers: the same store is tried again."""
    return RegionErrorSeen(errorpb_pb2.Error(message=message, disk_full=errorpb_pb2.DiskFull(store_id=store_ids)))


def _rewrite_rule(rewrite: Rewrite, job: IngestJob) -> import_sstpb_pb2.RewriteRule | None:
    """Return the rule by which a store rewrites keys and timestamps; None = not at all."""
    if not rewrite.changes and not job.new_timestamp:
        return None
    old, new = (rewrite.old, rewrite.new) if rewrite.changes else (b"", b"")
    return import_sstpb_pb2.RewriteRule(
        old_key_prefix=encoded_prefix(job.api_version, old),
        new_key_prefix=encoded_prefix(job.api_version, new),
        new_timestamp=job.new_timestamp,
    )


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


class Upload:
    """Sends one part to stores."""

    downloads = 0

    def __init__(self, cluster: Cluster, job: IngestJob, part: FilePart) -> None:
        self._cluster = cluster
        self._job = job
        self._part = part
        self._codec = codec_of(job.api_version, part.target)
        self._walk = _RowCursor(self._all_rows())

    def transfer(self, region: Region, meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Have all replicas' stores keep the rows in ``span``; False when the part has none there.

        Completes ``meta``, with a new uuid: stores refuse one of which they have a part. Raises `BackupDamaged` and
        `BackupUnsupported` naming the file, `StorageError`, `ClusterError`.
        """
        meta.uuid, meta.crc32 = uuid.uuid4().bytes, 0
        with tempfile.TemporaryFile(prefix="tikv-br-") as file:
            if not self._write(file, meta, span):
                return False
            with ThreadPoolExecutor(len(region.peers)) as pool:
                send = inherit(self._send)
                list(pool.map(lambda peer: send(peer.store_id, meta, file.fileno()), region.peers))
        return True

    def _send(self, store_id: int, meta: import_sstpb_pb2.SSTMeta, descriptor: int) -> None:
        chunks = self._chunks(store_id, descriptor, meta.length, cancellation.current() or Cancellation())
        store = self._cluster.store(store_id)
        try:
            store.upload(meta, chunks, verified=True, extra_seconds=self._job.slow_seconds)
        except RequestRefused as error:
            if _STORE_FULL not in error.message:
                raise
            raise _disk_full(_STORE_FULL, store_id) from None

    def _chunks(self, store_id: int, descriptor: int, size: int, work: Cancellation) -> Iterator[bytes]:
        """The bytes of a file, no faster than the limit; for a thread of gRPC's, until ``work`` is cancelled."""
        for offset in range(0, size, CHUNK_SIZE):
            yield (chunk := os.pread(descriptor, CHUNK_SIZE, offset))
            with work.active(), contextlib.suppress(TaskCancelled):
                self._job.upload_limit.spend(store_id, len(chunk))
            if work.is_cancelled:
                return

    def _write(self, file: IO[bytes], meta: import_sstpb_pb2.SSTMeta, span: KeyRange) -> bool:
        """Write the rows in ``span`` as a store holds them; False when there are none."""
        from tikv_br.formats.rows import to_storage
        from tikv_br.formats.sst.writer import SstWriter

        def sink(data: bytes) -> None:
            meta.crc32 = zlib.crc32(data, meta.crc32)
            file.write(data)

        writer = SstWriter(sink)
        empty = True
        for rows in self._rows(span):
            writer.append(to_storage(rows, self._codec))
            empty = False
        if empty:
            return False
        written = writer.finish()
        file.flush()
        start, end = (key[len(DATA_PREFIX) :] for key in written)
        meta.range.CopyFrom(import_sstpb_pb2.Range(start=start, end=end))
        meta.length = file.tell()
        return True

    def _rows(self, span: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows in ``span``: the file is read once for all regions, unless a region is retried."""
        wanted = self._codec.user_range(span)
        if not self._walk.is_before(wanted.start):
            self._walk = _RowCursor(self._all_rows())
        yield from self._walk.within(wanted)

    def _all_rows(self) -> Iterator[pa.RecordBatch]:
        """The newest row of each key of the part, under the name and with the timestamp that it gets."""
        rows, span = self._part.rows(self._job.store, self._job.api_version)
        return map(self._stamped, rows.pages(span))

    def _stamped(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if not self._job.new_timestamp:
            return rows
        stamps = pa.array(np.full(rows.num_rows, self._job.new_timestamp, np.uint64))
        return rows.set_column(rows.schema.get_field_index("ts"), rows.schema.field("ts"), stamps)


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
            raise _disk_full(_STORE_FULL, leader.store.id) if _STORE_FULL in answer.error.message else refusal

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
