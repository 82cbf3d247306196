"""``backup.Backup`` of one store: it writes SSTs of the regions it leads to external storage, one file a region."""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import fastcrc
import grpc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, errorpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import RAW_MODE, RAW_MODE_END, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.playground import external_storage
from tikv_br.playground.encoding import LiveRow, data_range, encoding_of, v2_ts
from tikv_br.playground.external_storage import CipherFault, ExternalStorage, StorageFault, open_for
from tikv_br.playground.failpoints import BACKUP_REGION
from tikv_br.playground.node import BACKUP_EMPTY_RANGE, BACKUP_NOT_RAW, StoreNode, crash_store
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import VERSION_NAMES
from tikv_br.playground.sst_file import with_properties
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.versions import ServerVersion

CONVERTED_TS: Final = 1
"""The timestamp of every row that a backup converts from V1 or V1TTL to V2."""
_FORMAT_VERSION: Final = 2
_BLOCK_SIZE: Final = 16 << 10
_WINDOW_BITS: Final = -14
_DEFAULT_LEVEL: Final = 32767
_RPC: Final = "Backup"
_MAX_U64: Final = (1 << 64) - 1
_DEFAULT_CF: Final = "default"
_COLUMN_FAMILIES: Final = frozenset({"", _DEFAULT_CF, "lock", "write", "raft"})


@dataclass(frozen=True, slots=True)
class SstSums:
    """Contents of an SST, counted over the keys and values that a client of the target sees."""

    crc64xor: int
    total_kvs: int
    total_bytes: int


def write_sst(rows: Iterable[LiveRow], path: Path, options: Options, *, counted: bool = True) -> SstSums | None:
    """Write the stored rows to an SST; None, and no file, when there are none. Not ``counted``: as before 6.1."""
    writer: SstFileWriter | None = None
    crc64xor = total_kvs = total_bytes = 0
    crc64 = fastcrc.crc64.xz
    for key, value, _, row in rows:
        if writer is None:
            writer = SstFileWriter(options)
            writer.open(str(path))
        writer[row[0]] = row[1]
        pair = key + (value if counted else row[1])
        crc64xor ^= crc64(pair) if counted else 0
        total_kvs += 1
        total_bytes += len(pair)
    if writer is None:
        return None
    writer.finish()
    return SstSums(crc64xor, total_kvs, total_bytes)


def sst_options(compression: brpb_pb2.CompressionType.ValueType = brpb_pb2.UNKNOWN, level: int = 0) -> Options:
    """Options of TiKV's SSTs for backups; ``compression`` is a ``brpb.CompressionType``, level 0 the default."""
    types = {
        brpb_pb2.UNKNOWN: DBCompressionType.lz4,  # the fastest that is built in
        brpb_pb2.LZ4: DBCompressionType.lz4,
        brpb_pb2.SNAPPY: DBCompressionType.snappy,
        brpb_pb2.ZSTD: DBCompressionType.zstd,
    }
    table = BlockBasedOptions()
    table.set_format_version(_FORMAT_VERSION)
    table.set_checksum_type(ChecksumType.crc32c())
    table.set_block_size(_BLOCK_SIZE)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(types[compression]())
    options.set_compression_options(_WINDOW_BITS, level or _DEFAULT_LEVEL, 0, 0)
    return options


@dataclass(frozen=True, slots=True)
class _RegionSpan:
    """A region and the part of it to back up, in RPC keys of the source."""

    region: Region
    start: bytes
    end: bytes


def _flush_failed(fault: TimestampFault) -> str:
    cause = f"[components/backup/src/endpoint.rs:1155]: fail to flush causal ts, {fault}"
    return f"Other({json.dumps(cause)})"


