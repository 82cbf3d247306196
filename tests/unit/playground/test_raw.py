"""Twin of the RawKV part of tikv_br/playground/tikv_service.py, as far as recordings do not cover them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.playground.region import Peer, Region
from tikv_br.playground.tikv_service import entry_size, serialize_rows

SIZES = st.sampled_from([0, 1, 127, 128, 16383, 16384, 70000])
ROWS = st.lists(st.tuples(st.binary(max_size=8), st.one_of(st.binary(max_size=8), SIZES.map(bytes))), max_size=5)
MIB = 1 << 20


@given(rows=ROWS, key_only=st.booleans())
def test_bytes_by_hand_are_protobufs(rows: list[tuple[bytes, bytes]], key_only: bool) -> None:
    """Serialized rows are byte for byte what protobuf makes of the same message, whatever the lengths."""
    pairs = [kv.KvPair(key=key, value=b"" if key_only else value) for key, value in rows]
    assert serialize_rows(rows, key_only=key_only) == kv.RawScanResponse(kvs=pairs).SerializeToString()


@pytest.mark.parametrize(
    ("key", "value", "flagged", "recorded"),
    [
        (b"zk0004big", bytes(9 * MIB), False, 9437227),
        (b"zk0004big", bytes(9 * MIB + 8), False, 9437235),
        (b"z" + bytes(18 + 8), bytes(9 * MIB + 1), True, 9437248),
    ],
)
def test_entry_sizes_as_recorded(key: bytes, value: bytes, flagged: bool, recorded: int) -> None:
    """A put of 9 MiB makes Raft entries of the sizes that V1, V1TTL and V2 stores reported for it."""
    region = Region(16, b"", b"", 1, 8, (Peer(17, 1),), 1)
    assert entry_size(region, [(key, value)], flagged=flagged) == recorded


def test_an_entrys_size_grows_with_its_rows() -> None:
    """Every row of a batch counts, deletes too."""
    region = Region(16, b"", b"", 1, 8, (Peer(17, 1),), 1)
    empty = entry_size(region, [], flagged=False)
    one = entry_size(region, [(b"zk", b"v")], flagged=False) - empty
    assert entry_size(region, [(b"zk", b"v")] * 5, flagged=False) == empty + 5 * one
    assert entry_size(region, [], [b"zk"], flagged=False) == empty + one - 3
