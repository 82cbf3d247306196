"""Differences of a playground that emulates an older or newer TiKV."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.playground.clients import Client, running
from tests.integration.playground.feeds import feeding
from tests.integration.playground.ssts import backup, download, files_of, local, meta_for, rows_in
from tests.support.playground_admin import PlaygroundAdmin
from tests.support.txn import TxnClient, put
from tikv_br.cluster.pb import cdcpb_pb2, import_sstpb_pb2, keyspacepb_pb2, keyspacepb_pb2_grpc, kvrpcpb_pb2, pdpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table
from tikv_br.playground.node import FEED_OF_RAW_ROWS


def status_of(call: Callable[[], object]) -> grpc.StatusCode:
    """Status of a call."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


V1TTL, V2 = ApiVersion.V1TTL, ApiVersion.V2
Event = cdcpb_pb2.Event


def get(address: str, path: str) -> Any:  # noqa: ANN401
    """The JSON at a path."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        return json.load(answer)


def properties(client: Client, folder: Path) -> dict[str, int]:
    """TiKV's numeric properties of the one file that a backup writes."""
    [file] = files_of(backup(client, storage_backend=local(folder)))
    data = (folder / file.name).read_bytes()
    assert len(rows_in(data, folder)) == file.total_kvs
    found = Table(MemorySource(data)).properties
    return {
        name: int.from_bytes(value, "big")
        for name, value in found.items()
        if name.startswith("tikv.") and len(value) == 8
    }


def test_the_version_is_what_servers_report(tmp_path: Path) -> None:
    """PD's cluster version, its own, and those of its stores by gRPC and HTTP."""
    with running(tmp_path, stores=1, tikv_version="6.5.3") as client:
        pd = client.playground.state.address
        assert get(pd, "/pd/api/v1/config/cluster-version") == "6.5.3"
        assert get(pd, "/pd/api/v1/version")["version"] == "v6.5.3"
        assert get(pd, "/pd/api/v1/stores")["stores"][0]["store"]["version"] == "6.5.3"
        stores = client.pd.GetAllStores(pdpb_pb2.GetAllStoresRequest(header=client.header)).stores
        assert [store.version for store in stores] == ["6.5.3"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("5.4", None), ("6.2", None), ("6.3", "available-interval"), ("6.5", "alloc-ahead-buffer")],
)
def test_settings_of_timestamps_by_version(tmp_path: Path, version: str, expected: str | None) -> None:
    """The age of cached timestamps has another name, or none, and 5.4 has no such section."""
    with running(tmp_path, V2, stores=1, tikv_version=version, ts_ahead=1.5) as client:
        [node] = client.playground.nodes.values()
        config = get(node.status_address, "/config")
    assert ("causal-ts" in config) == (version != "5.4")
    found = {name: value for name, value in config.get("causal-ts", {}).items() if "renew" not in name}
    assert found == ({expected: "1500ms"} if expected else {})


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("6.3", set()),
        ("6.5.3", {"num_rows", "min_ts", "max_ts"}),
        ("7.1.1", {"num_rows", "min_ts", "max_ts"}),
        ("7.1.2", {"num_rows", "min_ts", "max_ts", "min_expire_ts", "max_expire_ts"}),
    ],
)
def test_properties_of_files_by_version(tmp_path: Path, version: str, expected: set[str]) -> None:
    """V2 files name no expiry before its collector was fixed, and nothing before 6.4; timestamps are those of the rows."""
    with running(tmp_path / "v2", V2, stores=1, tikv_version=version) as client:
        before = client.playground.tso.next()
        client.playground.nodes[1].causal.flush()
        client.put(b"key", b"value")
        client.put(b"passing", b"value", ttl=1000)
        found = properties(client, tmp_path / "files")
    assert set(found) == {f"tikv.{name}" for name in expected}
    if expected:
        assert found["tikv.num_rows"] == 2
        assert before < found["tikv.min_ts"] < found["tikv.max_ts"]


@pytest.mark.parametrize(("version", "has_garbage"), [("6.3", False), ("6.5.3", True), ("6.5.4", False)])
def test_properties_of_v1ttl_files(tmp_path: Path, version: str, has_garbage: bool) -> None:
    """The expiry is right in every version; from 6.4 to the fix the end of a key is taken for a timestamp."""
    with running(tmp_path / "v1ttl", V1TTL, stores=1, tikv_version=version) as client:
        client.put(b"a key of some length", b"value", ttl=1000)
        found = properties(client, tmp_path / "files")
    assert found["tikv.max_expire_ts"] == pytest.approx(time.time() + 1000, abs=60)
    assert ("tikv.num_rows" in found) == has_garbage
    if has_garbage:
        assert found["tikv.max_ts"] == (1 << 64) - 1 - int.from_bytes(b"e length", "big")


