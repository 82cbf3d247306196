"""Finding PD's leader, and finding it again."""

from __future__ import annotations

import socket
import time

import pytest

from tests.support.scripted_grpc import Failure, ScriptedServer, fail
from tests.unit.cluster.fakes import CLUSTER_ID, PD, FakeCluster, header_error, members, region, with_leader
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br import retry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import kvrpcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_connection import HEADER_ERRORS
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, RetryBudgetExhausted

GC = pdpb_pb2.GetGCSafePointResponse(safe_point=42)
GET_GC = PD + "GetGCSafePoint"
PATIENCE = 60.0
"""Seconds that members may take to answer."""
AT_ONCE = PATIENCE / 2
"""Seconds within which even a busy machine does what is not to wait for `PATIENCE`."""


def config(*servers: ScriptedServer, budget: float = PATIENCE) -> ClusterConfig:
    """A config that names these members."""
    addresses = tuple(server.address for server in servers)
    return ClusterConfig(pd=addresses, connect_timeout=PATIENCE, request_timeout=PATIENCE, retry_budget=budget)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a twentieth of a second between two tries."""
    monkeypatch.setattr(retry, "PD_UNAVAILABLE", retry.Backoff("PD", 0.05, 0.05))


def test_every_header_error_has_a_class() -> None:
    """Each error type of pdpb but OK maps to a class of ours."""
    assert set(HEADER_ERRORS) == set(pdpb_pb2.ErrorType.values()) - {pdpb_pb2.OK}


@pytest.mark.parametrize("kind", [kind for kind, error in HEADER_ERRORS.items() if not error.retryable])
def test_a_header_error_arrives_as_its_class(fake: FakeCluster, kind: int) -> None:
    """An answer whose header says no raises the class of the table with PD's words, at once."""
    fake.pd.script(GET_GC, pdpb_pb2.GetGCSafePointResponse(header=header_error(kind, "PD's words")))
    with PdClient(fake.config()) as pd, pytest.raises(HEADER_ERRORS[kind], match="PD's words"):
        pd.gc_safe_point()
    assert len(fake.pd.requests[GET_GC]) == 1


def test_requests_carry_the_cluster_id(fake: FakeCluster) -> None:
    """Requests carry the cluster id of GetMembers; PD refuses those for another cluster."""
    fake.pd.script(GET_GC, GC)
    with PdClient(fake.config()) as pd:
        assert pd.gc_safe_point() == 42
    (request,) = fake.pd.seen(GET_GC, pdpb_pb2.GetGCSafePointRequest)
    assert request.header.cluster_id == 7


def test_the_leader_is_asked_not_the_first_member() -> None:
    """Any member leads to the leader."""
    with ScriptedServer() as follower, ScriptedServer() as leader:
        follower.script(PD + "GetMembers", members(follower.address, leader.address, leader=leader.address))
        follower.script(GET_GC, fail("UNAVAILABLE", "not leader"))
        leader.script(GET_GC, GC)
        with PdClient(config(follower)) as pd:
            assert pd.gc_safe_point() == 42
        assert not follower.requests[GET_GC]


@pytest.mark.parametrize(
    "answer",
    [
        fail("UNAVAILABLE", "not leader"),
        fail(
            "UNKNOWN", "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, requested pd is not leader of cluster"
        ),
        fail("UNKNOWN", "[PD:etcd:ErrEtcdTxnConflict]etcd transaction failed, conflicted and rolled back"),
        pdpb_pb2.GetGCSafePointResponse(header=header_error(pdpb_pb2.UNKNOWN, "etcdserver: leader changed")),
    ],
    ids=["follower", "former leader", "transaction", "header"],
)
def test_texts_of_a_leader_change_are_followed(answer: Failure | pdpb_pb2.GetGCSafePointResponse) -> None:
    """A former leader is UNAVAILABLE, or says UNKNOWN in PD's words: the call continues with the new leader."""
    with ScriptedServer() as old, ScriptedServer() as new:
        old.script(
            PD + "GetMembers", members(old.address, new.address), members(old.address, new.address, leader=new.address)
        )
        old.script(GET_GC, answer)
        new.script(GET_GC, GC)
        with PdClient(config(old)) as pd:
            assert pd.gc_safe_point() == 42


def test_members_learnt_on_the_way_are_asked_when_the_first_dies() -> None:
    """The leader dies; the new one is known to a member that only GetMembers listed."""
    with ScriptedServer() as survivor:
        doomed = ScriptedServer()
        doomed.script(PD + "GetMembers", members(doomed.address, survivor.address))
        survivor.script(PD + "GetMembers", members(survivor.address))
        survivor.script(GET_GC, GC)
        with PdClient(config(doomed)) as pd:
            doomed.close()
            assert pd.gc_safe_point() == 42


