"""Failpoints and the admin API over real connections."""

from __future__ import annotations

import queue
import socket
import time
from pathlib import Path

import grpc
import pytest

from tests.integration.playground.clients import Client, running
from tests.integration.playground.ssts import NOOP, backup, download, ingest, meta_for
from tests.support.playground_admin import AdminRefused, PlaygroundAdmin
from tests.support.ports import accepts
from tests.support.waiting import eventually
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.pb import pdpb_pb2, pdpb_pb2_grpc, tikvpb_pb2
from tikv_br.formats.api_version import ApiVersion

BUSY = {"region_error": {"message": "busy", "server_is_busy": {"reason": "test", "backoff_ms": 5}}}


def test_pd_goes_down_and_comes_back_while_stores_live(tmp_path: Path) -> None:
    """PD's port refuses connections for so long, over gRPC and HTTP; then PD is there again, and stores answered all the while."""
    with running(tmp_path) as client:
        admin = client.admin
        region = client.region(b"k")
        admin.run("kill-pd", seconds=5)  # long enough to be seen on a busy machine
        eventually(lambda: not accepts(client.playground.state.address), 60)
        assert not client.playground.tso.available
        get = kv.RawGetRequest(context=client.context(region), key=b"k")
        assert client.store(region.leader_store).RawGet(get, timeout=60).not_found
        eventually(lambda: accepts(client.playground.state.address), 60)
        assert admin.regions()
        eventually(lambda: client.playground.tso.available, 60)


def test_pd_changes_its_leader(tmp_path: Path) -> None:
    """Followers, and for a while everybody, refuse all but GetMembers, also an open stream; then the next member leads with newer time.

    Tso is refused with UNKNOWN and PD's several texts, the rest with UNAVAILABLE.
    """
    with running(tmp_path, pd_members=2) as client:
        admin, state = client.admin, client.playground.state
        first, second = (pdpb_pb2_grpc.PDStub(client.channel(address)) for address in state.addresses)
        asked = pdpb_pb2.GetGCSafePointRequest(header=client.header)
        with pytest.raises(grpc.RpcError, match="not leader"):
            second.GetGCSafePoint(asked, timeout=60)
        more = queue.SimpleQueue[pdpb_pb2.TsoRequest | None]()
        stream = first.Tso(iter(more.get, None), timeout=60)
        more.put(pdpb_pb2.TsoRequest(header=client.header, count=1))
        before = next(stream).timestamp
        assert refused_tso(client, second) == "requested pd is not leader of cluster"
        admin.run("move-pd-leader", seconds=4)
        more.put(pdpb_pb2.TsoRequest(header=client.header, count=1))
        with pytest.raises(grpc.RpcError, match=r"ErrGenerateTimestamp.*requested is not leader anymore"):
            next(stream)
        with pytest.raises(grpc.RpcError, match="not leader"):
            first.GetGCSafePoint(asked, timeout=60)
        members = pdpb_pb2.GetMembersRequest(header=client.header)
        eventually(lambda: first.GetMembers(members, timeout=60).leader.name == "pd2")
        assert refused_tso(client, second) == "timestamp in memory isn't initialized"
        eventually(lambda: state.leader == 1)
        assert refused_tso(client, first) == "requested pd is not leader of cluster"
        (after,) = second.Tso(iter([pdpb_pb2.TsoRequest(header=client.header, count=1)]), timeout=60)
        assert (after.timestamp.physical, after.timestamp.logical) > (before.physical, before.logical)
        assert second.GetGCSafePoint(asked, timeout=60).safe_point == 0
        assert admin.get("/pd/api/v1/leader")["client_urls"] == [f"http://{state.addresses[1]}"]


