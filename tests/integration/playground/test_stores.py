"""RawKV over real gRPC, and what becomes of it when regions and stores change."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.integration.playground.clients import Client, running
from tests.support.waiting import eventually
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import cluster
from tikv_br.playground.scheduler import KEYSPACE_BOUNDS


@pytest.mark.parametrize("api_version", [ApiVersion.V1TTL, ApiVersion.V2])
def test_ttl_ends_on_the_stores_clock(tmp_path: Path, api_version: ApiVersion) -> None:
    """A pair with a TTL is there, with its remaining time, and is gone from all reads when it has passed."""
    with running(tmp_path, api_version) as client:
        client.put(b"short", b"v", ttl=1)
        client.put(b"long", b"v", ttl=1000)
        answer = client.call("RawGetKeyTTL", b"long", kv.RawGetKeyTTLRequest(key=client.key(b"long")))
        assert 900 < answer.ttl <= 1000
        eventually(lambda: client.get(b"short") is None)
        scan = kv.RawScanRequest(start_key=client.key(b""), end_key=client.key(b"\xff"), limit=10)
        assert [pair.key for pair in client.call("RawScan", b"a", scan).kvs] == [client.key(b"long")]


def test_v2_keeps_versions_and_v1_does_not(tmp_path: Path) -> None:
    """An overwritten and deleted key is three rows in a V2 store's RocksDB, none in V1's."""
    for api_version, rows in ((ApiVersion.V1, 0), (ApiVersion.V2, 3)):
        with running(tmp_path / api_version.label, api_version) as client:
            client.put(b"k", b"1")
            client.put(b"k", b"2")
            client.call("RawDelete", b"k", kv.RawDeleteRequest(key=client.key(b"k")))
            assert len(list(client.playground.engine.iterate(b"z", b""))) == rows


def test_requests_that_would_crash_a_store_are_recorded(tmp_path: Path) -> None:
    """RawGetKeyTTL to V1, and any read of a V2 value without flags: the connection is lost and the fatal_request is on record."""
    with running(tmp_path / "v1") as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.call("RawGetKeyTTL", b"k", kv.RawGetKeyTTLRequest(key=b"k"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [fatal_request.rpc for fatal_request in client.playground.fatal_requests.all()] == ["RawGetKeyTTL"]
    with running(tmp_path / "v2", ApiVersion.V2) as client:
        client.put(b"k", b"v")
        [(data_key, _)] = client.playground.engine.iterate(b"z", b"")
        client.playground.engine.write([(data_key, b"no flags: \x77")])
        with pytest.raises(grpc.RpcError):
            client.get(b"k")
        assert "bad format" in client.playground.fatal_requests.all()[0].what


def test_compare_and_swap_is_atomic(tmp_path: Path) -> None:
    """Of many threads that count up by compare-and-swap none loses a step."""
    with running(tmp_path, ApiVersion.V2, stores=1) as client:
        client.put(b"n", b"0")

        def count_up(_: int) -> None:
            for _ in range(20):
                while True:
                    now = client.get(b"n") or b""
                    request = kv.RawCASRequest(key=client.key(b"n"), value=b"%d" % (int(now) + 1), previous_value=now)
                    if client.call("RawCompareAndSwap", b"n", request).succeed:
                        break

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(count_up, range(3)))
        assert client.get(b"n") == b"60"


def test_a_new_leader_syncs_its_timestamps_first(tmp_path: Path) -> None:
    """V2 writes right after a transfer get max_timestamp_not_synced, reads go on, and later writes are the newest."""
    with running(tmp_path, ApiVersion.V2, ts_sync_delay=3600.0) as client:
        client.put(b"k", b"old leader")
        region = client.region(b"k")
        target = next(peer.store_id for peer in region.peers if peer.store_id != region.leader_store)
        client.playground.regions.transfer_leader(region.id, target)
        answer = client.put(b"k", b"too early")
        assert answer.region_error.HasField("max_timestamp_not_synced")
        assert str(region.id) in answer.region_error.message
        assert client.get(b"k") == b"old leader"
        client.playground._renewal._sync_delay = 0.05
        client.playground.regions.transfer_leader(region.id, region.leader_store)
        client.playground.regions.transfer_leader(region.id, target)
        eventually(lambda: client.put(b"k", b"new leader") == kv.RawPutResponse())
        assert client.get(b"k") == b"new leader"


def test_a_store_whose_port_was_taken_comes_back_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was dead another program took its port: it waits for it, then PD lists another one."""
    monkeypatch.setattr(cluster, "PORT_SECONDS", 0.1)
    with running(tmp_path, stores=1) as client:
        client.put(b"k", b"v")
        [node] = client.playground.nodes.values()
        client.playground.kill_store(node.store_id)
        address = node.address
        host, _, port = address.partition(":")
        with socket.create_server((host, int(port))):
            client.playground.restart_store(node.store_id)
        assert node.address != address
        assert client.get(b"k") == b"v"


