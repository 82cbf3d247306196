"""Conversion of pages: storage rows, ranges and both sides' checksums, against one-key-at-a-time references."""

from __future__ import annotations

import functools
import operator

import fastcrc
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tikv_br.backupset.files import Expiry
from tikv_br.dataflow.convert import Converter, join_expiry
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec, encode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import ScanPage
from tikv_br.formats.rows import to_storage

V1, V1TTL = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V1TTL)
TS = 470_615_668_780_695_553

Rows = dict[bytes, tuple[bytes, int]]
row_maps: st.SearchStrategy[Rows] = st.dictionaries(
    st.binary(max_size=20), st.tuples(st.binary(max_size=20), st.sampled_from([0, 1, 1_900_000_000])), min_size=1
)


def page_of(rows: Rows, codec: KeyCodec) -> tuple[ScanPage, columns.Numbers]:
    """Return the rows as a store answers, and their expiries."""
    keys = sorted(rows)
    page = ScanPage(
        columns.from_list([codec.prefix + key for key in keys]), columns.from_list([rows[key][0] for key in keys])
    )
    return page, np.array([rows[key][1] for key in keys], np.uint64)


def crc(rows: list[bytes]) -> int:
    """Return the XOR of the rows' CRCs, one at a time."""
    return functools.reduce(operator.xor, (fastcrc.crc64.xz(row) for row in rows), 0)


def stored(codec: KeyCodec, key: bytes, value: bytes, expire: int) -> tuple[bytes, bytes]:
    """Return one row as the documentation of the stores says it is held."""
    match codec.api_version:
        case ApiVersion.V1:
            return b"z" + key, value
        case ApiVersion.V1TTL:
            return b"z" + key, value + expire.to_bytes(8, "big")
        case ApiVersion.V2:
            tail = expire.to_bytes(8, "big") + b"\x01" if expire else b"\x00"
            return b"z" + encode(codec.prefix + key) + (2**64 - 1 - TS).to_bytes(8, "big"), value + tail


@given(
    row_maps,
    st.sampled_from(
        [(V1, V1), (V1, V1TTL), (V1, KeyCodec(ApiVersion.V2)), (V1TTL, V1TTL), (V1TTL, KeyCodec(ApiVersion.V2, 9))]
        + [(KeyCodec(ApiVersion.V2, keyspace), KeyCodec(ApiVersion.V2, keyspace)) for keyspace in (0, 4242, 0xFFFFFF)]
    ),
)
def test_pages_convert_to_rows_and_checksums(rows: Rows, codecs: tuple[KeyCodec, KeyCodec]) -> None:
    """Each row equals its reference, and each side's checksum covers its own form of the key."""
    source, target = codecs
    if not source.api_version.has_ttl:
        rows = {key: (value, 0) for key, (value, _) in rows.items()}
    page, expire_ts = page_of(rows, source)
    done = Converter(source, target, TS).convert_page(page, expire_ts)
    ordered = [(key, *rows[key]) for key in sorted(rows)]
    assert to_storage(done.records, target).to_pydict() == {
        "key": [stored(target, *row)[0] for row in ordered],
        "value": [stored(target, *row)[1] for row in ordered],
    }
    assert done.first_key == target.prefix + ordered[0][0]
    for codec, sums in ((source, done.source), (target, done.target)):
        bare = [codec.prefix + key + value for key, value, _ in ordered]
        assert (sums.crc64xor, sums.total_kvs, sums.total_bytes) == (crc(bare), len(bare), sum(map(len, bare)))
    expiring = [(target.prefix + key + value, expire) for key, value, expire in ordered if expire]
    assert done.expiry.total_kvs == len(expiring)
    assert done.expiry.crc64xor == crc([row for row, _ in expiring])
    assert done.expiry.total_bytes == sum(len(row) for row, _ in expiring)
    assert done.expiry.earliest == min((expire for _, expire in expiring), default=0)
    assert done.expiry.latest == max((expire for _, expire in expiring), default=0)