def refused_tso(client: Client, member: pdpb_pb2_grpc.PDStub) -> str:
    """The last part of a member's text that refuses a timestamp with UNKNOWN."""
    with pytest.raises(grpc.RpcError) as caught:
        list(member.Tso(iter([pdpb_pb2.TsoRequest(header=client.header, count=1)]), timeout=60))
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    begin, _, reason = (caught.value.details() or "").partition(", ")
    assert begin == "[PD:tso:ErrGenerateTimestamp]generate timestamp failed"
    return str(reason)


def test_pd_leader_dies(tmp_path: Path) -> None:
    """The others name the dead one for a lease; a store without timestamps can neither flush nor write until then."""
    with running(tmp_path, ApiVersion.V2, pd_members=3) as client:
        state = client.playground.state
        second = pdpb_pb2_grpc.PDStub(client.channel(state.addresses[1]))
        PlaygroundAdmin(",".join(state.addresses)).run("kill-pd-leader", seconds=8, lease=3)
        eventually(lambda: state.died == 0)
        leader = second.GetMembers(pdpb_pb2.GetMembersRequest(header=client.header), timeout=60).leader
        assert leader.client_urls == [f"http://{state.addresses[0]}"]
        eventually(
            lambda: not accepts(client.playground.state.address), 5
        )  # the port is closed after the others know it
        flushed, *_ = backup(client)
        assert "fail to flush causal ts, BatchRenew" in flushed.error.msg
        put = client.call("RawPut", b"k", kv.RawPutRequest(key=client.key(b"k"), value=b"v"))
        assert "Fail to get ts" in put.error
        eventually(lambda: state.leader == 1)
        eventually(lambda: client.put(b"k", b"v") == kv.RawPutResponse())
        eventually(lambda: accepts(client.playground.state.address) and state.died is None, 60)


def test_region_errors_wherever_regions_are_asked(tmp_path: Path) -> None:
    """Raw commands alone and batched, backups, downloads and ingests carry the error in their own places."""
    with running(tmp_path) as client:
        admin = client.admin
        region = client.region(b"k")
        for rpc in ("RawGet", "RawBatchPut", "RawScan", "Backup", "Download", "Ingest"):
            admin.fail(rpc, BUSY)
        scan = client.call("RawScan", b"k", kv.RawScanRequest(start_key=b"a", limit=1))
        put = client.call("RawBatchPut", b"k", kv.RawBatchPutRequest(pairs=[kv.KvPair(key=b"k", value=b"v")]))
        [written] = backup(client)
        downloaded = download(client, meta_for(client, region), region.leader_store, name="x", storage_backend=NOOP)
        ingested = ingest(client, region, meta_for(client, region))
        errors = [scan.region_error, put.region_error, written.error.region_error]
        errors += [downloaded.error.store_error, ingested.error]
        assert [error.server_is_busy.backoff_ms for error in errors] == [5] * 5
        get = kv.RawGetRequest(context=client.context(region), key=b"k")
        commands = tikvpb_pb2.BatchCommandsRequest(
            requests=[tikvpb_pb2.BatchCommandsRequest.Request(RawGet=get)] * 2, request_ids=[1, 2]
        )
        [batch] = client.store(region.leader_store).BatchCommands(iter([commands]), timeout=60)
        assert [each.RawGet.region_error.server_is_busy.backoff_ms for each in batch.responses] == [5, 0]
        assert client.put(b"k", b"v") == kv.RawPutResponse()