def test_files_of_5_4_are_not_counted(tmp_path: Path) -> None:
    """No checksum, the bytes of encoded values, expired rows too, and no conversion."""
    with running(tmp_path / "v1ttl", V1TTL, stores=1, tikv_version="5.4") as client:
        client.playground.engine.write([(b"zgone", b"v" + (5).to_bytes(8, "big"))])
        client.put(b"key", b"value")
        answers = backup(client, storage_backend=local(tmp_path / "files"), dst_api_version=kvrpcpb_pb2.V2)
    assert {answer.api_version for answer in answers} == {kvrpcpb_pb2.V1TTL}
    [file] = files_of(answers)
    assert (file.crc64xor, file.total_kvs) == (0, 2)
    assert file.total_bytes == len(b"gone" + b"v" + b"key" + b"value") + 2 * 8


@pytest.mark.parametrize(("version", "flushes"), [("6.1", False), ("6.2", True)])
def test_the_flush_by_version(tmp_path: Path, version: str, flushes: bool) -> None:
    """Before 6.2 a backup leaves the cached timestamps as they are."""
    with running(tmp_path, V2, stores=1, tikv_version=version) as client:
        [node] = client.playground.nodes.values()
        now = client.playground.tso.next()
        node.causal.renew = lambda: None  # type: ignore[method-assign] # no renewal in between
        backup(client)
        assert (node.causal.next_ts() > now) == flushes


def test_v2_of_5_4_keeps_keys_as_they_come(tmp_path: Path) -> None:
    """Rows are stored without encoding and timestamp, and read and deleted all the same."""
    with running(tmp_path, V2, stores=1, tikv_version="5.4") as client:
        client.put(b"key", b"old")
        client.put(b"key", b"value")
        client.put(b"passing", b"value", ttl=1000)
        stored = dict(client.playground.engine.iterate(b"zr", b"zs"))
        assert stored[b"zr\0\0\0key"] == b"value\0"
        assert len(stored) == 2
        assert client.get(b"key") == b"value"
        client.call("RawDelete", b"key", kvrpcpb_pb2.RawDeleteRequest(key=client.key(b"key")))
        assert client.get(b"key") is None


def test_a_raw_feed_of_5_4_is_one_of_transactions(tmp_path: Path) -> None:
    """Resolved-ts advances and no row comes; a raw write would crash the store."""
    with (
        running(tmp_path, V2, stores=1, tikv_version="5.4", resolved_ts_interval=0.02) as client,
        feeding(client, 1, "EventFeed") as feed,
    ):
        client.put(b"key", b"value")
        region = client.region(b"key")
        feed.register(region)
        feed.await_(lambda: feed.resolved(region.id))
        client.put(b"key", b"later")
        before = feed.resolved(region.id)
        feed.await_(lambda: feed.resolved(region.id) > before)
        assert {row.type for row in feed.rows()} == {Event.INITIALIZED}
        admin = PlaygroundAdmin(client.playground.state.address)
        assert [request["what"] for request in admin.fatal_requests()] == [FEED_OF_RAW_ROWS]
        admin.pardon()


def test_a_raw_feed_of_6_1_never_advances(tmp_path: Path) -> None:
    """Rows come, resolved-ts do not."""
    with (
        running(tmp_path, V2, stores=1, tikv_version="6.1", resolved_ts_interval=0.02) as client,
        feeding(client, 1, "EventFeed") as feed,
    ):
        region = client.region(b"key")
        feed.register(region)
        feed.await_initialized()
        client.put(b"key", b"value")
        feed.await_(lambda: any(row.value == b"value" for row in feed.rows()))
        time.sleep(0.2)
        assert feed.resolved(region.id) == 0


def test_feeds_before_7_3(tmp_path: Path) -> None:
    """There is no EventFeedV2; a Deregister and the registration after it are refused as duplicates."""
    with running(tmp_path, V2, stores=1, tikv_version="7.1") as client:
        with feeding(client, 1) as feed:
            assert feed.await_end() is grpc.StatusCode.UNIMPLEMENTED
        with feeding(client, 1, "EventFeed") as feed:
            region = client.region(b"key")
            feed.register(region)
            feed.await_initialized()
            feed.deregister(region_id=region.id)
            feed.await_error(region.id, "duplicate_request")
            feed.register(region, request_id=2)
            feed.await_(lambda: feed.errors() == [(region.id, "duplicate_request")] * 2)


