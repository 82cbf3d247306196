"""RocksDB's files, read by us."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pyarrow as pa
import pytest
import rocksdict

from tests.support.internal_rows import internal_rows
from tests.unit.formats.sst.tables import (
    CHECKSUMS,
    COMPRESSIONS,
    Row,
    read,
    storage_rows,
    table_options,
    write,
    write_by_rocksdb,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import STORAGE_SCHEMA
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst.block import extents
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import BLOCK_NAME, GLOBAL_SEQNO, Table


def rows_of_all_sizes() -> list[Row]:
    """A few thousand rows of a store, and among them large, empty and long ones."""
    large = {b"zx%d" % size: bytes(range(256)) * (size // 256) for size in (0, 1 << 10, 1 << 20, 3 << 20)}
    return sorted((dict(storage_rows(ApiVersion.V2, 3000)) | large | {b"zw" + b"k" * 9000: b"long key"}).items())


@pytest.mark.parametrize(
    ("version", "compression", "checksum"),
    [
        *itertools.product(range(2, 7), COMPRESSIONS, ["crc32c"]),
        *itertools.product(range(2, 7), ["zstd"], CHECKSUMS),
    ],
)
def test_every_version(tmp_path: Path, version: int, compression: str, checksum: str) -> None:
    """Tables of every format version, compression and checksum give exactly the rows that RocksDB was given."""
    rows = rows_of_all_sizes()
    options = table_options(format_version=version, compression=compression, checksum=checksum)
    data = write_by_rocksdb(tmp_path / "table.sst", rows, options)
    reader = SstReader(MemorySource(data))
    assert reader.table.footer.format_version == version
    assert reader.table.entries == len(rows)
    assert read(data) == rows


@pytest.mark.parametrize("version", range(2, 7))
@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("index_restart_interval", [1, 3, 16])
def test_index_forms(tmp_path: Path, version: int, two_level: bool, index_restart_interval: int) -> None:
    """Plain and two-level indexes, with full and delta-encoded handles, lead to every block."""
    rows = rows_of_all_sizes()
    data = write_by_rocksdb(
        tmp_path / "table.sst",
        rows,
        table_options(
            format_version=version,
            compression="lz4",
            block_size=512,
            two_level=two_level,
            index_restart_interval=index_restart_interval,
        ),
    )
    index = Table(MemorySource(data)).index
    assert len(index.handles) > 100
    assert index.separators == sorted(index.separators)
    assert read(data) == rows


@pytest.mark.parametrize("restart_interval", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("hash_index", [False, True])
def test_restart_intervals(tmp_path: Path, restart_interval: int, hash_index: bool) -> None:
    """Any restart interval, and blocks that carry a hash index behind their entries, decode alike."""
    rows = rows_of_all_sizes()
    options = table_options(restart_interval=restart_interval, hash_index=hash_index)
    assert read(write_by_rocksdb(tmp_path / "table.sst", rows, options)) == rows


@pytest.mark.parametrize("max_rows", [1, 2, 7, 1000, 10_000])
def test_batches(max_rows: int) -> None:
    """Batches have the storage schema, at most so many rows, no empty one, and together every row."""
    rows = rows_of_all_sizes()[::5] if max_rows == 1 else rows_of_all_sizes()
    data, _ = write(rows)
    batches = list(SstReader(MemorySource(data)).batches(max_rows))
    assert {batch.schema for batch in batches} == {STORAGE_SCHEMA}
    assert all(0 < batch.num_rows <= max_rows for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    assert read(data, max_rows) == rows


@pytest.mark.parametrize("version", [2, 5])
def test_blocks_outside_a_range_are_not_read(tmp_path: Path, version: int) -> None:
    """All rows of a range are there, between any two keys, and few others."""
    rows = storage_rows(ApiVersion.V2, 3000)
    options = table_options(format_version=version, block_size=1024)
    reader = SstReader(MemorySource(write_by_rocksdb(tmp_path / "table.sst", rows, options)))
    keys = [key for key, _ in rows]
    for first, end in itertools.combinations([0, 1, 7, 8, 1500, 1501, 2998, 2999], 2):
        for start, stop in [
            (keys[first], keys[end]),
            (keys[first] + b"\0", keys[end] + b"\0"),
            (b"", keys[end]),
            (keys[end], b""),
        ]:
            wanted = [key for key in keys if start <= key and (not stop or key < stop)]
            found = [key for part in reader.batches(start=start, end=stop) for key in part["key"].to_pylist()]
            assert [key for key in found if start <= key and (not stop or key < stop)] == wanted
            assert len(found) <= len(wanted) + 100
    assert not list(reader.batches(start=b"zzz"))


def test_batches_outlive_the_reader() -> None:
    """A batch keeps its bytes when the reader is gone and has read others since."""
    rows = storage_rows(ApiVersion.V1, 30_000)
    kept = list(SstReader(MemorySource(write(rows)[0])).batches(1000))
    others = [(key, b"other") for key, _ in rows]
    assert read(write(others)[0], 1000) == others
    assert pa.Table.from_batches(kept)["key"].to_pylist() == [key for key, _ in rows]


def test_batch_of_no_rows_asked() -> None:
    """A batch size of 0 is a mistake of the caller."""
    with pytest.raises(ValueError, match="at least one row"):
        list(SstReader(MemorySource(write([(b"za", b"")])[0])).batches(0))


def flushed(folder: Path, *, compression: str = "none") -> bytes:
    """The one table that a database wrote of puts, overwrites and deletes, with a snapshot that keeps old versions."""
    database = rocksdict.Rdict(str(folder / "db"), table_options(compression=compression))
    database[b"za"] = b"1"
    snapshot = database.snapshot()
    database[b"za"] = b"2"
    database[b"zb"] = b"3"
    del database[b"zc"]
    database.flush()
    path = next((folder / "db").glob("*.sst"))
    data = path.read_bytes()
    del snapshot
    database.close()
    return data


def test_rows_that_are_no_puts(tmp_path: Path) -> None:
    """Sequence numbers and types of a database's own table are shown; its deletions are refused as rows to restore."""
    reader = SstReader(MemorySource(flushed(tmp_path)))
    assert [(row.key, row.value, row.sequence, row.type) for row in internal_rows(reader)] == [
        (b"za", b"2", 2, 1),
        (b"za", b"1", 1, 1),
        (b"zb", b"3", 3, 1),
        (b"zc", b"", 4, 0),
    ]
    with pytest.raises(UnsupportedFormat, match="row of type 0"):
        list(reader.batches())


