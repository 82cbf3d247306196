"""Requests to each store."""

from __future__ import annotations

import pytest

from tests.unit.dataflow.samples import options
from tikv_br.backup.store import RawRequests, StoreRange, store_ranges
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.regions import Peer, Region
from tikv_br.cluster.store import check_backup
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.write import BackupJob
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.sst.compression import Compression

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


def region(start: bytes, end: bytes, store_id: int) -> Region:
    """Return a region with physical bounds that a store leads."""
    peer = Peer(10 + store_id, store_id)
    return Region(1, start, end, 1, 1, peer, (peer,))


def test_one_span_a_store_from_its_first_to_its_last_region() -> None:
    """The span is clipped to the gap; regions of other stores may lie in it."""
    regions = [region(b"", b"c", 1), region(b"c", b"f", 2), region(b"f", b"k", 1), region(b"k", b"", 3)]
    assert store_ranges(KeyRange(b"b", b"m"), regions, KeyCodec(V1)) == [
        StoreRange(1, KeyRange(b"b", b"k")),
        StoreRange(2, KeyRange(b"c", b"f")),
        StoreRange(3, KeyRange(b"k", b"m")),
    ]


def test_the_whole_of_v1_has_no_ends() -> None:
    """Empty keys stay empty: they are no keys."""
    regions = [region(b"", b"c", 1), region(b"c", b"", 2)]
    assert store_ranges(KeyRange(b"", b""), regions, KeyCodec(V1)) == [
        StoreRange(1, KeyRange(b"", b"c")),
        StoreRange(2, KeyRange(b"c", b"")),
    ]


def test_bounds_of_v2_are_taken_out_of_their_groups() -> None:
    """Requests carry RPC keys, also where PD was made to split at what is none."""
    cut = codec.encode(b"r\0\0\0m")
    gap = KeyRange(b"r\0\0\0", b"r\0\0\1")
    regions = [region(b"", cut, 1), region(cut, b"\x99", 2), region(b"\x99", b"", 3)]
    assert store_ranges(gap, regions, KeyCodec(V2))[:2] == [
        StoreRange(1, KeyRange(b"r\0\0\0", b"r\0\0\0m")),
        StoreRange(2, KeyRange(b"r\0\0\0m", b"r\0\0\1")),
    ]


def test_a_region_between_the_versions_of_one_key_is_no_range() -> None:
    """Start and end are the same RPC key: such a request would kill the store."""
    key = codec.encode(b"r\0\0\0m")
    regions = [region(key + bytes(8), key + b"\xff" * 8, 1)]
    assert store_ranges(KeyRange(b"r\0\0\0", b"r\0\0\1"), regions, KeyCodec(V2)) == []


@pytest.mark.parametrize(
    ("compression", "wire"),
    [(Compression.ZSTD, brpb_pb2.ZSTD), (Compression.LZ4, brpb_pb2.LZ4), (Compression.SNAPPY, brpb_pb2.SNAPPY)],
)
@pytest.mark.parametrize(
    ("target", "version"), [(V1, kvrpcpb_pb2.V1), (V1TTL, kvrpcpb_pb2.V1TTL), (V2, kvrpcpb_pb2.V2)]
)
def test_a_request_says_all_that_a_store_must_know(
    compression: Compression, wire: int, target: ApiVersion, version: int
) -> None:
    """Version, compression, level and column family are set; the guard lets it pass."""
    wanted = options(compression=compression, compression_level=3, concurrency=4)
    job = BackupJob("run", wanted, Conversion(target, target))
    message = RawRequests(job, 7, KeyCodec(target)).message(KeyRange(b"a", b"b"))
    check_backup(message)
    assert (message.start_key, message.end_key, message.cluster_id) == (b"a", b"b", 7)
    assert (message.dst_api_version, message.compression_type, message.compression_level) == (version, wire, 3)
    assert (message.is_raw_kv, message.cf, message.concurrency) == (True, "default", 4)
