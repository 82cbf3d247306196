"""The same work as the scan engine's task, with RocksDB's own writer, key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa
import rocksdict
from fastcrc import crc64

from tests.support.stored_values import encode_value
from tikv_br.backupset.files import FileWriter
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rawkv import PAGE_ROWS, RawClient
from tikv_br.dataflow.convert import Conversion
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.rows import to_storage
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.values import StoredValue
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

_V1, _V2 = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2)
_CHUNK = 1 << 20


def sst_options(compression: Compression, block_size: int = 64 << 10) -> rocksdict.Options:
    """Options of RocksDB's writer for files as ours are: version 2, CRC32c, zstd level 1."""
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_format_version(2)
    blocks.set_checksum_type(rocksdict.ChecksumType.crc32c())
    blocks.set_block_size(block_size)
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(getattr(rocksdict.DBCompressionType, compression.label)())
    options.set_compression_options(-14, 1, 0, 0)  # window bits as RocksDB has them, level 1
    return options


def put_all(path: Path, rows: Iterable[tuple[bytes, bytes]], options: rocksdict.Options) -> None:
    """Write a table key by key."""
    writer = rocksdict.SstFileWriter(options)
    writer.open(str(path))
    for key, value in rows:
        writer[key] = value
    writer.finish()


def pairs(batch: pa.RecordBatch) -> Iterable[tuple[bytes, bytes]]:
    """The rows of a batch of two columns as Python has them."""
    return zip(batch[0].to_pylist(), batch[1].to_pylist(), strict=True)


def rocksdict_writer(cluster: Cluster, folder: str, compression: Compression = Compression.ZSTD) -> None:
    """Our pages, checksums and rows; the table by RocksDB."""
    converter = Conversion(ApiVersion.V1, ApiVersion.V2, ts=1).of(KeyRange(b"", b""))
    pages = _raw(cluster).scan_pages(EVERY_KEY)
    converted = (converter.convert_page(page) for page in pages)
    rows = chain.from_iterable(pairs(to_storage(each.records, converter.target)) for each in converted)
    _store(rows, folder, compression)


def per_key_python(cluster: Cluster, folder: str, compression: Compression = Compression.ZSTD) -> None:
    """Pages by protobuf, then a loop over keys for checksum, encoding and table."""
    _store(_encoded(cluster), folder, compression)


def _encoded(cluster: Cluster) -> Iterator[tuple[bytes, bytes]]:
    checksum = 0
    for pair in _scanned(cluster):
        checksum ^= crc64.xz(pair.key + pair.value)
        key = DATA_PREFIX + _V2.storage_key(_V2.rpc_key(pair.key), 1)
        yield key, encode_value(ApiVersion.V2, StoredValue(pair.value))


def _scanned(cluster: Cluster) -> Iterator[kvrpcpb_pb2.KvPair]:
    """All pairs, region by region."""
    start, done = b"", False
    while not done:
        region = cluster.regions.locate(start)
        context = region.context(ApiVersion.V1, cluster.cluster_id)
        request = kvrpcpb_pb2.RawScanRequest(context=context, start_key=start, limit=PAGE_ROWS)
        kvs = kvrpcpb_pb2.RawScanResponse.FromString(cluster.store(region.leader.store_id).raw_scan(request)).kvs
        yield from kvs
        full = len(kvs) == PAGE_ROWS
        start = kvs[-1].key + b"\0" if full else region.end
        done = not full and not region.end


def _raw(cluster: Cluster) -> RawClient:
    return RawClient(cluster.router, _V1, cluster.cluster_id)


def _store(rows: Iterable[tuple[bytes, bytes]], folder: str, compression: Compression) -> None:
    """Write the table to a file, for RocksDB knows no other way, and from there into the storage."""
    path = Path(folder, "rocksdb.sst")
    put_all(path, rows, sst_options(compression))
    with FileWriter(open_store(StorageLocation("local", folder)), "data.sst") as stored, path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            stored.write(chunk)
        stored.close()
