"""PD over real gRPC and its one port, as far as recordings do not cover it."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import grpc
import pytest

from tests.integration.playground.clients import Client, Message, running
from tikv_br.cluster.pb import keyspacepb_pb2, keyspacepb_pb2_grpc, pdpb_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS_FRAME = 4


def connect(client: Client) -> socket.socket:
    """A bare connection to PD's port."""
    host, _, port = client.playground.state.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_one_port_serves_both_protocols(tmp_path: Path) -> None:
    """HTTP/2 whose preface comes byte by byte, HTTP/1.1 with two requests on a connection, and silence all get on."""
    with running(tmp_path, stores=1) as client:
        connect(client).close()
        with connect(client) as dribbling:
            dribbling.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in PREFACE:
                dribbling.sendall(bytes([byte]))
            assert dribbling.recv(9)[3] == SETTINGS_FRAME
        with connect(client):
            connection = http.client.HTTPConnection(client.playground.state.address, timeout=60)
            for path, status in (("/pd/api/v1/version", 200), ("/nosuch", 404)):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status
            connection.close()
            assert client.pd.GetMembers(pdpb_pb2.GetMembersRequest()).leader.name == "pd1"


def test_global_config_is_kept(tmp_path: Path) -> None:
    """Values are stored by path and name, deleted by kind, and there after a restart."""
    put = pdpb_pb2.GlobalConfigItem(name="a", value="1")
    other = pdpb_pb2.GlobalConfigItem(name="b", value="2")
    with running(tmp_path, stores=1) as client:
        client.pd.StoreGlobalConfig(pdpb_pb2.StoreGlobalConfigRequest(changes=[put, other], config_path="/p"))
        gone = pdpb_pb2.GlobalConfigItem(name="b", kind=pdpb_pb2.DELETE)
        client.pd.StoreGlobalConfig(pdpb_pb2.StoreGlobalConfigRequest(changes=[gone], config_path="/p"))
    with running(tmp_path, stores=1) as client:
        loaded = client.pd.LoadGlobalConfig(pdpb_pb2.LoadGlobalConfigRequest(config_path="/p"))
        assert [(item.name, item.payload) for item in loaded.items] == [("a", b"1")]


def test_barriers_where_the_pd_has_them(tmp_path: Path) -> None:
    """With gc_barriers the three RPCs work, and a barrier behind the safe point is an error in the header."""
    with running(tmp_path, stores=1, gc_barriers=True) as client:
        set_barrier = pdpb_pb2.SetGCBarrierRequest(header=client.header, barrier_id="b", barrier_ts=100, ttl_seconds=60)
        assert client.pd.SetGCBarrier(set_barrier).new_barrier_info.barrier_ts == 100
        worker = pdpb_pb2.UpdateServiceGCSafePointRequest(
            header=client.header, service_id=b"gc_worker", TTL=(1 << 63) - 1, safe_point=500
        )
        assert client.pd.UpdateServiceGCSafePoint(worker).min_safe_point == 100
        state = client.pd.GetGCState(pdpb_pb2.GetGCStateRequest(header=client.header)).gc_state
        assert (state.txn_safe_point, [each.barrier_id for each in state.gc_barriers]) == (100, ["b"])
        set_barrier.barrier_ts = 50
        assert "behind the txn safe point" in client.pd.SetGCBarrier(set_barrier).header.error.message
        delete = pdpb_pb2.DeleteGCBarrierRequest(header=client.header, barrier_id="b")
        assert client.pd.DeleteGCBarrier(delete).deleted_barrier_info.barrier_ts == 100


def test_a_bootstrapped_cluster_is_not_bootstrapped_again(tmp_path: Path) -> None:
    """Bootstrap is refused in the header, AllocID goes on above all ids in use."""
    with running(tmp_path, stores=1) as client:
        answer = client.pd.Bootstrap(pdpb_pb2.BootstrapRequest(header=client.header))
        assert answer.header.error.type == pdpb_pb2.ALREADY_BOOTSTRAPPED
        used = max(region.id for region in client.playground.regions.all())
        assert client.pd.AllocID(pdpb_pb2.AllocIDRequest(header=client.header, count=5)).id >= used + 5


def test_new_keyspaces_are_loaded_by_name(tmp_path: Path) -> None:
    """A keyspace that was created by HTTP is found by gRPC."""
    with running(tmp_path, stores=1) as client:
        client.playground.state.keyspaces.create("mine")
        stub = keyspacepb_pb2_grpc.KeyspaceStub(client.channel(client.playground.state.address))
        request = keyspacepb_pb2.LoadKeyspaceRequest(header=client.header, name="mine")
        assert stub.LoadKeyspace(request).keyspace.id == 1
        page = keyspacepb_pb2.GetAllKeyspacesRequest(header=client.header, start_id=1, limit=5)
        assert [each.name for each in stub.GetAllKeyspaces(page).keyspaces] == ["mine"]


def test_unknown_methods_and_health(tmp_path: Path) -> None:
    """Other methods are UNIMPLEMENTED; the standard health service answers SERVING on PD and stores."""
    with running(tmp_path, stores=1) as client:
        for address in (client.playground.state.address, client.playground.nodes[1].address):
            channel = client.channel(address)
            check: Message = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"") == b"\x08\x01"
            unknown: Message = channel.unary_unary("/pdpb.PD/NoSuchMethod")
            with pytest.raises(grpc.RpcError) as caught:
                unknown(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