class BackupService(brpb_pb2_grpc.BackupServicer):
    """Serves one store."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._codec = _bounds_codec(node)

    def add_to(self, server: grpc.Server) -> None:
        brpb_pb2_grpc.add_BackupServicer_to_server(self, server)

    def backup(
        self, request: brpb_pb2.BackupRequest, context: grpc.ServicerContext
    ) -> Iterator[brpb_pb2.BackupResponse]:
        """Yield one response per region. A failure is a response too, and does not end the others."""
        if request.cf not in _COLUMN_FAMILIES:
            context.abort(grpc.StatusCode.UNKNOWN, f'InvalidCf {{ cf: "{request.cf}" }}')
        if not self._node.release.counts_backups:
            request.dst_api_version = kvrpcpb_pb2.APIVersion.Value(self._node.api_version.name)  # the field is unknown
        if request.is_raw_kv and (refusal := self._check_version(request)):
            yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=refusal))
            return
        ranges = [(each.start_key, each.end_key) for each in request.sub_ranges]
        ranges = ranges or [(request.start_key, request.end_key)]
        self._check_fatal(request, ranges, context)
        if request.is_raw_kv and self._node.api_version is ApiVersion.V2 and self._node.release.flushes:
            try:
                self._node.causal.flush()  # even if what follows fails
            except TimestampFault as fault:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=_flush_failed(fault)))
                return
        try:
            storage = open_for(self._node, request.storage_backend)
        except StorageFault as fault:
            yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=fault.debug))
            return
        task = _Task(self._node, request, storage)
        for span in [span for start, end in ranges for span in self._led_spans(start, end)]:
            if not context.is_active():
                return
            error = self._region_error(span.region, context)
            if error is not None:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(region_error=error))
            else:
                yield task.run(span)

    def _check_version(self, request: brpb_pb2.BackupRequest) -> str | None:
        """Return why the store cannot write that API version, or (V2) has no raw data in such a range."""
        source, target = self._node.api_version, request.dst_api_version
        start, end = request.start_key, request.end_key
        in_raw_mode = start.startswith(RAW_MODE) and (end.startswith(RAW_MODE) or end == RAW_MODE_END)
        if target in {source.value, ApiVersion.V2.value} and (in_raw_mode or source is not ApiVersion.V2):
            return None
        refusal = f"invalid backup version, cur: {VERSION_NAMES[source]}, dst: {VERSION_NAMES[target]}"
        return f'Other("[components/backup/src/endpoint.rs:1136]: {refusal}")'

    def _check_fatal(
        self, request: brpb_pb2.BackupRequest, ranges: list[tuple[bytes, bytes]], context: grpc.ServicerContext
    ) -> None:
        for start, end in ranges:
            if start == end and start:
                crash_store(self._node, context, _RPC, f"{BACKUP_EMPTY_RANGE}: {start.hex()}")
            if not request.is_raw_kv and self._node.api_version is not ApiVersion.V2:
                rows = self._node.engine.iterate(*data_range(start, end))
                if next(rows, None) is not None:
                    crash_store(self._node, context, _RPC, BACKUP_NOT_RAW)

    def _led_spans(self, start: bytes, end: bytes) -> Iterator[_RegionSpan]:
        """The parts of [start, end) that this store leads now; none of a reversed range."""
        if end and start > end:
            return
        for region in self._node.regions.overlapping(self._codec.bound(start), self._codec.bound(end)):
            if region.leader_store == self._node.store_id:
                region_start, region_end = map(self._codec.from_bound, (region.start, region.end))
                yield _RegionSpan(region, max(start, region_start), min(filter(None, (end, region_end)), default=b""))

    def _region_error(self, region: Region, context: grpc.ServicerContext) -> errorpb_pb2.Error | None:
        """Return the region error if a region has changed since the range was divided, or a failpoint's error."""
        node = self._node
        error = node.failpoints.intercept(BACKUP_REGION, store_id=node.store_id, region_id=region.id, context=context)
        if error is not None:
            return error
        sent = kvrpcpb_pb2.Context(
            region_id=region.id, region_epoch=region.to_pb().region_epoch, peer=region.leader.to_pb()
        )
        return node.regions.check(sent, node.store_id, read=True)


