"""Requests find their region through every kind of refusal."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import PD, FakeCluster, client, put_answer, region, region_error, with_leader
from tikv_br.cluster.channel import FailedUnknown
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2, metapb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import RequestRefused, RetryBudgetExhausted, StoreFull
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY

PUT = "/tikvpb.Tikv/RawPut"
FLEETING = [
    "region_not_found",
    "key_not_in_region",
    "epoch_not_match",
    "stale_command",
    "store_not_match",
    "max_timestamp_not_synced",
    "read_index_not_ready",
    "proposal_in_merging_mode",
    "data_is_not_ready",
    "region_not_initialized",
    "disk_full",
    "RecoveryInProgress",
    "is_witness",
    "mismatch_peer_id",
    "bucket_version_not_match",
    "undetermined_result",
    "not_leader",
]


def one_kind(kind: str) -> errorpb_pb2.Error:
    """A region error with this field set, and nothing in it."""
    error = errorpb_pb2.Error(message="scripted")
    getattr(error, kind).SetInParent()
    return error


@pytest.fixture
def three(fake_cluster: Callable[..., FakeCluster]) -> FakeCluster:
    """Three stores; one region with a peer on each, led by store 1."""
    return fake_cluster(3)


@pytest.mark.parametrize("kind", FLEETING)
def test_fleeting_refusals_are_tried_again(fake: FakeCluster, kind: str) -> None:
    """After one refusal of each passing kind the request succeeds."""
    fake.kv("RawPut", put_answer(one_kind(kind)), put_answer())
    client(fake, retry_budget=5.0).put(b"k", b"v")
    assert len(fake.stores[1].requests[PUT]) == 2


@pytest.mark.parametrize("kind", ["raft_entry_too_large", "FlashbackInProgress", "FlashbackNotPrepared"])
def test_final_refusals_are_told_at_once(fake: FakeCluster, kind: str) -> None:
    """Permanent errors are raised after one request, with the kind in the message."""
    fake.kv("RawPut", put_answer(one_kind(kind)))
    with pytest.raises(RequestRefused, match=f"RawPut: region 1: {kind}: scripted"):
        client(fake).put(b"k", b"v")
    assert len(fake.stores[1].requests[PUT]) == 1


def test_a_message_without_a_kind_is_tried_again(fake: FakeCluster) -> None:
    """A closing store speaks in words only."""
    fake.kv("RawPut", put_answer(errorpb_pb2.Error(message="TiKV is Closing")), put_answer())
    client(fake).put(b"k", b"v")


def test_a_failure_without_a_meaning_is_tried_again(three: FakeCluster) -> None:
    """Unknown answers of proxies or stopping stores count as silence in RawKV, so another store is asked."""
    three.kv("RawPut", fail("UNKNOWN", "Stream removed"))
    three.kv("RawPut", put_answer(), store_id=2)
    client(three).put(b"k", b"v")
    assert [len(three.stores[each].requests[PUT]) for each in (1, 2)] == [1, 1]


def test_a_failure_without_a_meaning_is_told_in_the_end(fake: FakeCluster) -> None:
    """A lasting failure is raised with its text after the budget."""
    fake.kv("RawPut", *[fail("UNKNOWN", "odd")] * 50)
    with pytest.raises(RetryBudgetExhausted, match=r"RawPut: gave up .* UNKNOWN: odd"):
        client(fake, retry_budget=0.5).put(b"k", b"v")


def test_a_failure_without_a_meaning_may_be_a_refusal(fake: FakeCluster) -> None:
    """Stores refuse imports in this form: unless the caller knows better, it is raised at once."""
    sent: list[int] = []

    def send(_region: Region, _store: StoreClient) -> None:
        sent.append(1)
        raise FailedUnknown("store 1: UNKNOWN: FileCorrupted")

    with pytest.raises(RequestRefused, match="FileCorrupted"):
        Cluster.connect(fake.config()).router.call(b"k", send, "ingest")
    assert len(sent) == 1


def test_a_hint_to_the_leader_is_followed_without_pd(three: FakeCluster) -> None:
    """A store that knows the leader sends us there; PD, who would still say store 1, is not asked again."""
    hint = errorpb_pb2.NotLeader(region_id=1, leader=metapb_pb2.Peer(id=13, store_id=3))
    three.kv("RawPut", put_answer(region_error(not_leader=hint)))
    three.kv("RawPut", put_answer(), store_id=3)
    raw = client(three)
    raw.put(b"k", b"v")
    raw.put(b"k", b"v")
    assert [len(three.stores[each].requests[PUT]) for each in (1, 2, 3)] == [1, 0, 2]
    assert len(three.pd.requests[PD + "GetRegion"]) == 1
    request = three.stores[3].seen(PUT, kvrpcpb_pb2.RawPutRequest)[0]
    assert request.context.peer.id == 13


def test_two_stores_that_name_each_other_do_not_spin(three: FakeCluster) -> None:
    """Between such stores there are waits, and the budget ends it."""
    to_two = errorpb_pb2.NotLeader(region_id=1, leader=metapb_pb2.Peer(id=12, store_id=2))
    to_one = errorpb_pb2.NotLeader(region_id=1, leader=metapb_pb2.Peer(id=11, store_id=1))
    three.kv("RawPut", put_answer(region_error(not_leader=to_two)))
    three.kv("RawPut", put_answer(region_error(not_leader=to_one)), store_id=2)
    with pytest.raises(RetryBudgetExhausted, match="not_leader"):
        client(three, retry_budget=1.0).put(b"k", b"v")
    assert sum(len(three.stores[each].requests[PUT]) for each in (1, 2)) < 20


def test_newer_regions_in_a_refusal_are_used(three: FakeCluster) -> None:
    """After a split the store sends the pieces; the next request goes to the right one, without PD."""
    left, right = region(9, b"", b"m", (1, 2, 3), version=2), region(1, b"m", b"", (1, 2, 3), version=2)
    three.kv("RawPut", put_answer(region_error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=[left, right]))), put_answer())  # fmt: skip
    client(three).put(b"k", b"v")
    request = three.stores[1].seen(PUT, kvrpcpb_pb2.RawPutRequest)[1]
    assert (request.context.region_id, request.context.region_epoch.version) == (9, 2)
    assert len(three.pd.requests[PD + "GetRegion"]) == 1


def test_a_store_that_lags_behind_is_waited_for(fake: FakeCluster) -> None:
    """When the store's epoch is older than ours, our region stays as it is."""
    fake.regions = [with_leader(region(1, b"", b"", version=5))]
    old = errorpb_pb2.EpochNotMatch(current_regions=[region(1, b"", b"", version=4)])
    fake.kv("RawPut", put_answer(region_error(epoch_not_match=old)), put_answer())
    client(fake).put(b"k", b"v")
    requests = fake.stores[1].seen(PUT, kvrpcpb_pb2.RawPutRequest)
    assert [each.context.region_epoch.version for each in requests] == [5, 5]
    assert len(fake.pd.requests[PD + "GetRegion"]) == 1