@pytest.mark.parametrize("api_version", [ApiVersion.V1, ApiVersion.V2])
def test_pd_splits_at_keyspace_bounds(tmp_path: Path, api_version: ApiVersion) -> None:
    """Every new cluster is one region at first and gets five automatically: PD 8.5.2 does so in V1 too."""
    began = time.monotonic()
    with running(tmp_path, api_version, keyspace_split_delay=1.0) as client:
        assert len(client.playground.regions.all()) == 1 or time.monotonic() - began > 1
        eventually(lambda: len(client.playground.regions.all()) == 5)
        assert tuple(region.end for region in client.playground.regions.all()[:-1]) == KEYSPACE_BOUNDS
        assert {region.version for region in client.playground.regions.all()} == {5}


@pytest.mark.parametrize("api_version", [ApiVersion.V1, ApiVersion.V2])
def test_regions_split_until_enough_hold_data(tmp_path: Path, api_version: ApiVersion) -> None:
    """With --regions N the data end up in N regions even where all keys begin with the same byte."""
    with running(tmp_path, api_version, regions=4) as client:
        eventually(lambda: len(client.playground.regions.all()) == 8)
        for number in range(100):
            _put_while_splitting(client, b"key%03d" % number, b"v" * 50)

        def holding() -> int:
            regions = client.playground.regions.all()
            return sum(1 for region in regions if client.playground.sizes.of(region).rows)

        eventually(lambda: holding() == 4)
        sizes = [client.playground.sizes.of(region).rows for region in client.playground.regions.all()]
        assert sum(sizes) == 100
        assert max(sizes) <= 50


def _put_while_splitting(client: Client, key: bytes, value: bytes) -> None:
    """Put again as long as the key's region has just been split."""
    eventually(lambda: not client.put(key, value).HasField("region_error"))


def test_large_regions_are_halved(tmp_path: Path) -> None:
    """A region above the split size is split in the middle of its bytes, again and again."""
    with running(tmp_path, region_split_size=20_000) as client:
        for number in range(60):
            _put_while_splitting(client, b"key%03d" % number, b"v" * 1000)
        regions, sizes = client.playground.regions, client.playground.sizes
        eventually(lambda: max(sizes.of(region).size for region in regions.all()) <= 20_000)
        assert len([region for region in regions.all() if region.start < b"l"]) >= 4
        assert all(client.get(b"key%03d" % number) for number in range(60))


def test_leaders_are_spread(tmp_path: Path) -> None:
    """PD gives every store about as many leaders as the others, unless its scheduler is paused."""
    with running(tmp_path, regions=6, balance=True) as client:
        regions = client.playground.regions

        def led() -> list[int]:
            return [len(regions.led_by(store)) for store in client.playground.nodes]

        eventually(lambda: len(regions.all()) == 10)
        eventually(lambda: max(led()) - min(led()) <= 1)


def test_single_replicas_are_spread(tmp_path: Path) -> None:
    """With one replica the regions themselves move to the other stores, which their epochs show."""
    with running(tmp_path, replicas=1, regions=6, balance=True) as client:
        regions = client.playground.regions
        eventually(lambda: len(regions.all()) == 10)
        eventually(lambda: {len(regions.led_by(store)) for store in client.playground.nodes} <= {3, 4})
        assert all(len(region.peers) == 1 for region in regions.all())
        assert any(region.conf_ver == 3 for region in regions.all())