@pytest.mark.parametrize(("version", "reads_type"), [("7.0", False), ("7.1", True)])
def test_downloads_of_plain_keys(tmp_path: Path, version: str, reads_type: bool) -> None:
    """Before 7.1 a download has no type, so a plain range is not that of the encoded keys."""
    with running(tmp_path / "cluster", V2, stores=1, tikv_version=version) as client:
        TxnClient(client).write(put(b"x\0\0\1key"))
        storage = local(tmp_path / "backup")
        asked = {"is_raw_kv": False, "start_key": b"x\0\0\1", "end_key": b"x\0\0\2", "storage_backend": storage}
        [file] = files_of(backup(client, 1, end_version=client.playground.tso.next(), **asked))
        region, span = client.region(b"k"), import_sstpb_pb2.Range(start=b"x\0\0\1key", end=b"x\0\0\1key\0")
        meta = meta_for(client, region, range=span, cf_name=file.cf, length=file.size)
        kind = import_sstpb_pb2.Keyspace
        answer = download(client, meta, 1, name=file.name, storage_backend=storage, request_type=kind)
        assert answer.is_empty != reads_type


@pytest.mark.parametrize(("version", "dropped"), [("6.2", False), ("6.3", True)])
def test_late_writes_by_version(tmp_path: Path, version: str, dropped: bool) -> None:
    """A write that is held beyond its deadline is dropped from 6.3 on."""
    with running(tmp_path, stores=1, tikv_version=version) as client:
        PlaygroundAdmin(client.playground.state.address).fail("RawPut", {"delay": {"seconds": 0.05}})
        region = client.region(b"key")
        context = client.context(region)
        context.max_execution_duration_ms = 10
        answer = client.store(1).RawPut(kvrpcpb_pb2.RawPutRequest(context=context, key=b"key", value=b"v"))
        assert answer.region_error.HasField("server_is_busy") == dropped
        assert client.get(b"key") == (None if dropped else b"v")


@pytest.mark.parametrize(("version", "checked"), [("7.5", False), ("8.1", True)])
def test_the_cluster_id_by_version(tmp_path: Path, version: str, checked: bool) -> None:
    """Stores refuse requests for another cluster from 8.0 on."""
    with running(tmp_path, stores=1, tikv_version=version) as client:
        context = client.context(client.region(b"key"))
        context.cluster_id = 7
        request = kvrpcpb_pb2.RawGetRequest(context=context, key=b"key")
        expected = grpc.StatusCode.INVALID_ARGUMENT if checked else grpc.StatusCode.OK
        assert status_of(lambda: client.store(1).RawGet(request)) is expected


@pytest.mark.parametrize(("version", "known"), [("6.2", False), ("6.3", True)])
def test_keyspaces_by_version(tmp_path: Path, version: str, known: bool) -> None:
    """PD knows no keyspaces before 6.3."""
    with running(tmp_path, stores=1, tikv_version=version) as client:
        stub = keyspacepb_pb2_grpc.KeyspaceStub(client.channel(client.playground.state.address))
        request = keyspacepb_pb2.LoadKeyspaceRequest(header=client.header, name="DEFAULT")
        expected = grpc.StatusCode.OK if known else grpc.StatusCode.UNIMPLEMENTED
        assert status_of(lambda: stub.LoadKeyspace(request)) is expected


@pytest.mark.parametrize(("version", "known"), [("8.5", False), ("9.0", True)])
def test_barriers_by_version(tmp_path: Path, version: str, known: bool) -> None:
    """GC barriers are those of PD 9.0."""
    with running(tmp_path, stores=1, tikv_version=version) as client:
        request = pdpb_pb2.SetGCBarrierRequest(header=client.header, barrier_id="b", barrier_ts=100, ttl_seconds=60)
        expected = grpc.StatusCode.OK if known else grpc.StatusCode.UNIMPLEMENTED
        assert status_of(lambda: client.pd.SetGCBarrier(request)) is expected
        listed = get(client.playground.state.address, "/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
        assert ("b" in {each["service_id"] for each in listed}) == known


def test_checksums_of_v2_before_6_1_1(tmp_path: Path) -> None:
    """The store compares bounds that are not encoded with keys that are."""
    sums = {}
    for version in ("6.1.0", "6.1.1"):
        with running(tmp_path / version, V2, stores=1, tikv_version=version) as client:
            client.put(b"12345678", b"value")
            key = client.key(b"12345678")
            span = kvrpcpb_pb2.KeyRange(start_key=key, end_key=key + b"\0")
            request = kvrpcpb_pb2.RawChecksumRequest(ranges=[span], algorithm=kvrpcpb_pb2.Crc64_Xor)
            sums[version] = client.call("RawChecksum", b"12345678", request).total_kvs
    assert sums == {"6.1.0": 0, "6.1.1": 1}