def test_a_dead_leader_makes_the_peers_be_tried(three: FakeCluster) -> None:
    """When the leader's store is gone its peers are asked; one of them leads by now."""
    three.stores[1].close()
    hint = errorpb_pb2.NotLeader(region_id=1, leader=metapb_pb2.Peer(id=13, store_id=3))
    three.kv("RawPut", put_answer(region_error(not_leader=hint)), store_id=2)
    three.kv("RawPut", put_answer(), store_id=3)
    client(three, retry_budget=10.0).put(b"k", b"v")
    assert len(three.stores[3].requests[PUT]) == 1


def test_a_store_that_comes_back_elsewhere_is_found(fake_cluster: Callable[..., FakeCluster]) -> None:
    """A store restarts at another address; PD knows it, and the call goes there."""
    fake = fake_cluster(1)
    raw = client(fake, retry_budget=10.0)
    fake.kv("RawPut", put_answer())
    raw.put(b"k", b"v")
    fake.stores[1].close()
    fake.stores[1] = type(fake.stores[1])()
    fake.kv("RawPut", put_answer())
    raw.put(b"k", b"v")
    assert len(fake.stores[1].requests[PUT]) == 1


def test_a_region_on_a_store_that_left_is_looked_up_again(fake_cluster: Callable[..., FakeCluster]) -> None:
    """PD moved the region away and forgot the store that we remember as its leader's."""
    fake = fake_cluster(2)
    fake.regions = [with_leader(region(1, b"", b"", (2,)))]
    cluster = Cluster.connect(fake.config())
    cluster.regions.locate(b"k")
    left = fake.stores.pop(2)
    left.close()
    fake.regions = [with_leader(region(1, b"", b"", (1,), version=2))]
    fake.kv("RawPut", put_answer())
    RawClient(cluster.router, KeyCodec(ApiVersion.V1), cluster.cluster_id).put(b"k", b"v")
    assert len(fake.stores[1].requests[PUT]) == 1


