from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats.examples import pairs
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.puts import Deletes, Puts
from tikv_br.formats import columns
from tikv_br.formats.errors import FormatError

CONTEXT = kvrpcpb_pb2.Context(region_id=7, api_version=kvrpcpb_pb2.V2)
prefixes = st.sampled_from([b"", b"r\0\0\0"])
seconds = st.one_of(st.integers(0, 300), st.integers(0, (1 << 64) - 1))


@given(pairs, prefixes, st.data())
def test_puts_are_what_protobuf_writes(rows: list[tuple[bytes, bytes]], prefix: bytes, draw: st.DataObject) -> None:
    """Any part of any rows, with TTLs or without, is byte for byte the request that protobuf serializes."""
    first, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    part = rows[first:stop]
    ttls = draw.draw(st.one_of(st.none(), st.lists(seconds, min_size=len(part), max_size=len(part))))
    keys, values = (columns.from_list([row[at] for row in rows]) for at in (0, 1))
    request = kvrpcpb_pb2.RawBatchPutRequest(
        context=CONTEXT, pairs=[kvrpcpb_pb2.KvPair(key=prefix + key, value=value) for key, value in part], ttls=ttls
    )
    head = kvrpcpb_pb2.RawBatchPutRequest(context=CONTEXT).SerializeToString()
    numbers = None if ttls is None else np.array(ttls, np.uint64)
    written = head + Puts(prefix, keys, values).fields(first, stop, numbers)
    assert written == request.SerializeToString()


@given(pairs, prefixes, st.data())
def test_rows_can_be_left_out(rows: list[tuple[bytes, bytes]], prefix: bytes, draw: st.DataObject) -> None:
    """Flagged rows, none, some or all of them, are not in the request; the others are as protobuf writes them."""
    first, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    skip = draw.draw(st.lists(st.booleans(), min_size=stop - first, max_size=stop - first))
    kept = [row for row, skipped in zip(rows[first:stop], skip, strict=True) if not skipped]
    keys, values = (columns.from_list([row[at] for row in rows]) for at in (0, 1))
    request = kvrpcpb_pb2.RawBatchPutRequest(
        pairs=[kvrpcpb_pb2.KvPair(key=prefix + key, value=value) for key, value in kept], ttls=range(len(kept))
    )
    ttls = np.arange(len(kept), dtype=np.uint64)
    written = Puts(prefix, keys, values).fields(first, stop, ttls, np.array(skip, np.bool_))
    assert written == request.SerializeToString()


@given(st.lists(st.binary(max_size=300)), prefixes, st.data())
def test_deletes_are_what_protobuf_writes(rows: list[bytes], prefix: bytes, draw: st.DataObject) -> None:
    """Any part of any keys, an empty one too, is byte for byte the request that protobuf serializes."""
    first, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    request = kvrpcpb_pb2.RawBatchDeleteRequest(context=CONTEXT, keys=[prefix + key for key in rows[first:stop]])
    head = kvrpcpb_pb2.RawBatchDeleteRequest(context=CONTEXT).SerializeToString()
    deletes = Deletes(prefix, columns.from_list(rows))
    assert head + deletes.fields(first, stop) == request.SerializeToString()
    assert deletes.sizes.tolist() == [len(prefix) + len(key) for key in rows]


def test_long_lengths_and_slices() -> None:
    """Lengths of one to three bytes, in columns that are slices of longer ones."""
    rows = [(b"k" * size, b"v" * (size * 130)) for size in (0, 1, 127, 128, 200, 16_384)]
    keys, values = (columns.from_list([b"before", *(row[at] for row in rows), b"after"])[1:-1] for at in (0, 1))
    request = kvrpcpb_pb2.RawBatchPutRequest(pairs=[kvrpcpb_pb2.KvPair(key=key, value=value) for key, value in rows])
    puts = Puts(b"", keys, values)
    assert puts.fields(0, len(rows)) == request.SerializeToString()
    assert puts.sizes.tolist() == [len(key) + len(value) for key, value in rows]


def test_columns_of_different_lengths_are_refused() -> None:
    """A key without a value never reaches a kernel."""
    with pytest.raises(FormatError, match="2 keys with 1 values"):
        Puts(b"", columns.from_list([b"a", b"b"]), columns.from_list([b"1"]))
