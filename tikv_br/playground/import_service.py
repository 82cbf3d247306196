"""``ImportSST`` of one store: Download, Upload, Ingest, import mode and the download speed limit.

Download and Ingest of SSTs: fetch, check, cut and rewrite a file, then ingest it with the checks of a real store.

Rewrite rules of downloads: other prefixes and timestamps for the keys of an SST, of which only a range is kept.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from msgspec.structs import replace
from rocksdict import SstFileWriter

from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pb import import_sstpb_pb2 as pb
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, MAX_TS, TS_SIZE, successor
from tikv_br.playground import external_storage, region_errors, sst_file
from tikv_br.playground.backup_service import sst_options
from tikv_br.playground.encoding import Row, from_memcomparable, memcomparable
from tikv_br.playground.engine import DEFAULT, WRITE
from tikv_br.playground.external_storage import CipherFault, StorageFault, open_for
from tikv_br.playground.node import (
    DOWNLOAD_UNKNOWN_CF,
    DOWNLOAD_WITHOUT_Z,
    INGEST_DEADLY_SST,
    INGEST_WITHOUT_PEER_FILE,
    StoreNode,
    crash_store,
)
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import check_region
from tikv_br.playground.servers import unary
from tikv_br.playground.sst_file import COLUMN_FAMILIES, BadMeta, SstInspection, SstStore, UnreadableSst
from tikv_br.playground.txn.mvcc import decode_record


class RewriteFault(Exception):
    """A key or bound cannot be rewritten; the message is the store's."""


class WrongPrefix(RewriteFault):
    """A key or bound lacks the rule's prefix."""

    def __init__(self, what: str, key: bytes, prefix: bytes) -> None:
        super().__init__(f"{what} has wrong prefix: key {key.hex().upper()} does not start with {prefix.hex().upper()}")


@dataclass(frozen=True, slots=True)
class RangeRewrite:
    """A rule with the range it is used on. Bounds are the file's own keys; ``end`` None is unbounded."""

    is_plain: bool
    """The prefixes are compared with plain keys (request type ``Keyspace``), not with the file's encoded keys."""
    old_prefix: bytes
    new_prefix: bytes
    new_timestamp: int
    start: bytes
    end: bytes | None
    end_exclusive: bool

    @classmethod
    def of(
        cls, rule: import_sstpb_pb2.RewriteRule, meta: import_sstpb_pb2.SSTMeta, *, is_plain: bool = False
    ) -> RangeRewrite:
        """The rule of a request. Raises `WrongPrefix` when the range is not of the target's prefix."""
        old, new = rule.old_key_prefix, rule.new_key_prefix
        start = _start_of(meta.range.start, old, new)
        end = _end_of(meta.range.end, old, new, exclusive=meta.end_key_exclusive)
        if is_plain:
            start, end = memcomparable(start), end and memcomparable(end)
        return cls(
            is_plain=is_plain,
            old_prefix=old,
            new_prefix=new,
            new_timestamp=rule.new_timestamp,
            start=start,
            end=end,
            end_exclusive=meta.end_key_exclusive or not meta.range.end,
        )

    @property
    def changes_keys(self) -> bool:
        """Return whether the rewrite changes any key of a file."""
        return self.old_prefix != self.new_prefix or self.new_timestamp != 0

    def keeps(self, key: bytes) -> bool:
        """Return whether a key of the file is in the range."""
        return self.start <= key and not self.is_past(key)

    def is_past(self, key: bytes) -> bool:
        """Return whether a key of the file, and so every later one, is after the range."""
        if self.end is None:
            return False
        return key >= self.end if self.end_exclusive else key > self.end

    def apply(self, key: bytes) -> bytes:
        """The rewritten key. Raises `RewriteFault`."""
        if self.is_plain:
            user_key, ts = from_memcomparable(key[:-TS_SIZE]), key[-TS_SIZE:]
            if user_key is None:
                raise RewriteFault(f"Codec error: bad padding in key {key.hex().upper()}")
            key = memcomparable(self._exchange_prefix(user_key)) + ts
        else:
            key = self._exchange_prefix(key)
        if self.new_timestamp:
            key = key[:-TS_SIZE] + (MAX_TS - self.new_timestamp).to_bytes(TS_SIZE, "big")
        return key

    def _exchange_prefix(self, key: bytes) -> bytes:
        if not key.startswith(self.old_prefix):
            raise WrongPrefix("Key in SST", key, self.old_prefix)
        return self.new_prefix + key[len(self.old_prefix) :]


