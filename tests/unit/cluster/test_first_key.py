"""The first key of many regions: found as one after the other would find it, with many asked at once and few in vain."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from tests.unit.cluster.fakes import KV, PD, FakeCluster, region, region_error, with_leader
from tikv_br.cluster.cluster import THREADS, WINDOW, Cluster, first_rpc_key
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.errors import ClusterUnfit, RequestRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

REGIONS = 200
CODEC = KeyCodec(ApiVersion.V2)
WHOLE = CODEC.rpc_range()


class Stores:
    """A store with keys that counts concurrent requests, and makes all wait until several have come."""

    def __init__(self, fake: FakeCluster, keys: list[bytes]) -> None:
        self._server = fake.stores[1]
        self._keys = [CODEC.rpc_key(key) for key in keys]
        self.four = threading.Event()
        """Set when four were under way at once."""
        self._arrived = itertools.count(1)
        self._server.script(KV + "RawScan", self._scan)

    def _scan(self, data: bytes) -> kvrpcpb_pb2.RawScanResponse:
        if next(self._arrived) == 4:
            self.four.set()
        assert self.four.wait(60)
        request = kvrpcpb_pb2.RawScanRequest.FromString(data)
        found = [key for key in self._keys if request.start_key <= key < request.end_key]
        return kvrpcpb_pb2.RawScanResponse(kvs=[kvrpcpb_pb2.KvPair(key=key) for key in found[:1]])

    def asked(self) -> int:
        """Requests so far."""
        return len(self._server.requests[KV + "RawScan"])


def key(number: int) -> bytes:
    """The first key of a region, but of the first one."""
    return b"%04d" % number


@pytest.fixture
def cluster(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of API V2 with many regions, the outer ones reaching beyond the keyspace; PD lists seven per page."""
    monkeypatch.setattr("tikv_br.cluster.pd.SCAN_PAGE", 7)
    bounds = [b"", *(CODEC.bound(CODEC.rpc_key(key(number))) for number in range(1, REGIONS)), b""]
    fake.regions = [with_leader(region(at + 1, bounds[at], bounds[at + 1])) for at in range(REGIONS)]
    with Cluster.connect(fake.config()) as found:
        monkeypatch.setitem(found.__dict__, "api_version", ApiVersion.V2)
        yield found


def test_an_empty_range_costs_a_request_a_region(fake: FakeCluster, cluster: Cluster) -> None:
    """Each region is asked once, several at once, and PD by pages, never for a single region."""
    stores = Stores(fake, [])
    assert first_rpc_key(cluster, 0, WHOLE) is None
    assert (stores.asked(), stores.four.is_set()) == (REGIONS, True)
    assert not fake.pd.requests[PD + "GetRegion"]
    assert len(fake.pd.requests[PD + "ScanRegions"]) <= REGIONS // 7 + 1


def test_it_ends_at_the_first_key(fake: FakeCluster, cluster: Cluster) -> None:
    """The smallest of several keys is found, whichever region answers first, and few later regions are asked."""
    stores = Stores(fake, [key(50) + b"x", key(51), key(55), key(150)])
    assert first_rpc_key(cluster, 0, WHOLE) == CODEC.rpc_key(key(50) + b"x")
    assert 51 <= stores.asked() <= 50 + WINDOW
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("first-key")]


def test_a_part_of_the_keys(fake: FakeCluster, cluster: Cluster) -> None:
    """Neither the key before the range nor the one at its end counts, and no region outside is asked."""
    stores = Stores(fake, [key(20), key(40) + b"b"])
    assert first_rpc_key(cluster, 0, CODEC.rpc_range(KeyRange(key(20) + b"\0", key(40) + b"b"))) is None
    assert stores.asked() == 21


def test_a_region_that_has_split_since(fake: FakeCluster, cluster: Cluster) -> None:
    """PD's regions only divide the range: one that has split since is asked in two parts."""
    Stores(fake, [key(7) + b"z"])
    middle = CODEC.bound(CODEC.rpc_key(key(7) + b"m"))
    old = fake.regions[7].region
    halves = [region(8, old.start_key, middle, version=2), region(900, middle, old.end_key, version=2)]
    stale = region_error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=halves))
    answer = fake.stores[1]._scripts[KV + "RawScan"][0]
    assert callable(answer)

    def scan(data: bytes) -> kvrpcpb_pb2.RawScanResponse:
        request = kvrpcpb_pb2.RawScanRequest.FromString(data)
        if request.context.region_id == old.id and request.context.region_epoch.version == 1:
            return kvrpcpb_pb2.RawScanResponse(region_error=stale)
        found: kvrpcpb_pb2.RawScanResponse = answer(data)  # type: ignore[assignment]
        return found

    fake.stores[1].script(KV + "RawScan", scan)
    assert first_rpc_key(cluster, 0, WHOLE) == CODEC.rpc_key(key(7) + b"z")


def test_a_refusal_ends_it(fake: FakeCluster, cluster: Cluster) -> None:
    """The error of one region is raised, and the others are not asked."""
    refused = kvrpcpb_pb2.RawScanResponse(kvs=[kvrpcpb_pb2.KvPair(error=kvrpcpb_pb2.KeyError(abort="no"))])
    fake.stores[1].script(KV + "RawScan", refused)
    with pytest.raises(RequestRefused):
        first_rpc_key(cluster, 0, WHOLE)
    assert len(fake.stores[1].requests[KV + "RawScan"]) <= WINDOW + THREADS


def test_a_bound_that_is_no_key(fake: FakeCluster, cluster: Cluster) -> None:
    """It is nothing to cut at, and said to be wrong when its region is asked."""
    bound = CODEC.prefix + b"no key"
    fake.regions = [with_leader(region(1, b"", bound)), with_leader(region(2, bound, b""))]
    with pytest.raises(ClusterUnfit, match=bound.hex()):
        first_rpc_key(cluster, 0, WHOLE)
