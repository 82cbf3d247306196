"""The files of backups: what a store writes for one region, and its SSTs."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import fastcrc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.playground import external_storage
from tikv_br.playground.encoding import LiveRow, Row, data_range, encoding_of, v2_ts
from tikv_br.playground.engine import DEFAULT
from tikv_br.playground.external_storage import CipherFault, ExternalStorage, StorageFault
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.sst_file import with_properties
from tikv_br.playground.versions import ServerVersion

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
    """TiKV's own properties of a file of raw rows, as far as tools read them; those of the store's API version also if it converts."""

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
