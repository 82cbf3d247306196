"""The checks that stand between a table and a store: each defect that kills a real one is made here and found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sst_surgery import tail_offset
from tests.unit.formats.sst.tables import Row, hand_made, sst_dump, storage_rows, table_options, write, write_by_rocksdb
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.block import FOOTER_SIZE, TRAILER_SIZE, BlockReader, ChecksumType, Footer, encode_entries
from tikv_br.formats.sst.check import check_structure
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.row_check import check_rows
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table, runs

V1, V1TTL, V2 = ApiVersion
codec = KeyCodec(V2)


def in_blocks(rows: list[Row], size: int = 100) -> list[list[Row]]:
    """Rows cut into data blocks."""
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def structure(data: bytes, version: ApiVersion, start: bytes = b"", end: bytes = b"") -> None:
    """Checks of a restore of every file."""
    check_structure(Table(MemorySource(data)), KeyCodec(version), start, end)


def content(data: bytes, version: ApiVersion) -> None:
    """Its checks when all rows are read."""
    check_rows(SstReader(MemorySource(data)), version)


@pytest.mark.parametrize("version", list(ApiVersion))
def test_sound(tmp_path: Path, version: ApiVersion) -> None:
    """A table made by hand like those below, but right, passes here and with RocksDB's tool."""
    data = hand_made(in_blocks(storage_rows(version, 500)))
    structure(data, version)
    content(data, version)
    (tmp_path / "table.sst").write_bytes(data)
    assert "The file is ok" in sst_dump(tmp_path / "table.sst", "verify")


@pytest.mark.parametrize("name", [names.EXTERNAL_VERSION, names.GLOBAL_SEQNO, names.NUM_ENTRIES])
def test_missing_property(name: str) -> None:
    """A property without which a store dies at ingest, or refuses the download, is missed by name."""
    with pytest.raises(UnsupportedFormat, match=name):
        structure(hand_made([storage_rows(V2, 10)], drop={name}), V2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.EXTERNAL_VERSION, b"\x01\0\0\0"),
        (names.GLOBAL_SEQNO, b"\0"),
        (names.NUM_ENTRIES, b"\0"),
        (names.NUM_ENTRIES, b"\x80"),
        (names.NUM_DATA_BLOCKS, b"\x07"),
        (names.DELETED_KEYS, b"\x01"),
        (names.MERGE_OPERANDS, b"\x01"),
        (names.NUM_RANGE_DELETIONS, b"\x01"),
        (names.COMPARATOR, b"rocksdb.ReverseBytewiseComparator"),
        (names.INDEX_TYPE, b"\x09\0\0\0"),
    ],
)
def test_wrong_property(name: str, value: bytes) -> None:
    """A property of another value than the table deserves is found."""
    with pytest.raises(FormatError):
        structure(hand_made([storage_rows(V2, 10)], change={name: value}), V2)


def test_wrong_count() -> None:
    """A number of entries that is not that of the rows is found by reading them."""
    data = hand_made([storage_rows(V2, 10)], change={names.NUM_ENTRIES: b"\x0b"})
    with pytest.raises(DamagedBytes, match="10 rows, but the properties say 11"):
        content(data, V2)


def test_no_properties() -> None:
    """A table without any properties is no table."""
    data = write(storage_rows(V2, 10))[0]
    footer = Table(MemorySource(data)).footer
    empty = encode_entries([])
    out = data[: footer.metaindex.offset] + empty + b"\0"
    out += ChecksumType.CRC32C.compute([empty], 0).to_bytes(4, "little")
    out += Footer(2, ChecksumType.CRC32C, BlockHandle(footer.metaindex.offset, len(empty)), footer.index).encode()
    with pytest.raises(DamagedBytes, match="without a block of properties"):
        structure(out, V2)


