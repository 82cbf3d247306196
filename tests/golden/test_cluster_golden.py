"""The client reads what real servers answered as the recordings say."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.raw_calls import compare_and_swap, starts_of
from tests.support.scripted_grpc import Failure, ScriptedServer, fail
from tests.unit.cluster.fakes import PD, FakeCluster, pd_http
from tests.unit.cluster.fakes import members as members_of
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.cluster.pb import kvrpcpb_pb2, pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import REGION_PAGE
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.region_errors import RegionErrorSeen, kind_of
from tikv_br.cluster.scan import measure_with_protobuf
from tikv_br.cluster.topology import Store, StoreState, store_config
from tikv_br.errors import ApiVersionMismatch, ClusterError, ClusterUnfit, RequestRefused, UsageError
from tikv_br.formats import rawscan
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

CLUSTERS = {"v1": ApiVersion.V1, "v1ttl": ApiVersion.V1TTL, "v2": ApiVersion.V2}

Entry = dict[str, Any]


class Recording:
    """One cluster's recorded conversation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = json.loads((folder / "index.json").read_text())["entries"]

    def of(self, rpc: str) -> list[Entry]:
        """All entries of an RPC."""
        return [entry for entry in self.entries if entry["rpc"] == rpc]

    def one(self, rpc: str, condition: str) -> Entry:
        """An entry by its condition."""
        return next(entry for entry in self.of(rpc) if entry["condition"] == condition)

    def answers(self, entry: Entry) -> list[bytes]:
        """The answers' bytes."""
        return [(self.folder / name).read_bytes() for name in entry["response_files"]]

    def document(self, url: str) -> bytes:
        """A recorded HTTP document."""
        entry = next(entry for entry in self.of("HTTP") if entry["url"].startswith(url))
        name: str = entry["file"]
        return (self.folder / name).read_bytes()


@pytest.fixture(params=CLUSTERS)
def recording(request: pytest.FixtureRequest, golden: Path) -> Recording:
    """The recordings of each API version in turn."""
    return Recording(golden / "wire" / str(request.param))


@pytest.fixture
def version(recording: Recording) -> ApiVersion:
    """The recorded cluster's API version."""
    return CLUSTERS[recording.folder.name]


def decoded(text: str) -> bytes:
    """Bytes of the recordings' JSON."""
    return base64.b64decode(text)


def test_scans_read_as_recorded(recording: Recording) -> None:
    """Pages, region errors and errors in pairs of every recorded RawScan are distinguished, with the recorded contents."""
    pages = 0
    for entry in recording.of("RawScan"):
        for data, form in zip(recording.answers(entry), entry.get("responses", []), strict=True):
            pairs = form.get("kvs", [])
            if "region_error" in form:
                with pytest.raises(RegionErrorSeen) as caught:
                    measure_with_protobuf(data)
                assert caught.value.kind in {*form["region_error"], ""}
            elif pairs and "error" in pairs[0]:
                with pytest.raises((ApiVersionMismatch, RequestRefused)):
                    measure_with_protobuf(data)
            else:
                page = rawscan.parse(data)
                assert page is not None
                assert page == measure_with_protobuf(data).split()
                assert page.keys.to_pylist() == [decoded(pair.get("key", "")) for pair in pairs]
                assert page.values.to_pylist() == [decoded(pair.get("value", "")) for pair in pairs]
                pages += 1
    assert pages > 5


def test_region_errors_have_their_kind(recording: Recording) -> None:
    """Each recorded region error of a RawKV call is of the kind that its JSON names."""
    found = 0
    for entry in recording.entries:
        for form, data in zip(entry.get("responses", []), recording.answers(entry) if "responses" in entry else [], strict=True):  # fmt: skip
            recorded = form.get("region_error") if entry["rpc"].startswith("Raw") else None
            if recorded is not None:
                answer = getattr(kvrpcpb_pb2, entry["response_type"].split(".")[1]).FromString(data)
                assert kind_of(answer.region_error) == next((kind for kind in recorded if kind != "message"), "")
                found += 1
    assert found > 10


