"""The kernel that checks every row against the plain rules for one row."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.sst.tables import Row, hand_made, storage_rows, write
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.sst.check import check_key
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.row_check import check_rows
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.values import decode_value

V2 = ApiVersion.V2


def is_right(row: Row, version: ApiVersion) -> bool:
    """Whether a row is one of this version, by the rules for single keys and values."""
    try:
        check_key(row[0], KeyCodec(version))
        decode_value(version, row[1])
    except DamagedBytes:
        return False
    return True


def passes(rows: list[Row], version: ApiVersion) -> bool:
    """Whether a table of these rows passes."""
    try:
        check_rows(SstReader(MemorySource(hand_made([rows]))), version)
    except DamagedBytes:
        return False
    return True


def flipped(data: bytes, at: int, mask: int) -> bytes:
    """The bytes with one changed."""
    at %= len(data)
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


right_keys = st.builds(
    lambda user, ts: DATA_PREFIX + KeyCodec(V2).storage_key(b"r\0\0\7" + user, ts),
    st.binary(max_size=30),
    st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**64 - 1]),
)
damaged_keys = st.builds(flipped, right_keys, st.integers(0, 99), st.sampled_from([1, 0x80, 0xFF, 8]))
cut_keys = st.builds(lambda key, size: key[:size], right_keys, st.integers(1, 40))
any_keys = right_keys | damaged_keys | cut_keys | st.binary(min_size=1, max_size=40).map(lambda key: b"z" + key)
any_values = st.binary(max_size=20) | st.builds(
    lambda value, flags: value + bytes([flags]), st.binary(max_size=12) | st.just(bytes(8)), st.integers(0, 5)
)


@given(any_keys, any_values, st.sampled_from(ApiVersion))
def test_agrees_with_single_rows(key: bytes, value: bytes, version: ApiVersion) -> None:
    """A table of one row passes exactly if the row does."""
    assert passes([(key, value)], version) == is_right((key, value), version)


@given(
    st.lists(st.binary(max_size=20) | st.sampled_from([b"same start %d" % n for n in range(9)]), min_size=1, max_size=6)
)
def test_agrees_about_order(keys: list[bytes]) -> None:
    """Rows pass exactly when their keys ascend strictly."""
    rows = [(b"z" + key, b"") for key in keys]
    assert passes(rows, ApiVersion.V1) == all(left < right for left, right in itertools.pairwise(keys))


@pytest.mark.parametrize("at", [0, 1, 64_999, 65_000, 199_999])
def test_batches_are_joined(at: int) -> None:
    """Order is checked across batches and blocks, and the error names the two keys."""
    rows = storage_rows(ApiVersion.V1, 200_000)
    data = write(rows)[0]
    check_rows(SstReader(MemorySource(data)), ApiVersion.V1)
    again = [*rows[: at + 1], *rows[at:]]
    blocks = [again[start : start + 1000] for start in range(0, len(again), 1000)]
    with pytest.raises(DamagedBytes, match=f"{rows[at][0].hex()} does not sort after {rows[at][0].hex()}"):
        check_rows(SstReader(MemorySource(hand_made(blocks, index=lambda pairs: pairs))), ApiVersion.V1)
