"""One row by the index: against a sorted list of what is in the table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.sst.tables import Row, hand_made, table_options, write, write_by_rocksdb
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table, first_row_from
from tikv_br.formats.sst.writer import SstOptions

KEYS = st.binary(max_size=4).map(lambda key: b"z" + key)


def expected(rows: Sequence[Row], key: bytes) -> Row | None:
    """Result of a lookup in a sorted list."""
    at = bisect_left(rows, (key, b""))
    return rows[at] if at < len(rows) else None


@given(
    st.dictionaries(KEYS, st.binary(max_size=300), min_size=1, max_size=60),
    st.lists(KEYS | st.binary(max_size=3), max_size=10),
)
def test_first_row_from_any_key(content: dict[bytes, bytes], wanted: list[bytes]) -> None:
    """For keys present, absent, below and above all: the row that a sorted list gives, over blocks of 1 KiB."""
    rows = sorted(content.items())
    data, _summary = write(rows, SstOptions(block_size=1 << 10))
    table = Table(MemorySource(data))
    for key in [*wanted, *content]:
        assert first_row_from(table, key) == expected(rows, key)


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("format_version", [2, 5])
def test_tables_of_rocksdb(tmp_path: Path, format_version: int, *, two_level: bool) -> None:
    """Index forms that we do not write ourselves lead to the same rows, and so do keys between blocks."""
    rows = [(b"z%05d" % (3 * number), b"v%d" % number * 20) for number in range(2000)]
    options = table_options(format_version=format_version, block_size=512, two_level=two_level, compression="zstd")
    table = Table(MemorySource(write_by_rocksdb(tmp_path / "table.sst", rows, options)))
    for number in range(-1, 6010, 7):
        key = b"z%05d" % max(number, 0)
        assert first_row_from(table, key) == expected(rows, key)


class Counting(MemorySource, frozen=True):
    """Counts the bytes that are read."""

    read: ClassVar[int] = 0

    def read_at(self, offset: int, length: int) -> memoryview:
        """Count and read."""
        Counting.read += length
        return super().read_at(offset, length)


def test_only_the_tail_and_a_block_are_read() -> None:
    """A lookup in a table of 8 MiB reads less than two percent of it."""
    rows = [(b"z%06d" % number, bytes([number % 251]) * 1000) for number in range(8000)]
    data, _summary = write(rows, SstOptions(block_size=16 << 10, compression=Compression.NONE))
    Counting.read = 0
    found = first_row_from(Table(Counting(data)), b"z004000")
    assert found == rows[4000]
    assert Counting.read < len(data) // 50


def test_gap_between_last_key_and_separator() -> None:
    """A key above a block's last row but not above its separator is looked for in the next block too."""
    table = Table(MemorySource(hand_made([[(b"za", b"1"), (b"zb", b"2")], [(b"zx", b"3")]], index=_raised)))
    assert first_row_from(table, b"zc") == (b"zx", b"3")
    assert first_row_from(table, b"zb") == (b"zb", b"2")
    assert first_row_from(table, b"zy") is None


def test_row_that_is_no_put_is_refused() -> None:
    """A deletion is not shown as a value."""
    deletion = bytes(8)
    table = Table(MemorySource(hand_made([[(b"za", b"")]], trailer=deletion)))
    with pytest.raises(UnsupportedFormat, match="type 0"):
        first_row_from(table, b"za")


def test_damaged_block_is_noticed() -> None:
    """The checksum of the one block that is read counts."""
    data = bytearray(write([(b"z%04d" % number, bytes(100)) for number in range(100)])[0])
    data[20] ^= 1
    with pytest.raises(DamagedBytes):
        first_row_from(Table(MemorySource(bytes(data))), b"z0000")


def test_key_without_sequence_number_is_damage() -> None:
    """A block whose rows are too short to be rows."""
    table = Table(MemorySource(hand_made([[(b"z", b"")]], trailer=b"\1", index=_lengthened)))
    with pytest.raises(DamagedBytes, match="without sequence number"):
        first_row_from(table, b"z")


def _raised(pairs: list[Row]) -> list[Row]:
    return [(b"zm" + pairs[0][0][2:], pairs[0][1]), *pairs[1:]]


def _lengthened(pairs: list[Row]) -> list[Row]:
    return [(key + bytes(8), value) for key, value in pairs]
