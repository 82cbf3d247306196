"""Splits at given keys, and scattering."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import PD, FakeCluster, header_error, region, with_leader
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.split import SPLIT_KEYS, scatter, split_at
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec

SPLIT = "/tikvpb.Tikv/SplitRegion"


class Splitter:
    """A store that splits as TiKV does: raw keys in, the original id stays rightmost."""

    def __init__(self, fake: FakeCluster, codec: KeyCodec) -> None:
        self.fake = fake
        self.codec = codec
        self.ids = itertools.count(100)
        self.lock = threading.Lock()

    def __call__(self, data: bytes) -> kvrpcpb_pb2.SplitRegionResponse:
        """Answer one SplitRegion; several may come at once."""
        with self.lock:
            return self.answer(data)

    def answer(self, data: bytes) -> kvrpcpb_pb2.SplitRegionResponse:
        """Split, or return the region's error."""
        request = kvrpcpb_pb2.SplitRegionRequest.FromString(data)
        assert request.is_raw_kv
        old = next(each.region for each in self.fake.regions if each.region.id == request.context.region_id)
        if request.context.region_epoch != old.region_epoch:
            mismatch = errorpb_pb2.EpochNotMatch(current_regions=[each.region for each in self.fake.regions])
            return kvrpcpb_pb2.SplitRegionResponse(region_error=errorpb_pb2.Error(epoch_not_match=mismatch))
        bounds = [self.codec.bound(key) for key in request.split_keys]
        assert all(old.start_key < bound and (not old.end_key or bound < old.end_key) for bound in bounds)
        pieces = self.cut(old, bounds)
        rest = [each for each in self.fake.regions if each.region.id != old.id]
        self.fake.regions = sorted([*rest, *map(with_leader, pieces)], key=lambda each: each.region.start_key)
        return kvrpcpb_pb2.SplitRegionResponse(regions=pieces)

    def cut(self, old: metapb_pb2.Region, bounds: list[bytes]) -> list[metapb_pb2.Region]:
        """The pieces of a region."""
        version = old.region_epoch.version + len(bounds)
        pairs = list(itertools.pairwise([old.start_key, *bounds, old.end_key]))
        ids = [next(self.ids) for _ in pairs[1:]] + [old.id]
        return [region(each, start, end, version=version) for each, (start, end) in zip(ids, pairs, strict=True)]


@pytest.mark.parametrize("version", [ApiVersion.V1, ApiVersion.V2])
def test_each_key_begins_a_region_afterwards(fake: FakeCluster, version: ApiVersion) -> None:
    """More keys than a request takes, some of them doubled and some already bounds, over two regions."""
    codec = KeyCodec(version)
    middle = codec.bound(codec.rpc_key(b"k0500"))
    fake.regions = [with_leader(region(1, b"", middle)), with_leader(region(2, middle, b""))]
    fake.kv("SplitRegion", Splitter(fake, codec))
    keys = [codec.rpc_key(b"k%04d" % at) for at in range(3 * SPLIT_KEYS)]
    cluster = Cluster.connect(fake.config())
    made = split_at(cluster, codec, [*keys, *keys[:10]])
    starts = {each.region.start_key for each in fake.regions}
    assert {codec.bound(key) for key in keys} <= starts
    assert {piece.start for piece in made} == starts
    requests = fake.stores[1].seen(SPLIT, kvrpcpb_pb2.SplitRegionRequest)
    assert all(len(request.split_keys) <= SPLIT_KEYS for request in requests)
    assert all(codec.bound(key) != middle for request in requests for key in request.split_keys)


def test_keys_that_are_bounds_already_cost_nothing(fake: FakeCluster) -> None:
    """A second run finds all done."""
    fake.regions = [with_leader(region(1, b"", b"m")), with_leader(region(2, b"m", b""))]
    assert split_at(Cluster.connect(fake.config()), KeyCodec(ApiVersion.V1), [b"m", b""]) == []
    assert not fake.stores[1].requests


def test_another_who_was_faster_is_fine(fake: FakeCluster) -> None:
    """A store that finds nothing left to split reports it as text; that is success."""
    words = "Coprocessor [split_observer.rs:153]: no valid key found for split."
    fake.kv("SplitRegion", kvrpcpb_pb2.SplitRegionResponse(region_error=errorpb_pb2.Error(message=words)))
    assert split_at(Cluster.connect(fake.config()), KeyCodec(ApiVersion.V1), [b"m"]) == []


def test_regions_that_moved_on_are_split_as_they_are(fake: FakeCluster) -> None:
    """A stale epoch brings the current regions; each key goes into its own."""
    codec = KeyCodec(ApiVersion.V1)
    cluster = Cluster.connect(fake.config())
    fake.pd.script(PD + "ScanRegions", pdpb_pb2.ScanRegionsResponse(regions=fake.regions))
    fake.regions = [with_leader(region(7, b"", b"g", version=2)), with_leader(region(1, b"g", b"", version=2))]
    fake.kv("SplitRegion", Splitter(fake, codec))
    split_at(cluster, codec, [b"c", b"m"])
    assert [each.region.start_key for each in fake.regions] == [b"", b"c", b"g", b"m"]


def operators(*states: int | None) -> Callable[[bytes], pdpb_pb2.GetOperatorResponse]:
    """PD's answers about a scatter, in order; None is no operator."""
    script = list(states)

    def answer(_: bytes) -> pdpb_pb2.GetOperatorResponse:
        state = script.pop(0) if len(script) > 1 else script[0]
        if state is None:
            return pdpb_pb2.GetOperatorResponse(header=header_error(pdpb_pb2.REGION_NOT_FOUND))
        return pdpb_pb2.GetOperatorResponse(desc=b"scatter-region", status=state)  # type: ignore[arg-type]

    return answer


def test_scatter_waits_until_pd_is_done(fake: FakeCluster) -> None:
    """PD first does not know the region, then cannot scatter it, then works, then has finished."""
    meta = region(5, b"", b"")
    known = pdpb_pb2.GetRegionResponse(region=meta)
    fake.pd.script(PD + "GetRegionByID", pdpb_pb2.GetRegionResponse(), known)
    fake.pd.script(
        PD + "ScatterRegion",
        fail("UNKNOWN", "region 5 is not fully replicated"),
        pdpb_pb2.ScatterRegionResponse(failed_regions_id=[5]),
        pdpb_pb2.ScatterRegionResponse(finished_percentage=100),
    )
    fake.pd.script(PD + "GetOperator", operators(pdpb_pb2.RUNNING, pdpb_pb2.RUNNING, None))
    assert scatter(Cluster.connect(fake.config()), [Region.of(meta)], timeout=120) == []
    assert len(fake.pd.requests[PD + "ScatterRegion"]) == 3
    assert len(fake.pd.requests[PD + "GetOperator"]) == 3


def test_scatter_gives_up_in_time(fake: FakeCluster) -> None:
    """Unfinished work of PD is returned, not an error: the data is complete."""
    meta = region(5, b"", b"")
    fake.pd.script(PD + "GetRegionByID", pdpb_pb2.GetRegionResponse(region=meta))
    fake.pd.script(PD + "ScatterRegion", pdpb_pb2.ScatterRegionResponse())
    fake.pd.script(PD + "GetOperator", operators(pdpb_pb2.RUNNING))
    assert scatter(Cluster.connect(fake.config()), [Region.of(meta)], timeout=0.5) == [5]
    fake.pd.script(PD + "ScatterRegion", pdpb_pb2.ScatterRegionResponse(failed_regions_id=[5]))
    assert scatter(Cluster.connect(fake.config()), [Region.of(meta)], timeout=0.5) == [5]