@pytest.mark.parametrize("rpc", ["RawGet", "Backup"])
def test_a_store_killed_by_a_call(tmp_path: Path, rpc: str) -> None:
    """The caller loses the connection, the port refuses, and after a restart all is there again on the same port."""
    with running(tmp_path) as client:
        client.put(b"k", b"v")
        region = client.region(b"k")
        address = client.playground.nodes[region.leader_store].address
        client.admin.fail(rpc, {"kill_store": {}}, store_id=region.leader_store)

        def call() -> object:
            return client.get(b"k") if rpc == "RawGet" else backup(client, region.leader_store)

        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert [store["alive"] for store in client.admin.get("stores")].count(False) == 1
        with grpc.insecure_channel(address) as fresh, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(fresh).result(0.5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # so that no other program gets it
        client.admin.run("restart-store", store_id=region.leader_store)
        assert client.playground.nodes[region.leader_store].address == address
        get = kv.RawGetRequest(context=client.context(region), key=b"k")
        answer = client.store(region.leader_store).RawGet(get, timeout=60, wait_for_ready=True)
        assert answer.value == b"v"


def test_a_command_changes_the_cluster_under_a_call(tmp_path: Path) -> None:
    """A split or a move of the leader while the call waits is what the call then meets."""
    with running(tmp_path) as client:
        admin = client.admin
        region = client.region(b"k")
        admin.fail("RawScan", {"command": {"name": "split", "arguments": {"keys": [b"k".hex()]}}})
        answer = client.call("RawScan", b"k", kv.RawScanRequest(start_key=b"a", limit=1), region=region)
        assert len(answer.region_error.epoch_not_match.current_regions) == 2
        region = client.region(b"k")
        target = next(peer for peer in region.peers if peer.store_id != region.leader_store)
        arguments = {"region_id": region.id, "store_id": target.store_id}
        admin.fail("RawPut", {"command": {"name": "transfer-leader", "arguments": arguments}})
        answer = client.call("RawPut", b"k", kv.RawPutRequest(key=b"k", value=b"v"), region=region)
        assert answer.region_error.not_leader.leader == target.to_pb()


def test_commands_by_hand(tmp_path: Path) -> None:
    """Split, merge, move, scatter: the regions are as asked for, without hole or overlap."""
    with running(tmp_path, stores=4) as client:
        admin = client.admin
        pieces = admin.split(b"c", b"f")
        assert [bytes.fromhex(piece["start"]) for piece in pieces] == [b"", b"c", b"f"]
        merged = admin.run("merge", source=pieces[0]["id"], target=pieces[1]["id"])
        assert (merged["start"], merged["end"]) == ("", b"f".hex())
        region = client.region(b"a")
        free = next(store for store in client.playground.nodes if region.peer_on(store) is None)
        moved = admin.run("move-peer", region_id=region.id, from_store=region.leader_store, to_store=free)
        assert moved["leader_store"] == free
        assert moved["conf_ver"] > region.conf_ver
        admin.run("scatter")
        regions = admin.regions()
        assert {region["leader_store"] for region in regions} == set(client.playground.nodes)
        assert [region["end"] for region in regions[:-1]] == [region["start"] for region in regions[1:]]


def test_a_flush_by_hand(tmp_path: Path) -> None:
    """The store's next timestamp is above PD's last."""
    with running(tmp_path, ApiVersion.V2, ts_ahead=600.0) as client:
        time.sleep(0.2)
        store_id, node = next(iter(client.playground.nodes.items()))
        before = client.playground.tso.next()
        assert node.causal.next_ts() < before
        client.admin.run("flush", store_id=store_id)
        assert node.causal.next_ts() > before


def test_the_admin_refuses_unknown_requests(tmp_path: Path) -> None:
    """Unknown paths, stores, regions, arguments and failpoints are errors that name them."""
    with running(tmp_path) as client:
        admin = client.admin
        for said, call in (
            ("404", lambda: admin.run("explode")),
            ("there is no store 99", lambda: admin.run("kill-store", store_id=99)),
            ("there is no region 99", lambda: admin.run("transfer-leader", region_id=99, store_id=1)),
            ("unexpected keyword argument", lambda: admin.run("scatter", quickly=True)),
            ("non-hexadecimal", lambda: admin.run("split", keys=["xy"])),
            ("unknown RPC or point", lambda: admin.fail("RawGte", BUSY)),
        ):
            with pytest.raises(AdminRefused, match=said):
                call()
        with pytest.raises(AssertionError, match="ever met"), admin.failing("RawPut", BUSY):
            pass
        assert admin.get("failpoints") == []