def _start_of(start: bytes, old: bytes, new: bytes) -> bytes:
    if not start:
        return old if not new else b""
    if not start.startswith(new):
        raise WrongPrefix("SST start range", start, new)
    return old + start[len(new) :]


def _end_of(end: bytes, old: bytes, new: bytes, *, exclusive: bool) -> bytes | None:
    if not end:
        return (successor(old) or None) if not new else None
    if end.startswith(new):
        return old + end[len(new) :]
    # Apart from keys of the prefix, a store takes the prefix's exact successor, and only that: not its memcomparable form.
    if exclusive and end == successor(new):
        return successor(old) or None
    raise WrongPrefix("SST end range", end, new)


class DownloadFault(Exception):
    """The download failed; the message goes into the response."""


class StorePanics(Exception):
    """This request would crash a real store."""


def download(node: StoreNode, request: import_sstpb_pb2.DownloadRequest) -> import_sstpb_pb2.Range | None:
    """Download, check and rewrite a file; returns the outermost keys kept (without ``z``), None if there are none.

    A file that the store has already is not fetched again. Raises `BadMeta`, `DownloadFault` and `StorePanics`.
    """
    meta = request.sst
    saved, temp = node.files.path(meta), node.files.temp_path(meta)
    try:
        if saved.exists():
            return _range(node.files.facts(saved), meta)
        is_plain = request.request_type == import_sstpb_pb2.Keyspace and node.release.rewrites_plain_keys
        rewrite = RangeRewrite.of(request.rewrite_rule, meta, is_plain=is_plain)
        temp.write_bytes(_fetch(node, request, temp))
        return _keep(node.files, temp, saved, rewrite, meta)
    except StorageFault as fault:
        raise DownloadFault(fault.display) from fault
    except UnreadableSst as error:
        state = f'Status {{ code: IoError, sub_code: None, sev: NoError, state: "{error}" }}'
        raise DownloadFault(f"Engine Engine({state})") from error
    except RewriteFault as error:
        raise DownloadFault(str(error)) from error
    finally:
        temp.unlink(missing_ok=True)


def _fetch(node: StoreNode, request: import_sstpb_pb2.DownloadRequest, temp: Path) -> bytes:
    """The plain bytes of the file, which must have the length in its meta."""
    storage = open_for(node, request.storage_backend)
    source = f"Cannot read {storage.url}/{request.name} into {temp}"
    try:
        data = storage.read(request.name)
    except StorageFault as fault:
        raise DownloadFault(f"{source}: {fault.display}") from fault
    node.downloads[request.name] += 1
    node.pace.work(request.sst.total_bytes)
    node.download_limit.work(len(data))
    if request.sst.length and len(data) != request.sst.length:
        raise DownloadFault(f"{source}: downloaded size {len(data)}, expected {request.sst.length}")
    try:
        return external_storage.crypt(request.cipher_info, request.sst.cipher_iv, data)
    except CipherFault as fault:
        raise DownloadFault(str(fault)) from fault