@pytest.mark.parametrize("data", [b"", bytes(1000), b"not a table" * 100])
def test_no_table(data: bytes) -> None:
    """Something else than a table is said to be so."""
    with pytest.raises(DamagedBytes):
        structure(data, V1)


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize(
    ("version", "key", "value", "message"),
    [
        (V1, b"user key", b"", "start with z"),
        (V1TTL, b"user key", bytes(8), "start with z"),
        (V1TTL, None, b"1234567", "expiry"),
        (V2, b"r\0\0\0", b"\0", "start with z"),
        (V2, None, b"", "flags"),
        (V2, None, b"value\x04", "flags"),
        (V2, None, b"1234567\x01", "expiry"),
        (V2, None, b"value" + bytes(8) + b"\x01", "an expiry of 0"),
        (V2, b"zuser key", b"\0", "memcomparable"),
        (V2, b"z" + codec.bound(b"r\0\0\0a"), b"\0", "ts"),
        (V2, b"z" + codec.storage_key(b"r\0\0\0a", 0), b"\0", "timestamp of 0"),
        (V2, b"z" + codec.storage_key(b"x\0\0\0a", 9), b"\0", "raw mode"),
        (V2, b"z" + codec.storage_key(b"r\0\0", 9), b"\0", "raw mode"),
        (V2, b"z" + codec.storage_key(b"r\0\0\0a", 9) + b"\0", b"\0", "ts"),
        (V2, b"zr\0\0\0a\0\0\0\xf6" + bytes(8), b"\0", "marker"),
        (V2, b"zr\0\0\0a\0\0\1\xfc" + bytes(8), b"\0", "padding"),
    ],
)
def test_wrong_row(block: int, version: ApiVersion, key: bytes | None, value: bytes, message: str) -> None:
    """A row that a store dies or loses data of is found: by reading all, and in the outer blocks by the structure."""
    rows = storage_rows(version, 300)
    if key is None:
        rows[block * 100 + 50] = (rows[block * 100 + 50][0], value)
        data = hand_made(in_blocks(rows))
    else:  # alone, where it would not sort among the others
        data = hand_made([[(key, value)]])
    with pytest.raises(DamagedBytes, match=message):
        content(data, version)
    if key is not None or block != 1:
        with pytest.raises(DamagedBytes, match=message):
            structure(data, version)


@pytest.mark.parametrize("value", [b"\x02", b"value" + (1 << 40).to_bytes(8, "big") + b"\x03", b"\0"])
def test_right_values(value: bytes) -> None:
    """Tombstones, with an expiry too, and empty values are right in V2."""
    rows = [(key, value) for key, _ in storage_rows(V2, 10)]
    structure(hand_made([rows]), V2)
    content(hand_made([rows]), V2)


def test_unsorted_rows() -> None:
    """Rows out of order or twice, which a store takes and then loses or dies of, are found."""
    rows = storage_rows(V1, 10)
    for wrong in ([*rows[:4], rows[5], rows[4], *rows[6:]], [*rows[:5], *rows[4:]], rows[::-1]):
        data = hand_made([wrong])
        for check in (structure, content):
            with pytest.raises(DamagedBytes, match="does not sort after"):
                check(data, V1)


def test_unsorted_blocks() -> None:
    """Blocks out of order are found by the index, or where the index hides it by reading the rows."""
    first, second, third, fourth = in_blocks(storage_rows(V1, 400))
    with pytest.raises(DamagedBytes, match="keys do not ascend"):
        structure(hand_made([first, third, second, fourth]), V1)

    def ascending(pairs: list[Row]) -> list[Row]:
        return [(b"zk%d........" % number, handle) for number, (_, handle) in enumerate(pairs)]

    with pytest.raises(DamagedBytes, match="does not sort after"):
        content(hand_made([first, third, second, fourth], index=ascending), V1)


def test_index_beside_its_blocks() -> None:
    """Separators that lie before their block's last key or after the next block's first are found at both ends."""
    rows = storage_rows(V1, 300)

    def early(number: int, key: bytes) -> bytes:
        data = hand_made(
            in_blocks(rows),
            index=lambda pairs: [(key + bytes(8), at) if n == number else (k, at) for n, (k, at) in enumerate(pairs)],
        )
        with pytest.raises(DamagedBytes, match="index key"):
            structure(data, V1)
        return data

    early(0, rows[50][0])
    early(2, rows[250][0])
    early(1, rows[220][0])


@pytest.mark.parametrize(
    "handle", [BlockHandle(1 << 40, 10), BlockHandle(0, 1 << 40), BlockHandle(2**64 - 1, 2**64 - 1), BlockHandle(1, 50)]
)
def test_data_outside_of_the_file(handle: BlockHandle) -> None:
    """An index that names data beyond the file, or over other blocks, is found before anything is read from there."""
    data = hand_made(in_blocks(storage_rows(V1, 300)), index=lambda pairs: [*pairs[:2], (pairs[2][0], handle.encode())])
    with pytest.raises(DamagedBytes):
        structure(data, V1)


def test_rows_that_are_no_puts() -> None:
    """Deletions, merges and what else a database's own table has are not for ingestion."""
    for kind in (0, 2, 7, 0x11):
        data = hand_made([storage_rows(V1, 3)], trailer=bytes([kind]) + bytes(7))
        for check in (structure, content):
            with pytest.raises(UnsupportedFormat):
                check(data, V1)


def test_no_rows() -> None:
    """A table without rows, or with an empty block, is refused."""
    with pytest.raises(DamagedBytes, match="without rows"):
        structure(hand_made([]), V1)
    rows = storage_rows(V1, 3)
    cases: tuple[list[list[Row]], ...] = ([[], rows], [rows, []], [[]])
    for blocks in cases:
        data = hand_made(blocks, index=lambda pairs: [(b"zz%d......." % at, pairs[at][1]) for at in range(len(pairs))])
        with pytest.raises(DamagedBytes, match="without rows"):
            structure(data, V1)