def test_range_deletions(tmp_path: Path) -> None:
    """A table whose range deletions would hide rows is refused."""
    database = rocksdict.Rdict(str(tmp_path / "db"), table_options())
    database[b"za"] = b"1"
    database.delete_range(b"zb", b"zc")
    database.flush()
    data = next((tmp_path / "db").glob("*.sst")).read_bytes()
    database.close()
    with pytest.raises(UnsupportedFormat, match="range deletions"):
        list(SstReader(MemorySource(data)).batches())


def test_compression_dictionary(tmp_path: Path) -> None:
    """A table whose blocks need a dictionary is refused by name."""
    options = table_options(compression="zstd")
    options.set_compression_options(-14, 3, 0, 4096)
    options.set_zstd_max_train_bytes(100_000)
    data = write_by_rocksdb(tmp_path / "table.sst", storage_rows(ApiVersion.V1, 5000), options)
    with pytest.raises(UnsupportedFormat, match="dictionary"):
        list(SstReader(MemorySource(data)).batches())


@pytest.mark.parametrize("version", [2, 5, 6])
def test_global_sequence_number(tmp_path: Path, version: int) -> None:
    """A number that a store wrote into the file at ingestion counts for all rows, though the checksum is older."""
    rows = storage_rows(ApiVersion.V1, 50)
    data = bytearray(write_by_rocksdb(tmp_path / "table.sst", rows, table_options(format_version=version)))
    handle = Table(MemorySource(bytes(data))).metaindex[BLOCK_NAME]
    block = bytes(data[handle.offset : handle.offset + handle.size])
    (start,) = (start for name, start, _ in extents(block) if name == GLOBAL_SEQNO.encode())
    struct.pack_into("<Q", data, handle.offset + start, 77)
    reader = SstReader(MemorySource(bytes(data)))
    assert {row.sequence for row in internal_rows(reader)} == {77}
    assert read(bytes(data)) == rows
    data[handle.offset + start + 8] ^= 1
    with pytest.raises(DamagedBytes):
        list(SstReader(MemorySource(bytes(data))).batches())


@pytest.mark.parametrize("version", [0, 7])
def test_other_versions(tmp_path: Path, version: int) -> None:
    """Format versions outside of 2 to 6 are refused by number."""
    data = bytearray(write_by_rocksdb(tmp_path / "table.sst", [(b"za", b"")], table_options(format_version=6)))
    data[-12:-8] = struct.pack("<I", version)
    with pytest.raises(UnsupportedFormat, match=f"format version {version}"):
        list(SstReader(MemorySource(bytes(data))).batches())


@pytest.mark.parametrize("version", [2, 4, 5, 6])
@pytest.mark.parametrize("checksum", [name for name in CHECKSUMS if name != "no_checksum"])
def test_every_flipped_byte_is_found(tmp_path: Path, version: int, checksum: str) -> None:
    """Each single byte of a file, changed, leads to an error or to the same rows, never to others."""
    rows = storage_rows(ApiVersion.V1, 30)
    options = table_options(format_version=version, checksum=checksum, compression="zstd", block_size=256)
    data = write_by_rocksdb(tmp_path / "table.sst", rows, options)
    silent = 0
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        try:
            assert read(changed) == rows, at
            silent += 1
        except (DamagedBytes, UnsupportedFormat):
            pass
    # Padding of old footers, and the global sequence number, which does not alter rows.
    assert silent <= 50
