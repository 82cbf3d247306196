"""Tables for tests: rows, our writer into memory, RocksDB's writer and tools as second opinions."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import rocksdict

from tests.support.stored_values import encode_value
from tests.support.tools import find_tool
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.block import ChecksumType, Footer, encode_entries
from tikv_br.formats.sst.coding import BlockHandle, decode_handle, encode_varint
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import EndKeys
from tikv_br.formats.sst.writer import SstOptions, SstWriter
from tikv_br.formats.values import StoredValue

Row = tuple[bytes, bytes]

COMPRESSIONS = ("none", "snappy", "zlib", "bz2", "lz4", "lz4hc", "zstd")
CHECKSUMS = ("no_checksum", "crc32c", "xxhash", "xxhash64", "xxh3")


def batch(rows: Iterable[Row]) -> pa.RecordBatch:
    """Rows as a batch of STORAGE_SCHEMA."""
    rows = list(rows)
    return columns.storage_rows(
        columns.from_list([key for key, _ in rows]), columns.from_list([value for _, value in rows])
    )


def write(rows: Iterable[Row], options: SstOptions | None = None, *, cut: int = 1000) -> tuple[bytes, EndKeys]:
    """Write a table with our writer, in batches of `cut` rows."""
    rows, chunks = list(rows), list[bytes]()
    writer = SstWriter(chunks.append, options or SstOptions())
    for start in range(0, len(rows), cut):
        writer.append(batch(rows[start : start + cut]))
    ends = writer.finish()
    return b"".join(chunks), ends


def read(data: bytes, max_rows: int = 65_536) -> list[Row]:
    """All rows of a table by our reader."""
    return [
        (key, value)
        for part in SstReader(MemorySource(data)).batches(max_rows)
        for key, value in zip(part["key"].to_pylist(), part["value"].to_pylist(), strict=True)
    ]


def storage_rows(version: ApiVersion, count: int, *, value_size: int = 20) -> list[Row]:
    """Rows as a store of this API version holds them, every third with an expiry where there is one."""
    codec = KeyCodec(version)
    return [
        (
            DATA_PREFIX + codec.storage_key(codec.rpc_key(b"key%06d" % number), 400_000_000_000 + number),
            encode_value(
                version,
                StoredValue(
                    (b"value%06d" % number) * (value_size // 11 + 1),
                    2_000_000_000 if version.has_ttl and number % 3 == 0 else 0,
                ),
            ),
        )
        for number in range(count)
    ]


def table_options(
    *,
    format_version: int = 5,
    compression: str = "none",
    checksum: str = "crc32c",
    block_size: int = 4096,
    restart_interval: int = 16,
    index_restart_interval: int = 1,
    two_level: bool = False,
    hash_index: bool = False,
    bloom_filter: bool = False,
) -> rocksdict.Options:
    """Options of RocksDB's writer."""
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_format_version(format_version)
    blocks.set_checksum_type(getattr(rocksdict.ChecksumType, checksum)())
    blocks.set_block_size(block_size)
    blocks.set_block_restart_interval(restart_interval)
    blocks.set_index_block_restart_interval(index_restart_interval)
    if two_level:
        blocks.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
        blocks.set_metadata_block_size(512)
    if bloom_filter:
        blocks.set_bloom_filter(10, block_based=False)
    if hash_index:
        blocks.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(getattr(rocksdict.DBCompressionType, compression)())
    return options


def write_by_rocksdb(path: Path, rows: Iterable[Row], options: rocksdict.Options) -> bytes:
    """A table for ingestion by RocksDB's own writer."""
    writer = rocksdict.SstFileWriter(options)
    writer.open(str(path))
    for key, value in rows:
        writer[key] = value
    writer.finish()
    return path.read_bytes()


PUT = b"\x01" + bytes(7)
"""Trailer of every user key in a table: sequence number 0, type 1."""


def hand_made(
    blocks: Sequence[Sequence[Row]],
    *,
    drop: Container[str] = (),
    change: Mapping[str, bytes] = MappingProxyType({}),
    index: Callable[[list[Row]], list[Row]] = lambda pairs: pairs,
    trailer: bytes = PUT,
    checksum: ChecksumType = ChecksumType.CRC32C,
) -> bytes:
    """A table put together piece by piece, so that any piece can be wrong while every checksum is right.

    `blocks` are rows as they are to lie in each data block; `drop` and `change` apply to the properties, `index` to the
    pairs of last key and handle.
    """
    out = bytearray()

    def add(block: bytes) -> bytes:
        handle = BlockHandle(len(out), len(block))
        out.extend(block + b"\0" + checksum.compute([block], 0).to_bytes(4, "little"))
        return handle.encode()

    pairs = [
        ((rows[-1][0] if rows else b"z") + trailer, add(encode_entries((key + trailer, value) for key, value in rows)))
        for rows in blocks
    ]
    index_at = add(encode_entries(index(pairs)))
    properties = {
        names.EXTERNAL_VERSION: struct.pack("<I", 2),
        names.GLOBAL_SEQNO: bytes(8),
        names.NUM_ENTRIES: encode_varint(sum(map(len, blocks))),
        names.NUM_DATA_BLOCKS: encode_varint(len(blocks)),
        names.COMPARATOR: names.BYTEWISE,
    } | dict(change)
    kept = sorted((name.encode(), value) for name, value in properties.items() if name not in drop)
    metaindex_at = add(encode_entries([(names.BLOCK_NAME.encode(), add(encode_entries(kept)))]))
    footer = Footer(2, checksum, decode_handle(metaindex_at)[0], decode_handle(index_at)[0])
    return bytes(out) + footer.encode()


def ingest_by_rocksdb(folder: Path, data: bytes) -> list[Row]:
    """Rows of a RocksDB database after it ingested a table, checked and compacted by it."""
    path = folder / "ingested.sst"
    path.write_bytes(data)
    database = rocksdict.Rdict(str(folder / "db"), rocksdict.Options(raw_mode=True))
    try:
        database.ingest_external_file([str(path)])
        rows: list[Row] = list(database.items())  # type: ignore[arg-type]
        assert [database[key] for key, _ in rows] == [value for _, value in rows]
        database.compact_range(None, None)
        assert list(database.items()) == rows
        return rows
    finally:
        database.close()


def sst_dump(path: Path, command: str, *arguments: str) -> str:
    """Output of RocksDB's tool for a file; skips the test if the tool is not installed."""
    program = find_tool("sst_dump", "rocksdb_sst_dump", hint="install rocksdb-tools")
    result = subprocess.run(
        [program, f"--file={path}", f"--command={command}", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