@pytest.mark.parametrize(
    ("source", "target", "interval", "expected"),
    [
        (V1, V1, (b"", b""), (b"", b"")),
        (V1, KeyCodec(ApiVersion.V2), (b"", b""), (b"r\0\0\0", b"r\0\0\1")),
        (V1, KeyCodec(ApiVersion.V2), (b"a", b"b"), (b"r\0\0\0a", b"r\0\0\0b")),
        (KeyCodec(ApiVersion.V2, 5), KeyCodec(ApiVersion.V2, 5), (b"r\0\0\5", b"r\0\0\6"), (b"r\0\0\5", b"r\0\0\6")),
        (
            KeyCodec(ApiVersion.V2, 5),
            KeyCodec(ApiVersion.V2, 5),
            (b"r\0\0\5a", b"r\0\0\5b"),
            (b"r\0\0\5a", b"r\0\0\5b"),
        ),
        (KeyCodec(ApiVersion.V2, 0xFFFFFF),) * 2 + ((b"r\xff\xff\xffa", b"s"),) * 2,
    ],
)
def test_ranges_convert_with_their_bounds(
    source: KeyCodec, target: KeyCodec, interval: tuple[bytes, bytes], expected: tuple[bytes, bytes]
) -> None:
    """No bound of a V1 range is the keyspace's bound in V2, also that of the last keyspace, whose end is special."""
    assert Converter(source, target, 1).target_range(KeyRange(*interval)) == KeyRange(*expected)


def test_keys_of_another_keyspace_are_refused() -> None:
    """A server that answers beyond the range asked for must not put its rows under our prefix."""
    codec = KeyCodec(ApiVersion.V2, 1)
    page, _ = page_of({b"k": (b"v", 0)}, KeyCodec(ApiVersion.V2, 2))
    with pytest.raises(DamagedBytes, match="keyspace 1"):
        Converter(codec, codec, TS).convert_page(page)


def test_an_expiry_is_lost_only_where_that_is_allowed() -> None:
    """Should the checks before ever let it pass, the conversion does not; where it may be lost, it is counted."""
    page, expire_ts = page_of({b"j": (b"u", 0), b"k": (b"v", 77), b"l": (b"w", 78)}, V1TTL)
    with pytest.raises(UnsupportedFormat, match="2 rows"):
        Converter(V1TTL, V1, 0).convert_page(page, expire_ts)
    done = Converter(V1TTL, V1, 0, drop_ttl=True).convert_page(page, expire_ts)
    assert done.dropped_ttls == 2
    assert done.expiry == Expiry()
    assert done.records["expire_ts"].to_pylist() == [0, 0, 0]


@pytest.mark.parametrize(("target", "expected"), [(KeyCodec(ApiVersion.V2, 3), [5, TS, 7]), (V1TTL, [0, 0, 0])])
def test_rows_keep_their_own_timestamp(target: KeyCodec, expected: list[int]) -> None:
    """Only a row without one gets the converter's; where the target has none, none is left."""
    rows = columns.records(
        columns.from_list([b"a", b"b", b"c"]), columns.from_list([b""] * 3), ts=np.array([5, 0, 7], np.uint64)
    )
    done = Converter(KeyCodec(ApiVersion.V2, 3), target, TS).convert(rows)
    assert done.records["ts"].to_pylist() == expected
    assert done.timestamps == (min(expected), max(expected))


def test_expiries_join() -> None:
    """Sums add up, the span widens, and nothing joined with something changes nothing."""
    one, other = Expiry(2, 20, 0b0110, 50, 90), Expiry(1, 5, 0b0101, 30, 60)
    assert join_expiry(one, other) == Expiry(3, 25, 0b0011, 30, 90)
    assert join_expiry(one, Expiry()) == join_expiry(Expiry(), one) == one
    assert join_expiry(Expiry(), Expiry()) == Expiry()