@pytest.mark.parametrize(
    ("start", "end", "is_inside"),
    [
        (b"", b"", True),
        (b"key000000", b"key000100", True),
        (b"key000001", b"", False),
        (b"", b"key000099", False),
        (b"key000000", b"key00009\xff", True),
        (b"key000200", b"key000300", False),
    ],
)
@pytest.mark.parametrize("version", list(ApiVersion))
def test_range(version: ApiVersion, start: bytes, end: bytes, is_inside: bool) -> None:
    """Keys outside of the range that a file is recorded for are found, whatever the form of keys."""
    codec = KeyCodec(version)
    bounds = [codec.bound(codec.rpc_key(key)) if key else b"" for key in (start, end)]
    data = write(storage_rows(version, 100))[0]
    if is_inside:
        structure(data, version, *bounds)
    else:
        with pytest.raises(DamagedBytes, match="of the range"):
            structure(data, version, *bounds)


class Recording:
    """A source that keeps the ranges that were read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        """Remember and read."""
        self.reads.append((offset, length))
        return self._data[offset : offset + length]


def test_few_bytes_are_read() -> None:
    """Of a large file the end, the first and the last block are read, in a handful of requests."""
    data, _ends = write(storage_rows(V2, 50_000, value_size=100))
    source = Recording(data)
    table = Table(source)
    check_structure(table, codec)
    assert len(source.reads) <= 3
    assert sum(length for _, length in source.reads) < 200 << 10
    assert data[tail_offset(table) :].count(b"rocksdb.num.entries") == 1


@pytest.mark.parametrize("format_version", range(2, 7))
def test_tables_of_rocksdb(tmp_path: Path, format_version: int) -> None:
    """Tables that RocksDB's own writer made for ingestion pass, and their tail starts where it says."""
    rows = storage_rows(V2, 3000)
    options = table_options(format_version=format_version, compression="zstd", two_level=format_version > 4)
    data = write_by_rocksdb(tmp_path / "table.sst", rows, options)
    table = Table(MemorySource(data))
    assert check_structure(table, codec) == (rows[0][0], rows[-1][0])
    assert table.entries == 3000
    assert names.number(table.properties, names.TAIL_START) == tail_offset(table)
    content(data, V2)


def test_every_flipped_byte_of_the_tail() -> None:
    """Each byte of index, properties and footer, changed, is found, but for padding and the global sequence number."""
    rows = storage_rows(V2, 200)
    data, _ends = write(rows)
    silent = 0
    for at in range(tail_offset(Table(MemorySource(data))), len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        try:
            structure(changed, V2)
            silent += 1
        except FormatError:
            pass
    assert silent <= 45


@pytest.mark.parametrize("checksum", ["crc32c", "xxh3"])
@pytest.mark.parametrize("format_version", [2, 5, 6])
def test_every_byte_before_the_footer_is_in_a_block(tmp_path: Path, format_version: int, checksum: str) -> None:
    """Also those of RocksDB's filter: blocks follow one another without a gap, and each flip breaks the checksum of one."""
    options = table_options(format_version=format_version, checksum=checksum, bloom_filter=True)
    data = write_by_rocksdb(tmp_path / "table.sst", storage_rows(V2, 400), options)
    table = Table(MemorySource(data))
    blocks = table.every_block()
    assert len(blocks) == len(table.index.handles) + 4  # filter, index, properties, metaindex
    bounds = [0, *(block.offset + block.size + TRAILER_SIZE for block in blocks)]
    assert [block.offset for block in blocks] == bounds[:-1]
    assert bounds[-1] == len(data) - FOOTER_SIZE
    for at in range(0, bounds[-1], 97):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        broken = Table(MemorySource(bytes(changed)))
        reader = BlockReader(MemorySource(bytes(changed)), table.footer)
        wrong = [
            block
            for run in runs(blocks)
            for block, stored in zip(run, broken.stored(run), strict=True)
            if not reader.is_sound(stored, block)
        ]
        assert len(wrong) == 1, at
        assert wrong[0].offset <= at < wrong[0].offset + wrong[0].size + TRAILER_SIZE


def test_blocks_that_overlap() -> None:
    """A name for a block amid others is refused, before anything is read there."""
    table = Table(MemorySource(hand_made([storage_rows(V2, 10)])))
    table.__dict__["metaindex"] = {**table.metaindex, "filter": BlockHandle(3, 5)}
    with pytest.raises(DamagedBytes, match="starts before the last one ends"):
        table.every_block()