def _keep(
    files: SstStore, temp: Path, saved: Path, rewrite: RangeRewrite, meta: import_sstpb_pb2.SSTMeta
) -> import_sstpb_pb2.Range | None:
    """Save the file: unchanged if all of it is kept, else rewritten."""
    facts = files.facts(temp)
    if not facts.entries:  # the ingest will fail; the download does not
        temp.rename(saved)
        return _range(facts, meta)
    if not facts.first.startswith(DATA_PREFIX):
        raise StorePanics(f"invalid data key {facts.first.hex()}")
    first, last = facts.first[1:], facts.last[1:]
    if not rewrite.changes_keys and rewrite.keeps(first) and rewrite.keeps(last):
        temp.rename(saved)
        return _range(facts, meta)
    with sst_file.open_sst(temp) as db:
        rows = _rewritten(sst_file.rows_of(db), rewrite)
        if meta.cf_name == WRITE and rewrite.new_timestamp:
            rows = ((key, _restamped(record, rewrite.new_timestamp)) for key, record in rows)
        if not _write(rows, saved):
            return None
    return _range(files.facts(saved), meta)


def _rewritten(rows: Iterator[Row], rewrite: RangeRewrite) -> Iterator[Row]:
    for key, value in rows:
        if rewrite.is_past(key[1:]):
            return
        if rewrite.keeps(key[1:]):
            yield DATA_PREFIX + rewrite.apply(key[1:]), value


def _restamped(stored: bytes, ts: int) -> bytes:
    """A commit record whose transaction has started at ``ts``, as its value's key says after the rewrite."""
    return replace(decode_record(stored), start_ts=ts).encode()


def _write(rows: Iterator[Row], path: Path) -> bool:
    """Write an SST; False, and no file, when there are no rows."""
    row = next(rows, None)
    if row is None:
        return False
    writer = SstFileWriter(sst_options())
    partial = path.with_suffix(".part")
    with sst_file.rocksdb_errors(partial, path):
        writer.open(str(partial))
        while row is not None:
            writer[row[0]] = row[1]
            row = next(rows, None)
        writer.finish()
    partial.rename(path)
    return True