def test_every_recorded_error_text_has_a_class(recording: Recording, version: ApiVersion, fake: FakeCluster) -> None:
    """A recorded answer with an error string, put before the client, raises our error with the server's words."""
    cluster = Cluster.connect(fake.config())
    raw = RawClient(cluster.router, KeyCodec(version), cluster.cluster_id)
    calls: dict[str, Callable[[], object]] = {
        "RawGet": lambda: raw.get(b"k"),
        "RawPut": lambda: raw.put(b"k", b"v"),
        "RawDelete": lambda: raw.delete(b"k"),
        "RawBatchPut": lambda: raw.batch_put({b"k": b"v"}),
        "RawBatchDelete": lambda: raw.batch_delete([b"k"]),
        "RawDeleteRange": lambda: raw.delete_range(KeyRange(b"a", b"b")),
        "RawChecksum": lambda: raw.checksum(KeyRange(b"a", b"b")),
        "RawCompareAndSwap": lambda: compare_and_swap(raw, b"k", None, b"v"),
    }
    found = 0
    for rpc, call in calls.items():
        for entry in recording.of(rpc):
            text = entry["responses"][0].get("error", "")
            if text and "is out of [region" not in text:
                fake.kv(rpc, recording.answers(entry)[0])
                with pytest.raises((ClusterError, UsageError)) as caught:
                    call()
                assert text in str(caught.value)
                assert ("Api version" in text) <= isinstance(caught.value, ApiVersionMismatch)
                found += 1
    assert found > 5


def test_recorded_gets_and_checksums(recording: Recording, version: ApiVersion, fake: FakeCluster) -> None:
    """Values, missing keys and checksums come out of recorded answers as their JSON says."""
    cluster = Cluster.connect(fake.config())
    raw = RawClient(cluster.router, KeyCodec(version), cluster.cluster_id)
    for rpc in ("RawGet", "RawChecksum"):
        for entry in recording.of(rpc):
            form = entry["responses"][0]
            if "error" in form or "region_error" in form:
                continue
            fake.kv(rpc, recording.answers(entry)[0])
            if rpc == "RawGet":
                expected = None if form.get("not_found") else decoded(form.get("value", ""))
                assert raw.get(b"k") == expected
            else:
                found = raw.checksum(KeyRange(b"a", b"b"))
                numbers = [int(form.get(name, 0)) for name in ("checksum", "total_kvs", "total_bytes")]
                assert [found.crc64xor, found.total_kvs, found.total_bytes] == numbers


@pytest.fixture
def pd(recording: Recording) -> Iterator[tuple[PdClient, ScriptedServer]]:
    """A client of a PD that says it is the recorded one."""
    with ScriptedServer() as server:
        members = json.loads(recording.document("GET /pd/api/v1/members"))
        answer = members_of(server.address, cluster_id=members["header"]["cluster_id"])
        server.script(PD + "GetMembers", answer)
        with PdClient(ClusterConfig(pd=(server.address,), retry_budget=0.2)) as client:
            yield client, server


