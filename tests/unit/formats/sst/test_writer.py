"""Our files, judged by RocksDB and its tools."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.sst.tables import (
    Row,
    batch,
    ingest_by_rocksdb,
    read,
    sst_dump,
    storage_rows,
    table_options,
    write,
    write_by_rocksdb,
)
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError, UnsortedKeys, UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.row_check import check_rows
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table
from tikv_br.formats.sst.writer import SstOptions, SstWriter

Checksum = Literal["crc32c", "xxh3"]
CHECKSUMS: tuple[Checksum, ...] = ("crc32c", "xxh3")
EVERY_WAY = list(itertools.product(range(2, 6), Compression, CHECKSUMS))

keys = st.binary(min_size=1, max_size=40) | st.binary(min_size=1, max_size=3).map(lambda head: b"common" * 30 + head)
row_sets = st.dictionaries(keys, st.binary(max_size=300) | st.just(b"v" * 5000), min_size=1, max_size=60).map(
    lambda rows: sorted(rows.items())
)
options = st.builds(
    SstOptions,
    compression=st.sampled_from(Compression),
    format_version=st.integers(2, 5),
    checksum=st.sampled_from(CHECKSUMS),
    block_size=st.integers(1024, 8192),
    restart_interval=st.integers(1, 20),
)


def awkward_rows() -> list[Row]:
    """Shared prefixes, keys that go on with a trailer's bytes, empty and large values, keys of 0xFF."""
    rows = dict(storage_rows(ApiVersion.V2, 700))
    trailer = b"\x01" + bytes(7)
    rows |= {b"zz" + trailer * count: b"t%d" % count for count in range(6)}
    rows |= {b"zz" + trailer[:length]: b"cut" for length in range(1, 8)}
    rows |= {b"z\xff" + b"\xff" * length: b"" for length in range(40)}
    rows |= {b"zy" + b"k" * 3000: b"long key", b"zx": bytes(3 << 20), b"zx\0": b"after a large one"}
    return sorted(rows.items())


@pytest.mark.parametrize(("version", "compression", "checksum"), EVERY_WAY)
def test_sst_dump_agrees(tmp_path: Path, version: int, compression: Compression, checksum: Checksum) -> None:
    """RocksDB's tool verifies every checksum of the file and prints exactly the rows that went in."""
    rows = [row for row in awkward_rows() if len(row[1]) < 10_000]
    path = tmp_path / "table.sst"
    path.write_bytes(
        write(rows, SstOptions(compression, format_version=version, checksum=checksum, block_size=2048))[0]
    )
    assert "The file is ok" in sst_dump(path, "verify")
    printed = sst_dump(path, "scan", "--output_hex").splitlines()
    expected = [f"'{key.hex().upper()}' seq:0, type:1 => {value.hex().upper()}" for key, value in rows]
    assert [line.rstrip() for line in printed if line.startswith("'")] == [line.rstrip() for line in expected]


@pytest.mark.parametrize(("version", "compression", "checksum"), EVERY_WAY)
def test_rocksdb_ingests(tmp_path: Path, version: int, compression: Compression, checksum: Checksum) -> None:
    """A RocksDB database ingests the file and then holds exactly the rows that went in, by scan and by get."""
    rows = awkward_rows()
    data, _ = write(rows, SstOptions(compression, format_version=version, checksum=checksum), cut=97)
    assert ingest_by_rocksdb(tmp_path, data) == rows


def test_ingest_over_existing_keys(tmp_path: Path) -> None:
    """A second table over the same keys, which takes a global sequence number, hides the first."""
    old = [(key, b"old") for key, _ in storage_rows(ApiVersion.V1, 500)]
    new = [(key, b"new") for key, _ in old[::2]]
    ingest_by_rocksdb(tmp_path, write(old)[0])
    assert ingest_by_rocksdb(tmp_path, write(new)[0]) == sorted((dict(old) | dict(new)).items())


@given(row_sets, options, st.integers(1, 70))
def test_round_trip(rows: list[Row], options: SstOptions, cut: int) -> None:
    """Any rows, in appends of any size, with any options, come back as they were."""
    data, ends = write(rows, options, cut=cut)
    assert read(data) == rows
    assert Table(MemorySource(data)).entries == len(rows)
    assert ends == (rows[0][0], rows[-1][0])


@pytest.mark.parametrize("version", list(ApiVersion))
def test_own_checks_pass(version: ApiVersion) -> None:
    """Our files from a store's rows pass the checks that protect stores."""
    rows = storage_rows(version, 5000)
    data, ends = write(rows)
    table = Table(MemorySource(data))
    assert check_structure(table, KeyCodec(version), rows[0][0][1:], b"") == ends == (rows[0][0], rows[-1][0])
    assert table.entries == 5000
    check_rows(SstReader(MemorySource(data)), version)


def test_properties_equal_rocksdb(tmp_path: Path) -> None:
    """Counts, sizes and what marks a file for ingestion equal what RocksDB's own writer says of the same rows."""
    rows = storage_rows(ApiVersion.V2, 3000)
    theirs = Table(
        MemorySource(write_by_rocksdb(tmp_path / "theirs.sst", rows, table_options(format_version=2)))
    ).properties
    ours = Table(MemorySource(write(rows, SstOptions(Compression.NONE))[0])).properties
    assert set(ours) <= set(theirs)
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different <= {
        *(names.DATA_SIZE, names.INDEX_SIZE, names.NUM_DATA_BLOCKS, names.TAIL_START),  # blocks of another size
        "rocksdb.format.version",  # 0 in files of TiKV; RocksDB repeats the footer's since version 8
    }


