from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats import by_protobuf
from tests.unit.formats.by_protobuf import Pairs
from tests.unit.formats.examples import many, pairs
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.formats.rawscan import measure, parse


def serialized(rows: Pairs) -> bytes:
    """A response with these pairs, as protobuf writes it."""
    kvs = [kvrpcpb_pb2.KvPair(key=key, value=value) for key, value in rows]
    return kvrpcpb_pb2.RawScanResponse(kvs=kvs).SerializeToString()


def parsed(data: bytes) -> Pairs | None:
    """The pairs that the kernel finds, or None."""
    page = parse(data)
    return None if page is None else list(zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True))


@many(1)
@given(pairs)
def test_pages_come_out_as_protobuf_reads_them(rows: Pairs) -> None:
    """Every well-formed page is parsed, with empty keys and values in their places."""
    assert parsed(serialized(rows)) == rows


@many(1)
@given(pairs)
def test_pages_are_measured(rows: Pairs) -> None:
    """A page says its rows, bytes, longest rows, first and last key."""
    page = measure(serialized(rows))
    assert page is not None
    lengths = [(len(key), len(value)) for key, value in rows]
    assert (page.rows, page.key_bytes, page.value_bytes) == (len(rows), *map(sum, zip(*lengths, (0, 0), strict=True)))
    assert page.longest_key == max((key for key, _ in lengths), default=0)
    assert page.longest == max(map(sum, lengths), default=0)
    assert (page.first_key, page.last_key) == ((rows[0][0], rows[-1][0]) if rows else (b"", b""))


@many(1)
@given(pairs, st.data())
def test_altered_bytes_never_read_otherwise_than_protobuf(rows: Pairs, draw: st.DataObject) -> None:
    """With some bytes of a page replaced, what is parsed at all is what protobuf parses."""
    data = serialized(rows)
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    altered = data[:start] + draw.draw(st.binary(max_size=4)) + data[min(stop, start + 4) :]
    found = parsed(altered)
    assert found is None or found == by_protobuf.pairs(altered)


@many(1)
@given(st.binary(max_size=32))
def test_any_bytes_are_read_as_protobuf_reads_them_or_not_at_all(data: bytes) -> None:
    """Bytes of tags, lengths and nonsense give what protobuf finds in them, or None."""
    likely = b"\x12\x12\x12\x1a\n\0\1\2\3\4\x80\xffa"
    likely_data = bytes(likely[byte % len(likely)] for byte in data)
    found = parsed(likely_data)
    assert found is None or found == by_protobuf.pairs(likely_data)


@pytest.mark.parametrize(
    "message",
    [
        kvrpcpb_pb2.RawScanResponse(region_error=errorpb_pb2.Error(message="moved")),
        kvrpcpb_pb2.RawScanResponse(
            region_error=errorpb_pb2.Error(not_leader=errorpb_pb2.NotLeader(region_id=1)),
            kvs=[kvrpcpb_pb2.KvPair(key=b"k")],
        ),
        kvrpcpb_pb2.RawScanResponse(kvs=[kvrpcpb_pb2.KvPair(error=kvrpcpb_pb2.KeyError(abort="no"))]),
        kvrpcpb_pb2.RawScanResponse(kvs=[kvrpcpb_pb2.KvPair(error=kvrpcpb_pb2.KeyError(abort="no"), key=b"k")]),
    ],
)
def test_errors_are_left_to_protobuf(message: kvrpcpb_pb2.RawScanResponse) -> None:
    """Region errors and errors in pairs are never mistaken for an empty page."""
    assert parse(message.SerializeToString()) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x12",  # a pair without a length
        b"\x12\x05\x12\x03ke",  # cut within a key
        b"\x12\x05\x12\x04key",  # a key that reaches beyond its pair
        b"\x12\x04\x12\x03key",  # a key one byte beyond its pair
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length of 2^63-1
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2^64-1, negative as int64
        b"\x12\x0c\x12\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01k",  # a key of 2^64-2 bytes
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # a length that does not end
        b"\x12\x05\x1a\x01v\x12\x00",  # the value before the key
        b"\x12\x06\x12\x01k\x12\x01l",  # the key twice
        b"\x12\x05\x12\x01k\x20\x01",  # an unknown field in the pair
        b"\x12\x03\x12\x01k\x18\x01",  # an unknown field in the page
        b"\x10\x01",  # the pairs as a number
    ],
)
def test_the_unexpected_is_left_to_protobuf(data: bytes) -> None:
    """Damaged, unusual and hostile bytes give None and touch no memory beyond them."""
    assert parse(data) is None


def test_pages_of_large_and_no_values() -> None:
    """A value of 1 MiB between empty ones, an empty page, and a pair of nothing at all come out whole."""
    rows = [(b"a", b""), (b"b", b"v" * (1 << 20)), (b"c", b""), (b"", b"")]
    assert parsed(serialized(rows)) == rows
    assert parsed(b"") == []
    assert parsed(b"\x12\x00") == [(b"", b"")]