def test_recorded_regions(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """The recorded scan of all regions is contiguous, and each region's fields are those of its JSON."""
    client, server = pd
    entry = recording.one("PD/ScanRegions", "all")
    server.script(PD + "ScanRegions", recording.answers(entry)[0])
    found = client.scan_regions(b"", b"")
    for region, item in zip(found, entry["responses"][0]["regions"], strict=True):
        form = item["region"]
        assert (region.id, region.start, region.end) == (int(form["id"]), decoded(form.get("start_key", "")), decoded(form.get("end_key", "")))  # fmt: skip
        assert region.leader.id == int(item["leader"]["id"])
        assert (region.version, region.conf_ver) == (
            int(form["region_epoch"]["version"]),
            int(form["region_epoch"]["conf_ver"]),
        )


def test_recorded_stores(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """Store, and the refusal of an unknown one."""
    client, server = pd
    entry = recording.one("PD/GetStore", "ok")
    server.script(PD + "GetStore", recording.answers(entry)[0])
    assert client.store(1).version == entry["responses"][0]["store"]["version"]
    assert client.store(1).state is StoreState.UP
    server.script(PD + "GetStore", recording.answers(recording.one("PD/GetStore", "unknown"))[0])
    with pytest.raises(RequestRefused, match="invalid store ID 999, not found"):
        client.store(999)


def test_recorded_timestamps(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """The first of each recorded batch is its last minus count - 1."""
    client, server = pd
    entry = recording.one("PD/Tso", "two requests: 5, 100")
    for data, form, count in zip(recording.answers(entry), entry["responses"], (5, 100), strict=True):
        server.script(PD + "Tso", data)
        stamp = form["timestamp"]
        assert client.tso() == (int(stamp["physical"]) << 18) + int(stamp["logical"]) - count + 1


def test_recorded_failures_have_classes(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """PD's recorded gRPC failures: a wrong cluster id is unfit, a bad count refused, barriers unsupported."""
    client, server = pd
    server.script(PD + "GetAllStores", recorded_failure(recording.one("PD/GetAllStores", "wrong cluster id")))
    with pytest.raises(ClusterUnfit, match="mismatch cluster id"):
        client.stores()
    server.script(PD + "Tso", recorded_failure(recording.one("PD/Tso", "count 0")))
    with pytest.raises(RequestRefused, match="count should be positive"):
        client.tso()
    server.script(PD + "SetGCBarrier", recorded_failure(recording.one("PD/SetGCBarrier", "set")))
    with pytest.raises(CallUnsupported):
        client.connection.unary(lambda leader: leader.pd.SetGCBarrier, pdpb_pb2.SetGCBarrierRequest())


def recorded_failure(entry: Entry) -> Failure:
    """The failure that a server answered with."""
    return fail(entry["grpc_status"]["code"], entry["grpc_status"]["details"])


def test_recorded_safe_points(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """PD's answer is larger than the request if GC has passed; a held one is not."""
    client, server = pd
    for condition, lost in (("set br-x", False), ("behind the safe point", True)):
        entry = recording.one("PD/UpdateServiceGCSafePoint", condition)
        asked = int(entry["request"]["safe_point"])
        server.script(PD + "UpdateServiceGCSafePoint", recording.answers(entry)[0])
        assert (client.update_service_safe_point("br", 300, asked) > asked) is lost


def test_recorded_misses(recording: Recording, pd: tuple[PdClient, ScriptedServer]) -> None:
    """No operator, no such region, no such keyspace."""
    client, server = pd
    server.script(PD + "GetOperator", recording.answers(recording.one("PD/GetOperator", "no operator"))[0])
    assert client.operator(16) is None
    server.script(PD + "GetRegionByID", recording.answers(recording.one("PD/GetRegionByID", "miss"))[0])
    assert client.region_by_id(424242) is None
    keyspace = "/keyspacepb.Keyspace/LoadKeyspace"
    server.script(keyspace, recording.answers(recording.one("Keyspace/LoadKeyspace", "DEFAULT"))[0])
    assert client.keyspace_id("DEFAULT") == 0
    server.script(keyspace, recording.answers(recording.one("Keyspace/LoadKeyspace", "unknown name"))[0])
    with pytest.raises(UsageError):
        client.keyspace_id("nosuch")


def test_recorded_configurations_name_their_version(recording: Recording, version: ApiVersion) -> None:
    """A real store's whole /config is read as its API version."""
    with ScriptedHttp() as server:
        server.scripts["/config"] = [(200, recording.document("GET /config"))]
        store = Store(1, "127.0.0.1:1", server.address, StoreState.UP, "")
        assert store_config(store, TlsFiles(), 5.0).api_version is version


def test_recorded_pd_documents(recording: Recording) -> None:
    """Version, regions and schedulers of a real PD's HTTP answers."""
    paths = {"config/cluster-version", "schedulers", "stores"}
    with ScriptedHttp() as server:
        server.scripts = {f"/pd/api/v1/{path}": [(200, recording.document(f"GET /pd/api/v1/{path}"))] for path in paths}
        regions = recording.document("GET /pd/api/v1/regions")  # the form of a page, too
        server.scripts[f"/pd/api/v1/regions/key?key=&end_key=&limit={REGION_PAGE}"] = [(200, regions)]
        pd = pd_http(server)
        assert pd.cluster_version() == json.loads(recording.document("GET /pd/api/v1/config/cluster-version"))
        assert "balance-leader-scheduler" in pd.schedulers()
        assert not pd.silent_stores()
        form = recording.one("PD/ScanRegions", "all")["responses"][0]
        # A region that was split off between the two recordings is in the later one only.
        starts = {base64.b64decode(item["region"].get("start_key", "")) for item in form["regions"]}
        assert set(starts_of(pd.regions(b"", b""))) >= starts
