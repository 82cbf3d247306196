"""A scripted PD and stores, and the messages that they speak."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.support.http_pd import HttpConnection
from tests.support.scripted_grpc import Entry, ScriptedServer
from tests.unit.cluster.http_server import ScriptedHttp
from tikv_br.cluster.clock import seconds_now
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import ClusterUnreachable, TikvBrError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec

CLUSTER_ID = 7
PD = "/pdpb.PD/"
KV = "/tikvpb.Tikv/"


def members(
    address: str, *others: str, leader: str | None = None, cluster_id: int = CLUSTER_ID
) -> pdpb_pb2.GetMembersResponse:
    """PD's members; the first leads unless said otherwise."""
    answer = pdpb_pb2.GetMembersResponse(header=pdpb_pb2.ResponseHeader(cluster_id=cluster_id))
    for each in (address, *others):
        answer.members.add(client_urls=[f"http://{each}"])
    answer.leader.client_urls.append(f"http://{leader or address}")
    return answer


def header_error(kind: int, message: str = "") -> pdpb_pb2.ResponseHeader:
    """A header that says no."""
    return pdpb_pb2.ResponseHeader(cluster_id=CLUSTER_ID, error=pdpb_pb2.Error(type=kind, message=message))  # type: ignore[arg-type]


def region(
    region_id: int, start: bytes, end: bytes, stores: Sequence[int] = (1,), version: int = 1
) -> metapb_pb2.Region:
    """A region with one peer a store; the peer's id is the region's times 10 plus the store's."""
    found = metapb_pb2.Region(
        id=region_id,
        start_key=start,
        end_key=end,
        region_epoch=metapb_pb2.RegionEpoch(conf_ver=1, version=version),
    )
    for store_id in stores:
        found.peers.add(id=region_id * 10 + store_id, store_id=store_id)
    return found


def with_leader(meta: metapb_pb2.Region, store_id: int | None = None) -> pdpb_pb2.Region:
    """PD's form of a region, led by the peer on a store (the first one's)."""
    leader = next(peer for peer in meta.peers if store_id in {None, peer.store_id})
    return pdpb_pb2.Region(region=meta, leader=leader)


def region_error(**kinds: object) -> errorpb_pb2.Error:
    """A region error of one kind."""
    return errorpb_pb2.Error(message="scripted", **kinds)  # type: ignore[arg-type]


class FakeCluster:
    """A scripted PD that knows its regions, and scripted stores 1..n."""

    def __init__(self, stores: int = 1) -> None:
        self.pd = ScriptedServer()
        self.stores = {store_id: ScriptedServer() for store_id in range(1, stores + 1)}
        self.regions: list[pdpb_pb2.Region] = [with_leader(region(1, b"", b"", range(1, stores + 1)))]
        self.pd.script(PD + "GetMembers", members(self.pd.address))
        self.pd.script(PD + "GetStore", self._store)
        self.pd.script(PD + "GetRegion", self._region)
        self.pd.script(PD + "ScanRegions", self.scan_answer)

    def close(self) -> None:
        """Stop all servers."""
        for server in (self.pd, *self.stores.values()):
            server.close()

    def config(self, **changes: object) -> ClusterConfig:
        """Config with long budgets, except for busy stores."""
        values = {"connect_timeout": 60.0, "request_timeout": 20.0, "retry_budget": 60.0, "busy_budget": 0.0} | changes
        return ClusterConfig(pd=(self.pd.address,), **values)  # type: ignore[arg-type]

    def kv(self, method: str, *entries: Entry, store_id: int = 1) -> None:
        """Script a method of a store."""
        self.stores[store_id].script(KV + method, *entries)

    def _store(self, data: bytes) -> pdpb_pb2.GetStoreResponse:
        store_id = pdpb_pb2.GetStoreRequest.FromString(data).store_id
        if store_id not in self.stores:
            return pdpb_pb2.GetStoreResponse(header=header_error(pdpb_pb2.UNKNOWN, "invalid store ID"))
        return pdpb_pb2.GetStoreResponse(store=metapb_pb2.Store(id=store_id, address=self.stores[store_id].address))

    def _region(self, data: bytes) -> pdpb_pb2.GetRegionResponse:
        key = pdpb_pb2.GetRegionRequest.FromString(data).region_key
        for found in self.regions:
            if found.region.start_key <= key and (not found.region.end_key or key < found.region.end_key):
                return pdpb_pb2.GetRegionResponse(region=found.region, leader=found.leader)
        return pdpb_pb2.GetRegionResponse()

    def scan_answer(self, data: bytes) -> pdpb_pb2.ScanRegionsResponse:
        """PD's answer to a scan."""
        request = pdpb_pb2.ScanRegionsRequest.FromString(data)
        found = [
            each
            for each in self.regions
            if (not each.region.end_key or request.start_key < each.region.end_key)
            and (not request.end_key or each.region.start_key < request.end_key)
        ]
        return pdpb_pb2.ScanRegionsResponse(regions=found[: request.limit or None])


def client(fake: FakeCluster, version: ApiVersion = ApiVersion.V1, keyspace: int = 0, **changes: object) -> RawClient:
    """A client of a scripted cluster, with changes of its config."""
    cluster = Cluster.connect(fake.config(**changes))
    return RawClient(cluster.router, KeyCodec(version, keyspace), cluster.cluster_id, now=lambda: seconds_now(0))


def pd_http(server: ScriptedHttp) -> PdHttp:
    """A client of a scripted HTTP port of PD; its connection never finds another leader."""
    config = ClusterConfig(pd=(server.address,), request_timeout=20.0, retry_budget=1.0)
    return PdHttp(HttpConnection(config, server.address))


def put_answer(error: errorpb_pb2.Error | None = None) -> kvrpcpb_pb2.RawPutResponse:
    """A store's answer to a put."""
    return kvrpcpb_pb2.RawPutResponse(region_error=error)


class FakeSafePoints(PdClient):
    """PD's safe points in memory; `fail` makes every call end with `error`."""

    def __init__(self) -> None:
        self.services: dict[str, tuple[int, int]] = {}
        self.gc = 0
        self.fail = False
        self.error: TikvBrError = ClusterUnreachable("PD is silent")
        self.calls = 0
        self.called = threading.Condition()

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """As PD before 9.0: the minimum over all services, and no error for one that is behind."""
        with self.called:
            self.calls += 1
            self.called.notify_all()
        if self.fail:
            raise self.error
        if ttl_seconds <= 0:
            self.services.pop(service_id, None)
        elif safe_point >= self.gc:
            self.services[service_id] = (safe_point, ttl_seconds)
        return min([self.gc, *(ts for ts, _ in self.services.values())]) if safe_point >= self.gc else self.gc

    def gc_safe_point(self) -> int:
        """The GC safe point."""
        return self.gc

    def wait_for_calls(self, calls: int) -> None:
        """Until so many updates were tried."""
        with self.called:
            assert self.called.wait_for(lambda: self.calls >= calls, timeout=60)