def _range(facts: SstInspection, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range:
    if not facts.entries:  # RocksDB does not open it here, though TiKV would have read it
        return import_sstpb_pb2.Range(start=meta.range.start, end=meta.range.start)
    return import_sstpb_pb2.Range(start=facts.first[1:], end=facts.last[1:])


_TXN_RANGES = ((b"m", b"n"), (b"t", b"u"))
"""The data of TiDB: the same in every API version."""


class IngestFault(Exception):
    """The store refuses the ingest with this error."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def is_incompatible(meta: import_sstpb_pb2.SSTMeta, mine: ApiVersion) -> bool:
    """Return whether a store of the version ``mine`` refuses a file for the API version in its meta."""
    if meta.api_version == mine.value or (mine is ApiVersion.V1TTL and meta.api_version == ApiVersion.V1.value):
        return False
    start, end = meta.range.start, meta.range.end
    return not any(low <= start and end < high for low, high in _TXN_RANGES)


class Ingestor:
    """Ingests on behalf of one store. ``nodes`` are all stores by id."""

    def __init__(self, node: StoreNode, nodes: Mapping[int, StoreNode]) -> None:
        self._node = node
        self._nodes = nodes

    def ingest(self, rpc: str, sent: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> None:
        """Ingest all files or none, on the leader for all replicas, and remove them.

        Raises `IngestFault`, and `StorePanics` or `UnreadableSst` if a real store would crash.
        """
        region = self._check(sent, metas)
        for meta in metas:
            _check_meta(meta, region)
        paths = [self._node.files.path(meta) for meta in metas]
        for path in paths:
            facts = self._node.files.facts(path)
            if facts.deadly:
                raise StorePanics(f"{path.name}: {facts.deadly}")
        for meta in metas:
            self._check_followers(rpc, region, meta)
        size = sum(path.stat().st_size for path in paths)
        with sst_file.rocksdb_errors(paths[0], paths[0]):
            for family in (DEFAULT, WRITE):  # a commit record is never without its value
                chosen = [path for path, meta in zip(paths, metas, strict=True) if (meta.cf_name or DEFAULT) == family]
                if chosen:
                    self._node.engine.ingest(chosen, family)
        self._node.sizes.written(region.id, size)
        for peer in region.peers:
            for meta in metas:
                self._nodes[peer.store_id].files.path(meta).unlink(missing_ok=True)

    def _check(self, sent: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> Region:
        """The checks before the command is sent to the region's peers: first the region, then the files."""
        error = check_region(self._node.regions, sent, self._node.store_id, read=True)
        region = self._node.regions.get(sent.region_id)
        if error is None and region is None:  # merged between the two calls
            error = region_errors.region_not_found(sent.region_id, read=True)
        if error is not None or region is None:
            raise IngestFault(error or errorpb_pb2.Error())
        for meta in metas:
            if not self._has_file(meta):
                raise IngestFault(
                    errorpb_pb2.Error(
                        message="The file which would be ingested doest not exist.",
                        stale_command=errorpb_pb2.StaleCommand(),
                    )
                )
        if not metas:
            message = f"[region {region.id}] ingest failed: Error(Kv(Error(EmptyRequest)))"
            raise IngestFault(errorpb_pb2.Error(message=message))
        return region

    def _has_file(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        try:
            return self._node.files.path(meta).exists()
        except BadMeta:
            return False

    def _check_followers(self, rpc: str, region: Region, meta: import_sstpb_pb2.SSTMeta) -> None:
        """The leader's answer does not show it, but a follower without the file crashes when it applies the ingest."""
        for peer in region.peers:
            if not self._nodes[peer.store_id].files.path(meta).exists():
                what = f"{INGEST_WITHOUT_PEER_FILE}: region {region.id}, uuid {meta.uuid.hex()}"
                self._node.fatal_requests.record(store_id=peer.store_id, rpc=rpc, what=what)


def _check_meta(meta: import_sstpb_pb2.SSTMeta, region: Region) -> None:
    """Check, as peers do when they apply the command, that the file is for this region and epoch, with conf_ver."""
    epoch = meta.region_epoch
    if (meta.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
        message = f"[region {region.id}] ingest failed: invalid cf name {meta.cf_name}"
        raise IngestFault(errorpb_pb2.Error(message=message))
    if meta.region_id != region.id:
        raise IngestFault(region_errors.region_not_found(meta.region_id, read=False))
    if (epoch.conf_ver, epoch.version) != (region.conf_ver, region.version):
        raise IngestFault(region_errors.epoch_not_match(region, epoch, [region]))
    for key in (meta.range.start, meta.range.end):
        if not region.contains(key):
            raise IngestFault(region_errors.key_not_in_region(region, key))


_INVALID_CHUNK: Final = "InvalidChunk"


class ImportService:
    """Serves one store. ``nodes`` are all stores of the cluster by id."""

    def __init__(self, node: StoreNode, nodes: Mapping[int, StoreNode]) -> None:
        self._node = node
        self._ingestor = Ingestor(node, nodes)
        self._ingesting: set[bytes] = set()
        self._lock = threading.Lock()

    def add_to(self, server: grpc.Server) -> None:
        handlers = {
            "SwitchMode": unary(pb.SwitchModeRequest, self._switch_mode),
            "GetMode": unary(pb.GetModeRequest, self._get_mode),
            "SetDownloadSpeedLimit": unary(pb.SetDownloadSpeedLimitRequest, self._set_download_limit),
            "Download": unary(pb.DownloadRequest, self._download),
            "Upload": grpc.stream_unary_rpc_method_handler(
                self._upload, pb.UploadRequest.FromString, pb.UploadResponse.SerializeToString
            ),
            "Ingest": unary(
                pb.IngestRequest, lambda request, call: self._ingest("Ingest", request.context, [request.sst], call)
            ),
            "MultiIngest": unary(
                pb.MultiIngestRequest,
                lambda request, call: self._ingest("MultiIngest", request.context, list(request.ssts), call),
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("import_sstpb.ImportSST", handlers)])

    def _switch_mode(self, request: pb.SwitchModeRequest, _context: grpc.ServicerContext) -> pb.SwitchModeResponse:
        self._node.import_mode.switch(importing=request.mode == pb.Import)
        return pb.SwitchModeResponse()

    def _get_mode(self, _request: pb.GetModeRequest, context: grpc.ServicerContext) -> pb.GetModeResponse:
        """UNIMPLEMENTED on the recorded servers."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def _set_download_limit(
        self, request: pb.SetDownloadSpeedLimitRequest, _context: grpc.ServicerContext
    ) -> pb.SetDownloadSpeedLimitResponse:
        """Set the limit without an end: TiKV 9.0 ignores the fields for a task's name and a TTL."""
        self._node.download_limit.limit(request.speed_limit)
        return pb.SetDownloadSpeedLimitResponse()

    def _download(self, request: pb.DownloadRequest, context: grpc.ServicerContext) -> pb.DownloadResponse:
        """Fetch, check, cut and rewrite one file. Neither the region nor the API version is checked."""
        if (request.sst.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_UNKNOWN_CF}: {request.sst.cf_name}")
        try:
            kept = download(self._node, request)
        except (BadMeta, DownloadFault) as fault:
            return pb.DownloadResponse(error=pb.Error(message=str(fault)))
        except StorePanics as panic:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_WITHOUT_Z}: {request.name}: {panic}")
        if kept is None:
            return pb.DownloadResponse(is_empty=True)
        return pb.DownloadResponse(range=kept)

    def _upload(self, requests: Iterator[pb.UploadRequest], context: grpc.ServicerContext) -> pb.UploadResponse:
        """Save the bytes that follow the meta. Only their crc32 is checked; the ingest checks what they are."""
        first = next(requests, None)
        if first is None or first.WhichOneof("chunk") != "meta":
            context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
        data = bytearray()
        for chunk in requests:
            if not chunk.data:
                context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
            data += chunk.data
        try:
            saved, temp = self._node.files.path(first.meta), self._node.files.temp_path(first.meta)
        except BadMeta as fault:
            context.abort(grpc.StatusCode.UNKNOWN, f'Uuid("{fault}")')
        if saved.exists():
            context.abort(grpc.StatusCode.UNKNOWN, f'FileExists("{saved}", "upload")')
        crc = zlib.crc32(data)
        if crc != first.meta.crc32:
            reason = f"crc32 is {crc}, expected {first.meta.crc32}"
            context.abort(grpc.StatusCode.UNKNOWN, f'FileCorrupted("{temp}", "{reason}")')
        temp.write_bytes(data)
        temp.rename(saved)
        return pb.UploadResponse()

    def _ingest(
        self,
        rpc: str,
        sent: kvrpcpb_pb2.Context,
        metas: Sequence[pb.SSTMeta],
        context: grpc.ServicerContext,
    ) -> pb.IngestResponse:
        if any(is_incompatible(meta, self._node.api_version) for meta in metas):
            context.abort(grpc.StatusCode.UNKNOWN, "IncompatibleApiVersion")
        uuids = {meta.uuid for meta in metas}
        with self._lock:
            if len(uuids) < len(metas) or self._ingesting & uuids:
                return pb.IngestResponse(error=errorpb_pb2.Error(message="ingest file conflict"))
            self._ingesting |= uuids
        try:
            self._ingestor.ingest(rpc, sent, metas)
        except IngestFault as fault:
            return pb.IngestResponse(error=fault.error)
        except (StorePanics, UnreadableSst) as death:
            crash_store(self._node, context, rpc, f"{INGEST_DEADLY_SST}: {death}")
        finally:
            with self._lock:
                self._ingesting -= uuids
        return pb.IngestResponse()
