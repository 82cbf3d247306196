"""Rows that expire while they are compared."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tikv_br.backupset.compare import LiveSums, compare_rows
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import checksum
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import ScanPage

CODEC = KeyCodec(ApiVersion.V1TTL)


def page(rows: dict[bytes, bytes]) -> ScanPage:
    """Return a page of a scan."""
    return ScanPage(pa.array(rows, pa.large_binary()), pa.array(rows.values(), pa.large_binary()))


def expected(lasting: dict[bytes, bytes], passing: dict[bytes, bytes]) -> LiveSums:
    """Return what a range is to hold: rows that stay, and rows that go in the meantime."""
    sums = LiveSums(KeyRange(b"", b""), 100, 110, lasting=checksum(page(lasting).keys, page(lasting).values))
    if passing:
        row = {"expire_ts": 105, "ts": 0, "deleted": False}
        rows = [{"key": key, "value": value, **row} for key, value in passing.items()]
        sums.passing.append(pa.RecordBatch.from_pylist(rows, SCHEMA))
    return sums


@pytest.mark.parametrize(
    ("passing", "found", "equal"),
    [
        ({}, {b"a": b"1"}, True),
        ({}, {b"a": b"2"}, False),
        ({}, {b"a": b"1", b"b": b"1"}, False),
        ({b"b": b"1"}, {b"a": b"1"}, True),
        ({b"b": b"1"}, {b"a": b"1", b"b": b"1"}, True),
        ({b"b": b"1"}, {b"a": b"1", b"b": b"2"}, False),
        ({b"b": b"1"}, {b"b": b"1"}, False),
    ],
)
def test_rows_that_stay_must_be_there(passing: dict[bytes, bytes], found: dict[bytes, bytes], *, equal: bool) -> None:
    """Those that expire just now may be missing, down to none that is left to wait for; what is there must be as it was."""
    rows = page(found)
    assert compare_rows([rows], expected({b"a": b"1"}, passing), CODEC) == (checksum(rows.keys, rows.values), equal)
