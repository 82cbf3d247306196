"""``backup.Backup`` of one store: it writes SSTs of the regions it leads to external storage, one or two files a region.

Of transactional data it writes what a reader at the end version sees, as TiKV's records of two column families.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import fastcrc
import grpc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, errorpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import RAW_MODE, RAW_MODE_END, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.mvcc import PUT
from tikv_br.playground import external_storage
from tikv_br.playground.encoding import (
    DeadlyData,
    LiveRow,
    Row,
    data_range,
    encoding_of,
    from_memcomparable,
    memcomparable,
    v2_ts,
)
from tikv_br.playground.engine import DEFAULT, WRITE
from tikv_br.playground.external_storage import CipherFault, ExternalStorage, StorageFault, open_for
from tikv_br.playground.failpoints import BACKUP_REGION
from tikv_br.playground.node import BACKUP_BOUND, BACKUP_EMPTY_RANGE, StoreNode, crash_store
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import VERSION_NAMES, check_region
from tikv_br.playground.settings import ServerVersion
from tikv_br.playground.sst_file import with_properties
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.txn.mvcc import MvccReader, Snapshot
from tikv_br.playground.txn.state import FutureTs, KeyFault, TxnState, locked

CONVERTED_TS: Final = 1
"""The timestamp of every row that a backup converts from V1 or V1TTL to V2."""
_FORMAT_VERSION: Final = 2
_BLOCK_SIZE: Final = 16 << 10
_WINDOW_BITS: Final = -14
_DEFAULT_LEVEL: Final = 32767
_MAX_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SstSums:
    """Contents of an SST, counted over the keys and values that a client of the target sees."""

    crc64xor: int
    total_kvs: int
    total_bytes: int


def write_sst(rows: Iterable[tuple[Row, bytes | None]], path: Path, options: Options) -> SstSums | None:
    """Write stored rows to an SST; None, and no file, when there are none.

    With each row comes what is counted: a client's key and value, or None for a row that another file counts.
    """
    writer: SstFileWriter | None = None
    crc64xor = total_kvs = total_bytes = 0
    crc64 = fastcrc.crc64.xz
    for row, pair in rows:
        if writer is None:
            writer = SstFileWriter(options)
            writer.open(str(path))
        writer[row[0]] = row[1]
        if pair is not None:
            crc64xor ^= crc64(pair)
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
class RegionSpan:
    """A region and the part of it to back up, in RPC keys of the source."""

    region: Region
    start: bytes
    end: bytes


def bounds_codec(node: StoreNode) -> KeyCodec:
    """Encoding of the bounds of raw regions."""
    return KeyCodec(node.api_version if node.release.encodes_v2 else ApiVersion.V1)


class RawBackup:
    """One request for raw data, region by region."""

    def __init__(self, node: StoreNode, request: brpb_pb2.BackupRequest, storage: ExternalStorage) -> None:
        self._node = node
        self._request = request
        self._storage = storage
        self._codec = bounds_codec(node)
        self._is_default = request.cf in {"", DEFAULT}

    def run(self, span: RegionSpan) -> brpb_pb2.BackupResponse:
        """Back up one span. If the storage fails, the response names the range."""
        response = brpb_pb2.BackupResponse(
            start_key=span.start, end_key=span.end, api_version=self._request.dst_api_version
        )
        if self._is_default:
            try:
                response.files.extend(self._files(span))
            except StorageFault as fault:
                response.error.msg = fault.debug
            except CipherFault as fault:
                response.error.msg = f'Other("{fault}")'
        return response

    def _files(self, span: RegionSpan) -> Iterator[brpb_pb2.File]:
        """The file of a span, none if it contains no live row."""
        source, target = self._node.api_version, ApiVersion(self._request.dst_api_version)
        stored = self._node.engine.iterate(*data_range(self._codec.bound(span.start), self._codec.bound(span.end)))
        counted = self._node.release.counts_backups
        rows = encoding_of(source, self._node.release).live_rows(stored, self._node.now() if counted else 0)
        covered = KeyRange(span.start, span.end)
        if source is not target:
            rows = _to_v2(rows)
            covered = KeyCodec(target).rpc_range(covered)
        properties = RowProperties(source, self._node.release)
        watched = properties.watch(rows)
        pairs = ((row, key + (value if counted else row[1])) for key, value, _, row in watched)
        written = self._write(pairs)
        if written is not None:
            plain, sums = written
            sums = sums if counted else replace(sums, crc64xor=0)
            plain = with_properties(plain, properties.found())
            yield self._save(self._stem(span), DEFAULT, plain, sums, covered)

    def _write(self, pairs: Iterable[tuple[Row, bytes | None]]) -> tuple[bytes, SstSums] | None:
        """The bytes and sums of an SST; None when there are no rows."""
        options = sst_options(self._request.compression_type, self._request.compression_level)
        with tempfile.TemporaryDirectory(dir=self._node.data_dir, prefix="backup-") as folder:
            path = Path(folder) / "region.sst"
            sums = write_sst(pairs, path, options)
            return None if sums is None else (path.read_bytes(), sums)

    def _save(
        self, stem: str, family: str, plain: bytes, summary: SstSums, covered: KeyRange, **versions: int
    ) -> brpb_pb2.File:
        iv = secrets.token_bytes(external_storage.IV_SIZE)  # reported for plain files, too
        data = external_storage.crypt(self._request.cipher_info, iv, plain)
        name = f"{stem}_{family}.sst"
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
            cf=family,
            size=len(data),
            cipher_iv=iv,
            **versions,
        )

    def _stem(self, span: RegionSpan) -> str:
        """Unique by start key and time; without a start key it has neither, and a retry overwrites the file."""
        separator = "/" if self._storage.nested else "_"
        name = f"{self._node.store_id}{separator}{span.region.id}_{span.region.version}"
        if span.start:
            name += f"_{hashlib.sha256(span.start).hexdigest()}_{time.time_ns() // 1_000_000}"
        return name


class RowProperties:
    """TiKV's own properties of a file of raw rows, as far as tools read them; they are of the store's API version even if it converts."""

    def __init__(self, api_version: ApiVersion, release: ServerVersion) -> None:
        is_ttl = api_version is ApiVersion.V1TTL
        self._is_v2 = api_version is ApiVersion.V2
        self._with_rows = release.collects_rows and (self._is_v2 or (is_ttl and not release.collects_expiry))
        self._with_expiry = release.collects_expiry if self._is_v2 else is_ttl
        self._rows = self._last_expiry = self._max_ts = 0
        self._first_expiry = self._min_ts = _MAX_U64

    def watch(self, rows: Iterable[LiveRow]) -> Iterator[LiveRow]:
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


class TxnBackup(RawBackup):
    """One request for transactional data, region by region."""

    def __init__(
        self, node: StoreNode, request: brpb_pb2.BackupRequest, storage: ExternalStorage, state: TxnState
    ) -> None:
        super().__init__(node, request, storage)
        self._state = state
        self._reader = MvccReader(node.engine)
        self._snapshot = Snapshot.of(request.context, request.end_version)
        if not node.release.backs_up_over_locks:
            self._snapshot = replace(self._snapshot, ignored=frozenset())
        self._is_default = True  # the column family of the request does not count

    def run(self, span: RegionSpan) -> brpb_pb2.BackupResponse:
        """Back up one span. The answer to a region with a lock has nothing but that."""
        try:
            self._state.observe(self._request.end_version)
            return super().run(span)
        except KeyFault as fault:
            return brpb_pb2.BackupResponse(error=brpb_pb2.Error(kv_error=fault.error))
        except FutureTs as fault:
            fields = f"attempted_ts: TimeStamp({fault.ts}), limit: TimeStamp({fault.limit})"
            text = f"Txn(Error(InvalidMaxTsUpdate(InvalidMaxTsUpdate {{ {fields} }})))"
            return brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=text))

    def _files(self, span: RegionSpan) -> Iterator[brpb_pb2.File]:
        """Up to two files of the same name: long values, and commit records."""
        stem, request = self._stem(span), self._request
        covered = KeyRange(span.start, span.end)
        for family in (DEFAULT, WRITE):
            written = self._write(self._rows(span, family))
            if written is not None:
                versions = {"start_version": request.start_version, "end_version": request.end_version}
                plain, sums = written
                yield self._save(stem, family, plain, sums, covered, **versions)

    def _rows(self, span: RegionSpan, family: str) -> Iterator[tuple[Row, bytes | None]]:
        """Stored rows of a column family. A version counts in the file that holds its value, a delete in ``write``."""
        bounds = (memcomparable(span.start) if span.start else b"", memcomparable(span.end) if span.end else b"")
        for row in self._reader.scan(*bounds, self._snapshot):
            if row.lock is not None:
                raise locked(row.lock)
            is_put = row.record.kind == PUT
            if row.commit_ts <= self._request.start_version or not (is_put or self._request.start_version):
                continue
            is_long = is_put and row.record.value is None
            if family == WRITE:
                pair = None if is_long else row.key + (row.record.value or b"")
                yield (row.record_key, row.record.encode()), pair
            elif is_long:
                value = self._reader.value(row)
                yield (row.value_key, value), row.key + value


_RPC: Final = "Backup"
_COLUMN_FAMILIES: Final = frozenset({"", "default", "lock", "write", "raft"})


def _flush_failed(fault: TimestampFault) -> str:
    cause = f"[components/backup/src/endpoint.rs:1155]: fail to flush causal ts, {fault}"
    return f"Other({json.dumps(cause)})"


class BackupService(brpb_pb2_grpc.BackupServicer):
    """Serves one store."""

    def __init__(self, node: StoreNode, transactions: TxnState) -> None:
        self._node = node
        self._transactions = transactions

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
        yield from self._back_up(request, ranges, storage, context)

    def _back_up(
        self,
        request: brpb_pb2.BackupRequest,
        ranges: list[tuple[bytes, bytes]],
        storage: ExternalStorage,
        context: grpc.ServicerContext,
    ) -> Iterator[brpb_pb2.BackupResponse]:
        raw = request.is_raw_kv
        task = (
            RawBackup(self._node, request, storage)
            if raw
            else TxnBackup(self._node, request, storage, self._transactions)
        )
        codec = bounds_codec(self._node) if raw else KeyCodec(ApiVersion.V2)
        try:
            spans = [span for start, end in ranges for span in self._led_spans(codec, start, end)]
        except DamagedBytes:  # of a region that ends inside a key; a store also backs up the others
            text = 'EngineTrait(Codec(Io(Custom { kind: UnexpectedEof, error: "eof" })))'
            yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=text))
            return
        for span in spans:
            if not context.is_active():
                return
            error = self._region_error(span.region, context)
            if error is not None:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(region_error=error))
                continue
            try:
                yield task.run(span)
            except DeadlyData as damage:
                crash_store(self._node, context, _RPC, str(damage))

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
            if not request.is_raw_kv:
                self._check_bounds(start, end, context)

    def _check_bounds(self, start: bytes, end: bytes, context: grpc.ServicerContext) -> None:
        """A store decodes the bounds within the range of the regions that it leads."""
        codec = KeyCodec(ApiVersion.V2)
        first, last = codec.bound(start), codec.bound(end)
        for region in self._node.regions.overlapping(first, last):
            if region.leader_store == self._node.store_id:
                for bound in (region.start, region.end):
                    is_within = first < bound and (not last or bound < last)
                    if is_within and from_memcomparable(bound) is None:
                        crash_store(self._node, context, _RPC, f"{BACKUP_BOUND}: {bound.hex()}")

    def _led_spans(self, codec: KeyCodec, start: bytes, end: bytes) -> Iterator[RegionSpan]:
        """The parts of [start, end) that this store leads now; none of a reversed range."""
        if end and start > end:
            return
        for region in self._node.regions.overlapping(codec.bound(start), codec.bound(end)):
            if region.leader_store == self._node.store_id:
                first = start if region.start <= codec.bound(start) else codec.from_bound(region.start)
                reaches_end = not region.end or (end and codec.bound(end) <= region.end)
                yield RegionSpan(region, first, end if reaches_end else codec.from_bound(region.end))

    def _region_error(self, region: Region, context: grpc.ServicerContext) -> errorpb_pb2.Error | None:
        """Return the region error if a region has changed since the range was divided, or a failpoint's error."""
        node = self._node
        error = node.failpoints.intercept(BACKUP_REGION, store_id=node.store_id, region_id=region.id, context=context)
        if error is not None:
            return error
        sent = kvrpcpb_pb2.Context(
            region_id=region.id, region_epoch=region.to_pb().region_epoch, peer=region.leader.to_pb()
        )
        return check_region(node.regions, sent, node.store_id, read=True)