def test_options_refused() -> None:
    """Options that no reader takes are refused before anything is written."""
    refused: tuple[dict[str, Any], ...] = (
        {"format_version": 1},
        {"format_version": 6},
        {"level": 23},
        {"compression": Compression.SNAPPY, "level": 1},
        {"compression": Compression.LZ4, "level": 13},
        {"checksum": "md5"},
        {"block_size": 100},
        {"restart_interval": 0},
    )
    for wrong in refused:
        with pytest.raises(UnsupportedFormat):
            SstOptions(**wrong)


@pytest.mark.parametrize("level", [-10, 1, 3, 19])
def test_levels(level: int) -> None:
    """A level of zstd reaches the compressor: higher ones make smaller files, and all decode."""
    rows = storage_rows(ApiVersion.V2, 4000, value_size=100)
    data, _ = write(rows, SstOptions(level=level))
    lowest, _ = write(rows, SstOptions(level=-20))
    assert len(data) < len(lowest)
    assert read(data) == rows


@pytest.mark.parametrize(
    "rows",
    [
        [(b"b", b""), (b"a", b"")],
        [(b"a", b""), (b"a", b"")],
        [(b"ab", b""), (b"a", b"")],
        [(b"a\xff", b""), (b"a\x7f", b"")],
        [(b"longer than a word b", b""), (b"longer than a word a", b"")],
    ],
)
@pytest.mark.parametrize("cut", [1, 2])
def test_unsorted_keys(rows: list[Row], cut: int) -> None:
    """A key that does not sort after its predecessor is refused, within an append and across two."""
    with pytest.raises(UnsortedKeys, match=f"{rows[1][0].hex()} does not sort after {rows[0][0].hex()}"):
        write(rows, cut=cut)


def test_no_rows() -> None:
    """A table without rows, which no store takes, is refused; appending nothing is nothing."""
    writer = SstWriter(lambda data: None)
    writer.append(batch([]))
    with pytest.raises(FormatError):
        writer.finish()


def test_wrong_columns() -> None:
    """Columns of another type and nulls are refused, not misread."""
    writer = SstWriter(lambda data: None)
    for wrong in (pa.array([b"a"], pa.binary()), pa.array([None], pa.large_binary())):
        with pytest.raises(FormatError):
            writer.append(pa.RecordBatch.from_arrays([wrong, wrong], ["key", "value"]))


def test_row_too_large() -> None:
    """A row beyond what a block may hold is refused: the reader would not take it either."""
    offsets = np.array([0, 300 << 20])
    huge = columns.build(offsets, np.zeros(300 << 20, np.uint8))
    with pytest.raises(UnsupportedFormat, match="block of 3145"):
        SstWriter(lambda data: None).append(columns.storage_rows(columns.from_list([b"za"]), huge))


def test_streams() -> None:
    """The sink gets the file in pieces while rows come, and what it keeps does not change later."""
    chunks: list[bytes] = []
    writer = SstWriter(chunks.append, SstOptions(Compression.NONE))
    rows = storage_rows(ApiVersion.V1, 40_000, value_size=100)
    for start in range(0, len(rows), 10_000):
        writer.append(batch(rows[start : start + 10_000]))
        written = sum(map(len, chunks))
        assert written > start * 100
    writer.finish()
    assert read(b"".join(chunks)) == rows


def test_noise_is_stored_as_it_is(tmp_path: Path) -> None:
    """Blocks that do not shrink are stored raw, later ones that do are compressed again, and RocksDB reads both."""
    noise = np.random.default_rng(1).bytes(2_000_000)
    rows = [(b"za%07d" % at, noise[at : at + 1000]) for at in range(0, len(noise), 1000)]
    rows += [(b"zb%07d" % at, bytes(1000)) for at in range(0, len(noise), 1000)]
    data, _ = write(rows)
    assert len(data) < 3_200_000
    assert ingest_by_rocksdb(tmp_path, data) == rows


def test_slices_of_batches() -> None:
    """A slice of a batch, whose offsets do not start at 0, is written as its rows."""
    rows = storage_rows(ApiVersion.V2, 100)
    chunks: list[bytes] = []
    writer = SstWriter(chunks.append)
    writer.append(batch(rows).slice(10, 50))
    writer.append(batch(rows).slice(60))
    writer.finish()
    assert read(b"".join(chunks)) == rows[10:]


def test_rows_of_very_different_sizes() -> None:
    """Tiny blocks between rows larger than a block, then one larger than the buffer, then small ones, in any batches."""
    sizes = [*([1, 70_000] * 30), 3_000_000, 2, 2_000_000, *([5] * 2000), *([66_000] * 12), *([300] * 900)]
    rows = [(b"z%06d" % number, bytes([number % 251]) * size) for number, size in enumerate(sizes)]
    whole, ends = write(rows, SstOptions(Compression.LZ4))
    assert read(whole) == rows
    assert len(Table(MemorySource(whole)).index.handles) > 75
    for cut in (1, 7):
        assert write(rows, SstOptions(Compression.LZ4), cut=cut) == (whole, ends)


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4, Compression.ZSTD])
def test_many_blocks(compression: Compression) -> None:
    """More blocks than one call of the kernel makes, noise that is skipped, and rows larger than the buffer."""
    noise = np.random.default_rng(5).bytes(1 << 22)
    rows = [(b"za%06d" % row, noise[row : row + 150] if row % 900 < 500 else bytes(150)) for row in range(9000)]
    rows += [(b"zb", noise[: 1 << 20]), (b"zc", bytes(3 << 20)), (b"zd", b""), (b"ze", noise)]
    rows += [(b"zf%06d" % row, b"value %d" % row) for row in range(3000)]
    options = SstOptions(compression, block_size=1024)
    whole, ends = write(rows, options)
    assert read(whole) == rows
    assert len(Table(MemorySource(whole)).index.handles) > 1200
    assert write(rows, options, cut=4000) == (whole, ends)