def test_writes_have_an_end(fake: FakeCluster) -> None:
    """A store must not begin a write after we gave it up: it could come through after a later one."""
    fake.kv("RawPut", put_answer())
    fake.kv("RawDeleteRange", kvrpcpb_pb2.RawDeleteRangeResponse())
    raw = client(fake)
    raw.put(b"k", b"v")
    raw.delete_range(EVERY_KEY)
    put = fake.stores[1].seen(PUT, kvrpcpb_pb2.RawPutRequest)[0]
    delete = fake.stores[1].seen("/tikvpb.Tikv/RawDeleteRange", kvrpcpb_pb2.RawDeleteRangeRequest)[0]
    assert 0 < put.context.max_execution_duration_ms < 1000 * ClusterConfig(pd=()).request_timeout
    assert delete.context.max_execution_duration_ms == put.context.max_execution_duration_ms


def test_a_fence_is_asked_before_each_try_of_a_write(fake: FakeCluster) -> None:
    """Nothing is sent once it says no, also not by a retry; reads do not ask it."""
    fake.kv("RawPut", put_answer(one_kind("stale_command")), put_answer())
    fake.kv("RawGet", kvrpcpb_pb2.RawGetResponse(value=b"v"))
    leave = [True, False]

    def fence() -> None:
        if not leave.pop(0):
            raise RequestRefused("no more")

    cluster = Cluster.connect(fake.config())
    raw = RawClient(cluster.router, KeyCodec(ApiVersion.V1), cluster.cluster_id, fence)
    with pytest.raises(RequestRefused, match="no more"):
        raw.put(b"k", b"v")
    assert len(fake.stores[1].requests[PUT]) == 1
    assert raw.get(b"k") == b"v"


def test_all_stores_dead_ends_with_the_budget(fake: FakeCluster) -> None:
    """The error names the unreachable store, within the budget."""
    fake.stores[1].close()
    began = time.monotonic()
    with pytest.raises(RetryBudgetExhausted, match=r"RawPut: gave up after .* store 1 \(127.0.0.1:"):
        client(fake, retry_budget=1.0).put(b"k", b"v")
    assert time.monotonic() - began < 60


def test_a_disk_that_stays_full_is_told_once_with_its_store(fake: FakeCluster) -> None:
    """The store that the answer names, its address, and no list of the tries."""
    fake.kv("RawPut", *[put_answer(one_kind("disk_full"))] * 50)
    with pytest.raises(StoreFull, match=r"RawPut: store 1 \(127.0.0.1:\d+\) has no space left: scripted$"):
        client(fake, retry_budget=0.6).put(b"k", b"v")


def test_a_busy_store_says_how_long_to_wait(fake: FakeCluster) -> None:
    """The store's own figure is kept, and does not count against the budget."""
    busy = errorpb_pb2.ServerIsBusy(reason="scheduler is busy", backoff_ms=2100)
    fake.kv("RawPut", put_answer(region_error(server_is_busy=busy)), put_answer())
    began = time.monotonic()
    client(fake, retry_budget=0.1, busy_budget=60.0).put(b"k", b"v")
    assert time.monotonic() - began >= 2.1


def test_a_wrong_cluster_id_is_final(fake: FakeCluster) -> None:
    """A store of another cluster refuses with INVALID_ARGUMENT, as recorded."""
    fake.kv("RawPut", fail("INVALID_ARGUMENT", "the cluster id of the request does not match the TiKV cluster"))
    with pytest.raises(RequestRefused, match="does not match the TiKV cluster"):
        client(fake).put(b"k", b"v")
