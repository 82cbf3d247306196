from __future__ import annotations

import pytest
from fastcrc import crc64
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.examples import many, pairs
from tikv_br.formats import columns
from tikv_br.formats.checksum import Checksum, checksum, checksums
from tikv_br.formats.errors import FormatError

Pairs = list[tuple[bytes, bytes]]
prefixes = st.sampled_from([b"", b"r\0\0\0", b"r\0\x10\x92"])


def row_by_row(rows: Pairs, prefix: bytes = b"") -> Checksum:
    """The checksum as it is defined, with one CRC a row, by fastcrc."""
    total = Checksum()
    for key, value in rows:
        row = prefix + key + value
        total += Checksum(crc64.xz(row), 1, len(row))
    return total


def at_once(rows: Pairs, prefix: bytes = b"") -> Checksum:
    """The checksum of the rows as slices of larger columns."""
    padded = [(b"before", b"x"), *rows, (b"after", b"y")]
    key_column, value_column = (columns.from_list([row[column] for row in padded]) for column in range(2))
    return checksum(key_column.slice(1, len(rows)), value_column.slice(1, len(rows)), prefix)


def test_the_check_value_of_crc_64_xz() -> None:
    """The catalogue's check value for "123456789" comes out, wherever the row is cut into prefix, key and value."""
    for cut in range(10):
        for other in range(cut, 10):
            text = b"123456789"
            row = at_once([(text[cut:other], text[other:])], text[:cut])
            assert row == Checksum(0x995D_C9BB_DF19_39FA, 1, 9)


@many(1)
@given(pairs, prefixes)
def test_one_crc_equals_a_crc_for_each_row(rows: Pairs, prefix: bytes) -> None:
    """The CRC of the folded rows is the XOR of the CRCs of all rows, for rows of any mixture of lengths."""
    assert at_once(rows, prefix) == row_by_row(rows, prefix)


@many(1)
@given(pairs, st.lists(st.binary(max_size=9), max_size=4))
def test_several_prefixes_at_once(rows: Pairs, several: list[bytes]) -> None:
    """Each prefix has the checksum that it would have alone."""
    key_column, value_column = (columns.from_list([row[column] for row in rows]) for column in range(2))
    assert checksums(key_column, value_column, several) == tuple(row_by_row(rows, prefix) for prefix in several)


@many(1)
@given(st.lists(st.integers(0, 40), max_size=40), st.binary(min_size=40, max_size=40))
def test_many_rows_of_few_lengths(sizes: list[int], data: bytes) -> None:
    """Even and odd numbers of rows of a length, shorter and longer than the register, all come out right."""
    rows = [(data[:size], data[size // 2 : size]) for size in sizes]
    assert at_once(rows) == row_by_row(rows)


@many(1)
@given(pairs)
def test_parts_add_up(rows: Pairs) -> None:
    """Checksums of parts merge to that of the whole, in any order."""
    one, other = rows[::2], rows[1::2]
    whole = at_once(rows)
    assert at_once(one).merge(at_once(other)) == whole
    assert at_once(other) + at_once(one) == whole


def test_rows_of_a_mebibyte() -> None:
    """Large values beside small ones, as in a backup, equal the CRCs row by row."""
    rows = [
        (b"k%d" % size, bytes(range(256)) * (size // 256) + b"!" * (size % 256)) for size in (1 << 20, 0, 100_001, 7)
    ]
    assert at_once(rows, b"r\0\0\1") == row_by_row(rows, b"r\0\0\1")


def test_columns_of_unequal_length_are_refused() -> None:
    """A key without a value is an error of the caller, not a read beyond the column."""
    with pytest.raises(FormatError, match="2 keys with 1 values"):
        checksum(columns.from_list([b"a", b"b"]), columns.from_list([b""]))
