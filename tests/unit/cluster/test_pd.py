"""PD's calls one by one, against scripted answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.unit.cluster.fakes import PD, FakeCluster, header_error, region, with_leader
from tikv_br.cluster.pb import keyspacepb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.cluster.pd import SCAN_PAGE, PdClient
from tikv_br.cluster.topology import StoreState
from tikv_br.errors import ClusterUnfit, RetryBudgetExhausted, UsageError


@pytest.fixture
def pd(fake: FakeCluster) -> Iterator[PdClient]:
    """A client of the scripted PD."""
    with PdClient(fake.config()) as client:
        yield client


def chain(*bounds: bytes) -> list[pdpb_pb2.Region]:
    """Regions from bound to bound, with ids from 1 on."""
    pairs = itertools.pairwise(bounds)
    return [with_leader(region(at, start, end)) for at, (start, end) in enumerate(pairs, 1)]


def test_stores_come_with_state_and_labels(fake: FakeCluster, pd: PdClient) -> None:
    """Stores are values; TiFlash and tombstones do not serve."""
    answer = pdpb_pb2.GetAllStoresResponse()
    answer.stores.add(id=1, address="a:1", status_address="a:2", version="8.5.2")
    answer.stores.add(id=2, address="b:1", labels=[metapb_pb2.StoreLabel(key="engine", value="tiflash")])
    answer.stores.add(id=3, address="c:1", state=metapb_pb2.Tombstone)
    answer.stores.add(id=4, address="d:1", state=metapb_pb2.Offline)
    fake.pd.script(PD + "GetAllStores", answer)
    stores = pd.stores()
    assert [store.id for store in stores if store.serves] == [1, 4]
    assert stores[3].state is StoreState.OFFLINE
    assert (stores[0].address, stores[0].status_address, stores[0].version) == ("a:1", "a:2", "8.5.2")


def test_scan_takes_pages_until_the_end(fake: FakeCluster, pd: PdClient) -> None:
    """More regions than a page are all there, in order."""
    count = SCAN_PAGE * 2 + 7
    fake.regions = chain(b"", *(at.to_bytes(4, "big") for at in range(1, count)), b"")
    found = pd.scan_regions(b"", b"")
    assert [each.id for each in found] == list(range(1, count + 1))
    assert len(fake.pd.requests[PD + "ScanRegions"]) == 3
    assert list(pd.each_region(b"", b"")) == found
    assert next(pd.each_region(b"", b"")) == found[0]
    assert len(fake.pd.requests[PD + "ScanRegions"]) == 3 + 3 + 1


@pytest.mark.parametrize(
    ("start", "end", "limit", "ids"),
    [
        (b"b", b"d", 0, [2, 3]),
        (b"bb", b"cc", 0, [2, 3]),
        (b"c", b"", 0, [3, 4]),
        (b"", b"", 2, [1, 2]),
        (b"b", b"b", 0, []),
        (b"d", b"b", 0, []),
    ],
)
def test_scan_covers_the_range_and_no_more(
    fake: FakeCluster, pd: PdClient, start: bytes, end: bytes, limit: int, ids: list[int]
) -> None:
    """The regions are those that share keys with the range; a range of nothing has none."""
    fake.regions = chain(b"", b"b", b"c", b"d", b"")
    assert [each.id for each in pd.scan_regions(start, end, limit)] == ids
    if not limit:
        assert [each.id for each in pd.each_region(start, end)] == ids


WHOLE = chain(b"", b"b", b"c", b"")


@pytest.mark.parametrize(
    ("pages", "ids"),
    [
        ([[WHOLE[0], WHOLE[2]], WHOLE[1:]], [1, 2, 3]),
        ([WHOLE[:2], [with_leader(region(9, b"b", b"", version=5))]], [1, 9]),
    ],
    ids=["a region is missing for a moment", "a merge between two pages"],
)
def test_later_pages_complete_the_picture(
    fake: FakeCluster, pd: PdClient, pages: list[list[pdpb_pb2.Region]], ids: list[int]
) -> None:
    """A hole is asked for again; a later page whose region swallowed an earlier one replaces it."""
    fake.pd.script(PD + "ScanRegions", *(pdpb_pb2.ScanRegionsResponse(regions=page) for page in pages))
    assert [each.id for each in pd.scan_regions(b"", b"")] == ids


def test_a_hole_that_stays_is_an_error(fake: FakeCluster) -> None:
    """A scan never returns regions with a hole between them."""
    whole = chain(b"", b"b", b"c", b"")
    fake.pd.script(PD + "ScanRegions", pdpb_pb2.ScanRegionsResponse(regions=[whole[0], whole[2]]))
    with (
        PdClient(fake.config(retry_budget=1.0)) as pd,
        pytest.raises(RetryBudgetExhausted, match="no region after 62"),
    ):
        pd.scan_regions(b"", b"")


def test_random_pictures_never_leave_a_hole(fake: FakeCluster) -> None:
    """Whatever splits and merges happen between calls, the result is contiguous and covers the range."""
    chance = random.Random(5)
    bounds = {bytes([chance.randrange(1, 255)]) for _ in range(12)}

    def shaken(data: bytes) -> pdpb_pb2.ScanRegionsResponse:
        bounds.add(bytes([chance.randrange(1, 255)]))
        bounds.remove(chance.choice(sorted(bounds)))
        fake.regions = chain(b"", *sorted(bounds), b"")
        answer = fake.scan_answer(data)
        del answer.regions[chance.randrange(1, 5) :]
        return answer

    fake.pd.script(PD + "ScanRegions", shaken)
    with PdClient(fake.config()) as pd:
        for _ in range(50):
            found = pd.scan_regions(b"\x20", b"\xe0")
            assert found[0].start <= b"\x20"
            assert found[-1].end == b"" or found[-1].end >= b"\xe0"
            assert all(left.end == right.start for left, right in itertools.pairwise(found))


def test_scatter_returns_what_pd_could_not(fake: FakeCluster, pd: PdClient) -> None:
    """The ids that failed come back, to be asked for again."""
    fake.pd.script(PD + "ScatterRegion", pdpb_pb2.ScatterRegionResponse(failed_regions_id=[3]))
    assert pd.scatter([1, 2, 3]) == [3]
    (request,) = fake.pd.seen(PD + "ScatterRegion", pdpb_pb2.ScatterRegionRequest)
    assert list(request.regions_id) == [1, 2, 3]


def test_no_operator_is_none(fake: FakeCluster, pd: PdClient) -> None:
    """PD says REGION_NOT_FOUND when it has nothing to do with a region."""
    fake.pd.script(
        PD + "GetOperator",
        pdpb_pb2.GetOperatorResponse(header=header_error(pdpb_pb2.REGION_NOT_FOUND, "Not Found")),
        pdpb_pb2.GetOperatorResponse(desc=b"scatter-region", status=pdpb_pb2.RUNNING),
        pdpb_pb2.GetOperatorResponse(desc=b"scatter-region", status=pdpb_pb2.SUCCESS),
    )
    assert pd.operator(1) is None
    running, finished = pd.operator(1), pd.operator(1)
    assert running is not None
    assert finished is not None
    assert (running.desc, running.running, finished.running) == ("scatter-region", True, False)


def test_a_keyspace_with_an_identity_is_refused(fake: FakeCluster, pd: PdClient) -> None:
    """A keyspace of API V3 has no id; it is not taken for keyspace 0, which is another one."""
    identity = keyspacepb_pb2.KeyspaceIdentity(namespace_id=3, keyspace_id=7)
    meta = keyspacepb_pb2.KeyspaceMeta(name="ks", keyspace_identity=identity)
    fake.pd.script("/keyspacepb.Keyspace/LoadKeyspace", keyspacepb_pb2.LoadKeyspaceResponse(keyspace=meta))
    with pytest.raises(ClusterUnfit, match=r"'ks' has an identity instead of an id: API V3 .* is not supported"):
        pd.keyspace_id("ks")


def test_keyspaces_have_ids(fake: FakeCluster, pd: PdClient) -> None:
    """A name that PD does not know is the user's mistake."""
    known = keyspacepb_pb2.LoadKeyspaceResponse(keyspace=keyspacepb_pb2.KeyspaceMeta(id=4242, name="ks"))
    unknown = keyspacepb_pb2.LoadKeyspaceResponse(header=header_error(pdpb_pb2.ENTRY_NOT_FOUND, "not there"))
    fake.pd.script("/keyspacepb.Keyspace/LoadKeyspace", known, known, unknown)
    assert pd.keyspace_id("ks") == 4242
    assert (pd.keyspace_id("7"), pd.keyspace_id("")) == (7, 0)
    assert pd.keyspace_id("²") == 4242  # a name: no digit of ASCII
    with pytest.raises(UsageError, match="'nosuch'"):
        pd.keyspace_id("nosuch")