def test_one_dead_member_does_not_hinder() -> None:
    """With two addresses of which one is dead, the other is found at once."""
    dead = ScriptedServer()
    dead.close()
    with ScriptedServer() as alive:
        alive.script(PD + "GetMembers", members(alive.address))
        began = time.monotonic()
        with PdClient(config(dead, alive)) as pd:
            assert pd.cluster_id == 7
        assert time.monotonic() - began < AT_ONCE


def test_a_silent_member_does_not_hinder() -> None:
    """An address that accepts and says nothing does not hold up the answer of another."""
    with socket.socket() as silent, ScriptedServer() as alive:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        alive.script(PD + "GetMembers", members(alive.address))
        addresses = (f"127.0.0.1:{silent.getsockname()[1]}", alive.address)
        began = time.monotonic()
        with PdClient(ClusterConfig(pd=addresses, connect_timeout=PATIENCE)) as pd:
            assert pd.cluster_id == 7
        assert time.monotonic() - began < AT_ONCE


def test_the_budget_ends_a_call(fake: FakeCluster) -> None:
    """A PD that stays unavailable is given up when the budget is spent, with its last words."""
    fake.pd.script(GET_GC, fail("UNAVAILABLE", "server not started"))
    with PdClient(fake.config(retry_budget=1.0)) as pd:
        began = time.monotonic()
        with pytest.raises(RetryBudgetExhausted, match="server not started"):
            pd.gc_safe_point()
        assert time.monotonic() - began < AT_ONCE
    assert len(fake.pd.requests[GET_GC]) > 1


def test_a_closed_connection_is_an_error_of_ours(fake: FakeCluster) -> None:
    """Calls after close end with our error, not with gRPC's ValueError."""
    pd = PdClient(fake.config())
    pd.close()
    with pytest.raises(ClusterUnreachable, match="closed"):
        pd.gc_safe_point()


def test_another_cluster_at_the_same_address_is_refused() -> None:
    """When the address answers for another cluster after a while, nothing is sent to it."""
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", members(server.address), members(server.address, cluster_id=8))
        server.script(GET_GC, fail("UNAVAILABLE"), GC)
        with PdClient(config(server)) as pd, pytest.raises(ClusterUnfit, match="a different cluster"):
            pd.gc_safe_point()
        assert len(server.requests[GET_GC]) == 1


def test_a_wrong_cluster_id_is_not_retried(fake: FakeCluster) -> None:
    """PD's FAILED_PRECONDITION for a cluster id that is not its own is final."""
    fake.pd.script(GET_GC, fail("FAILED_PRECONDITION", "mismatch cluster id, need 7 but got 42"))
    with PdClient(fake.config()) as pd, pytest.raises(ClusterUnfit, match="mismatch cluster id"):
        pd.gc_safe_point()
    assert len(fake.pd.requests[GET_GC]) == 1


@pytest.mark.usefixtures("short_waits")
def test_an_election_is_waited_out() -> None:
    """The first contact is retried while members know no leader, deny leadership, start, hang up, or one of them refuses."""
    dead = ScriptedServer()
    dead.close()
    with ScriptedServer() as server:
        answers = (
            fail("UNAVAILABLE", "not leader"),
            fail("UNKNOWN", "server not started"),
            pdpb_pb2.GetMembersResponse(),
            fail("UNAVAILABLE", "Socket closed"),
        )
        server.script(PD + "GetMembers", *answers, members(server.address))
        with PdClient(config(dead, server)) as pd:
            assert pd.cluster_id == 7
        assert len(server.requests[PD + "GetMembers"]) == len(answers) + 1


@pytest.mark.usefixtures("short_waits")
def test_a_pd_that_never_has_a_leader_is_given_up() -> None:
    """When the budget is spent, with the members' last words."""
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", pdpb_pb2.GetMembersResponse())
        with pytest.raises(RetryBudgetExhausted, match="no leader"):
            PdClient(config(server, budget=0.2))
        assert len(server.requests[PD + "GetMembers"]) > 1


def test_nobody_there_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every address refuses connections or does not resolve, there is no wait."""
    dead = ScriptedServer()
    dead.close()
    waits: list[object] = []
    monkeypatch.setattr(retry.Backoffer, "wait", lambda *asked: waits.append(asked))
    with pytest.raises(ClusterUnreachable, match="no PD answers") as refused:
        PdClient(ClusterConfig(pd=(dead.address, "nowhere.invalid:2379"), connect_timeout=2.0))
    assert refused.value.message.count(dead.address) == 1
    assert waits == []


def test_a_region_that_pd_does_not_know_yet_is_waited_for(fake: FakeCluster) -> None:
    """An OK answer without a region is asked for again."""
    found = with_leader(region(4, b"a", b"b"))
    answer = pdpb_pb2.GetRegionResponse(region=found.region, leader=found.leader)
    fake.pd.script(PD + "GetRegion", pdpb_pb2.GetRegionResponse(), answer)
    with PdClient(fake.config(retry_budget=5.0)) as pd:
        assert pd.region_by_key(b"a").id == 4


def test_errors_are_of_our_tree(fake: FakeCluster) -> None:
    """A method that PD does not have at all is a `ClusterError`, not gRPC's."""
    with PdClient(fake.config()) as pd, pytest.raises(ClusterError):
        pd.gc_safe_point()