class _Task:
    """One request, region by region."""

    def __init__(self, node: StoreNode, request: brpb_pb2.BackupRequest, storage: ExternalStorage) -> None:
        self._node = node
        self._request = request
        self._storage = storage
        self._codec = _bounds_codec(node)
        self._cf = request.cf or _DEFAULT_CF

    def run(self, span: _RegionSpan) -> brpb_pb2.BackupResponse:
        """Back up one span. If the storage fails, the response names the range."""
        response = brpb_pb2.BackupResponse(
            start_key=span.start, end_key=span.end, api_version=self._request.dst_api_version
        )
        if self._request.is_raw_kv and self._cf == _DEFAULT_CF:
            try:
                response.files.extend(self._files(span))
            except StorageFault as fault:
                response.error.msg = fault.debug
            except CipherFault as fault:
                response.error.msg = f'Other("{fault}")'
        return response

    def _files(self, span: _RegionSpan) -> Iterator[brpb_pb2.File]:
        """The file of a span, none if it contains no live row."""
        source, target = self._node.api_version, ApiVersion(self._request.dst_api_version)
        stored = self._node.engine.iterate(*data_range(self._codec.bound(span.start), self._codec.bound(span.end)))
        counted = self._node.release.counts_backups
        rows = encoding_of(source, self._node.release).live_rows(stored, self._node.now() if counted else 0)
        covered = KeyRange(span.start, span.end)
        if source is not target:
            rows = _to_v2(rows)
            covered = KeyCodec(target).rpc_range(covered)
        options = sst_options(self._request.compression_type, self._request.compression_level)
        with tempfile.TemporaryDirectory(dir=self._node.data_dir, prefix="backup-") as folder:
            path = Path(folder) / "region.sst"
            properties = RowProperties(source, self._node.release)
            summary = write_sst(properties.watch(rows), path, options, counted=counted)
            if summary is not None:
                data = with_properties(path.read_bytes(), properties.found())
                yield self._save(span, data, summary, covered)

    def _save(self, span: _RegionSpan, plain: bytes, summary: SstSums, covered: KeyRange) -> brpb_pb2.File:
        iv = secrets.token_bytes(external_storage.IV_SIZE)  # reported for plain files, too
        data = external_storage.crypt(self._request.cipher_info, iv, plain)
        name = self._name(span)
        self._storage.write(name, data)
        self._node.pace.work(summary.total_bytes)
        if self._request.rate_limit:
            time.sleep(len(data) / self._request.rate_limit)
        return brpb_pb2.File(
            name=name,
            sha256=hashlib.sha256(data).digest(),
            start_key=covered.start,
            end_key=covered.end,
            crc64xor=summary.crc64xor,
            total_kvs=summary.total_kvs,
            total_bytes=summary.total_bytes,
            cf=self._cf,
            size=len(data),
            cipher_iv=iv,
        )

    def _name(self, span: _RegionSpan) -> str:
        """Unique by start key and time; without a start key it has neither, and a retry overwrites the file."""
        separator = "/" if self._storage.nested else "_"
        name = f"{self._node.store_id}{separator}{span.region.id}_{span.region.version}"
        if span.start:
            name += f"_{hashlib.sha256(span.start).hexdigest()}_{time.time_ns() // 1_000_000}"
        return f"{name}_{self._cf}.sst"


def _bounds_codec(node: StoreNode) -> KeyCodec:
    return KeyCodec(node.api_version if node.release.encodes_v2 else ApiVersion.V1)


class RowProperties:
    """TiKV's own properties of a file of raw rows, as far as tools read them; those of the store's API version also if it converts."""

    def __init__(self, api_version: ApiVersion, release: ServerVersion) -> None:
        is_ttl = api_version is ApiVersion.V1TTL
        self._is_v2 = api_version is ApiVersion.V2
        self._with_rows = release.collects_rows and (self._is_v2 or (is_ttl and not release.collects_expiry))
        self._with_expiry = release.collects_expiry if self._is_v2 else is_ttl
        self._rows = self._last_expiry = self._max_ts = 0
        self._first_expiry = self._min_ts = _MAX_U64

    def watch(self, rows: Iterable[LiveRow]) -> Iterator[LiveRow]:
        """Pass on the rows of the file."""
        for each in rows:
            self._rows += 1
            key, stored = each[3]
            if self._with_rows:
                ts = v2_ts(key)  # in V1TTL the end of the key, which is none
                self._min_ts, self._max_ts = min(ts, self._min_ts), max(ts, self._max_ts)
            if self._with_expiry and (expire := each[2] if self._is_v2 else int.from_bytes(stored[-8:], "big")):
                self._first_expiry = min(expire, self._first_expiry)
                self._last_expiry = max(expire, self._last_expiry)
            yield each

    def found(self) -> dict[str, bytes]:
        """The properties by name, after the last row."""
        numbers: dict[str, int] = {}
        if self._with_rows:
            numbers = {"tikv.num_rows": self._rows, "tikv.min_ts": self._min_ts, "tikv.max_ts": self._max_ts}
        if self._last_expiry:
            numbers |= {"tikv.min_expire_ts": self._first_expiry, "tikv.max_expire_ts": self._last_expiry}
        return {"tikv.range_index": b""} | {name: number.to_bytes(8, "big") for name, number in numbers.items()}


def _to_v2(rows: Iterable[LiveRow]) -> Iterator[LiveRow]:
    """Live rows of V1 or V1TTL as rows of keyspace 0."""
    encoding = encoding_of(ApiVersion.V2)
    prefix = KeyCodec(ApiVersion.V2).prefix
    for key, value, expire, _ in rows:
        rpc_key = prefix + key
        yield rpc_key, value, expire, encoding.put(rpc_key, value, expire, CONVERTED_TS)