def test_calls_to_a_pd_that_is_gone_take_one_budget(fake: FakeCluster) -> None:
    """The second call tries once; when PD is back, calls succeed and have their budget again."""
    with PdClient(fake.config(retry_budget=1.0)) as pd:
        fake.pd.script(GET_GC, fail("UNAVAILABLE", "gone"))
        with pytest.raises(RetryBudgetExhausted):
            pd.gc_safe_point()
        tries = len(fake.pd.requests[GET_GC])
        with pytest.raises(RetryBudgetExhausted, match="and 1 tries"):
            pd.gc_safe_point()
        assert len(fake.pd.requests[GET_GC]) == tries + 1
        fake.pd.script(GET_GC, GC, fail("UNAVAILABLE", "gone"), GC)
        assert [pd.gc_safe_point(), pd.gc_safe_point()] == [42, 42]


def test_the_stores_are_known_without_pd(fake: FakeCluster) -> None:
    """Without PD, the last known stores get the requests to leave import mode or lift a limit."""
    stores = pdpb_pb2.GetAllStoresResponse(stores=[metapb_pb2.Store(id=1, address="a:1")])
    method = PD + "GetAllStores"
    with Cluster.connect(fake.config(retry_budget=1.0)) as cluster:
        fake.pd.script(method, stores)
        assert [store.id for store in cluster.stores()] == [1]
        fake.pd.script(method, fail("UNAVAILABLE", "gone"))
        assert [store.id for store in cluster.stores(known=True)] == [1]
        with pytest.raises(RetryBudgetExhausted):
            cluster.stores()
        tries = len(fake.pd.requests[method])
        assert [store.id for store in cluster.stores()] == [1]
        assert len(fake.pd.requests[method]) == tries


@pytest.mark.parametrize("status", ["Received http2 header with status: 404", "Method not found!"])
def test_a_server_that_is_not_pd_is_called_so(status: str) -> None:
    """A server of HTTP/2, or a store, at the address of PD."""
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", fail("UNIMPLEMENTED", status))
        with pytest.raises(ClusterUnreachable, match=f"{server.address}: this is not PD.*{status}") as caught:
            PdClient(config(server))
        assert "--pd" in caught.value.hint


def test_a_server_of_http_1_is_not_pd() -> None:
    """As a web server at the address of PD."""
    with ScriptedHttp() as server, pytest.raises(ClusterUnreachable, match=f"{server.address}: this is not PD"):
        PdClient(ClusterConfig(pd=(server.address,)))


@pytest.mark.parametrize("first", [0, 1])
def test_addresses_of_two_clusters_are_refused(fake: FakeCluster, first: int) -> None:
    """Whichever answers first; the message names both. An address that does not answer is tolerated."""
    with ScriptedServer() as other, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"

        def late(_data: bytes) -> pdpb_pb2.GetMembersResponse:
            time.sleep(0.3 * first)
            return members(other.address, cluster_id=8)

        other.script(PD + "GetMembers", late)
        with pytest.raises(ClusterUnfit, match="of two clusters") as refused:
            PdClient(ClusterConfig(pd=(fake.pd.address, other.address), connect_timeout=PATIENCE))
        for named in (f"{fake.pd.address} of cluster {CLUSTER_ID}", f"{other.address} of cluster 8"):
            assert named in refused.value.message
        PdClient(ClusterConfig(pd=(fake.pd.address, nowhere), connect_timeout=PATIENCE)).close()


def test_a_name_that_does_not_resolve_here_is_replaced_by_the_given_address(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a forwarded port; a warning names it, once."""
    fake.pd.script(PD + "GetMembers", members("basic-pd-0.basic-pd-peer.ns.invalid:2379"))
    fake.pd.script(GET_GC, GC)
    with PdClient(fake.config()) as pd:
        assert pd.gc_safe_point() == 42
    [line] = [each for each in caplog.messages if "does not resolve here" in each]
    assert "PD advertises basic-pd-0.basic-pd-peer.ns.invalid:2379" in line
    assert fake.pd.address in line


def test_a_store_whose_name_does_not_resolve_is_named(fake: FakeCluster) -> None:
    """With what to do."""
    address = "basic-tikv-0.basic-tikv-peer.ns.invalid:20160"
    fake.pd.script(PD + "GetStore", pdpb_pb2.GetStoreResponse(store=metapb_pb2.Store(id=1, address=address)))
    with (
        Cluster.connect(fake.config()) as cluster,
        pytest.raises(ClusterUnreachable, match="does not resolve here") as raised,
    ):
        cluster.store(1).call(cluster.store(1).kv.RawGet, kvrpcpb_pb2.RawGetRequest(key=b"k"))
    assert address in raised.value.message
    assert "run tikv-br where it resolves" in raised.value.message
