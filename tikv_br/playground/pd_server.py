"""PD's servers: its members and their ports, and changes of its leader on demand.

PD's gRPC services: members, time, stores, regions, safe points, keyspaces; worded as PD 8.5.2 words them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from tikv_br.cluster.pb import keyspacepb_pb2, pdpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.admin import Admin
from tikv_br.playground.failpoints import FailpointInterceptor, FailpointTable
from tikv_br.playground.pd_etcd import EtcdService
from tikv_br.playground.pd_gc import BARRIERS, GcCalls, GcRefusal
from tikv_br.playground.pd_http import PdHttpApi
from tikv_br.playground.pd_state import KeyspaceRecord, PdState
from tikv_br.playground.region import Region
from tikv_br.playground.servers import (
    ANY_PORT,
    LOOPBACK,
    HttpServer,
    Reply,
    Request,
    ReservedPort,
    bidi,
    ssl_context,
    start_server,
    unary,
)
from tikv_br.playground.settings import TlsSettings
from tikv_br.playground.store_state import CallClock
from tikv_br.playground.timestamps import LOGICAL_BITS

if TYPE_CHECKING:
    from tikv_br.playground.servers import Handler


Answer: TypeAlias = Any
"""A response of any of PD's RPCs."""
_CLUSTERLESS: Final = frozenset({"GetMembers", "GetClusterInfo", "LoadGlobalConfig", "StoreGlobalConfig"})
"""RPCs without a cluster id."""
_NO_TSO: Final = "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, "


class PdRefusal(Exception):
    """An error for the response's header."""

    def __init__(self, kind: pdpb_pb2.ErrorType.ValueType, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PdService:
    """``pdpb.PD`` and ``keyspacepb.Keyspace``."""

    def __init__(self, state: PdState, index: int = 0) -> None:
        """Create the service of member ``index``."""
        self._state = state
        self._index = index

    def add_to(self, server: grpc.Server) -> None:
        pd = {name: self._handler(pdpb_pb2, name, call) for name, call in self._calls().items()}
        pd["Tso"] = bidi(pdpb_pb2.TsoRequest, self._tso)
        keyspace = {
            "LoadKeyspace": self._handler(keyspacepb_pb2, "LoadKeyspace", self._load_keyspace),
            "GetAllKeyspaces": self._handler(keyspacepb_pb2, "GetAllKeyspaces", self._all_keyspaces),
        }
        services = {"pdpb.PD": pd}
        if self._state.settings.release.has_keyspaces:
            services["keyspacepb.Keyspace"] = keyspace
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, calls) for name, calls in services.items()]
        )

    def _calls(self) -> dict[str, Callable[[Any], Answer]]:
        regions = self._state.regions
        return {
            "GetMembers": self._members,
            "GetClusterInfo": lambda _: pdpb_pb2.GetClusterInfoResponse(serviceModes=[pdpb_pb2.PD_SVC_MODE]),
            "AllocID": lambda request: pdpb_pb2.AllocIDResponse(
                id=regions.alloc_id(request.count or 1), count=request.count
            ),
            "IsBootstrapped": lambda _: pdpb_pb2.IsBootstrappedResponse(bootstrapped=True),
            "Bootstrap": self._bootstrap,
            "GetStore": self._store,
            "GetAllStores": self._all_stores,
            "GetRegion": lambda request: _region_response(regions.locate(request.region_key)),
            "GetPrevRegion": lambda request: _region_response(regions.previous(request.region_key)),
            "GetRegionByID": lambda request: _region_response(regions.get(request.region_id)),
            "ScanRegions": self._scan_regions,
            "BatchScanRegions": self._batch_scan_regions,
            "AskBatchSplit": self._ask_batch_split,
            "SplitRegions": self._split_regions,
            "ScatterRegion": self._scatter,
            "GetOperator": self._operator,
            "StoreGlobalConfig": self._store_config,
            "LoadGlobalConfig": self._load_config,
            **GcCalls(self._state.gc).by_name(),
        }

    def _handler(self, module: Any, name: str, call: Callable[[Any], Answer]) -> Handler:  # noqa: ANN401
        method = next(
            found
            for service in module.DESCRIPTOR.services_by_name.values()
            for found in service.methods
            if found.name == name
        )
        request_type = getattr(module, method.input_type.name)
        response_type = getattr(module, method.output_type.name)
        has_header = "header" in method.output_type.fields_by_name

        def refused(kind: pdpb_pb2.ErrorType.ValueType, message: str) -> Message:
            error = pdpb_pb2.Error(type=kind, message=message)
            return response_type(header=pdpb_pb2.ResponseHeader(error=error))  # type: ignore[no-any-return]

        def answer(request: Any, context: grpc.ServicerContext) -> Answer:  # noqa: ANN401
            if name != "GetMembers" and self._state.leader != self._index:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not leader")
            if name not in _CLUSTERLESS:
                self._check_cluster(request.header.cluster_id, context)
            if name in BARRIERS and not self._state.gc.has_barriers:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, f"unknown method {name} for service pdpb.PD")
            try:
                response = call(request)
            except GcRefusal as refusal:
                if name not in BARRIERS:
                    context.abort(grpc.StatusCode.UNKNOWN, str(refusal))
                response = refused(pdpb_pb2.UNKNOWN, str(refusal))
            except PdRefusal as refusal:
                response = refused(refusal.kind, str(refusal))
            if has_header:
                response.header.cluster_id = self._state.cluster_id
            return response

        return unary(request_type, answer)

    def _check_cluster(self, cluster_id: int, context: grpc.ServicerContext) -> None:
        if cluster_id != self._state.cluster_id:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"mismatch cluster id, need {self._state.cluster_id} but got {cluster_id}",
            )

    def _members(self, _: pdpb_pb2.GetMembersRequest) -> pdpb_pb2.GetMembersResponse:
        members = self._state.members()
        leader = members[self._state.named] if self._state.named is not None else None
        return pdpb_pb2.GetMembersResponse(members=members, leader=leader, etcd_leader=leader)

    def _tso(
        self, requests: Iterator[pdpb_pb2.TsoRequest], context: grpc.ServicerContext
    ) -> Iterator[pdpb_pb2.TsoResponse]:
        for request in requests:
            if reason := self._no_tso():
                context.abort(grpc.StatusCode.UNKNOWN, f"{_NO_TSO}{reason}")
            self._check_cluster(request.header.cluster_id, context)
            try:
                last = self._state.tso.next(request.count)
            except ValueError:
                context.abort(grpc.StatusCode.UNKNOWN, f"{_NO_TSO}tso count should be positive")
            yield pdpb_pb2.TsoResponse(
                header=pdpb_pb2.ResponseHeader(cluster_id=self._state.cluster_id),
                count=request.count,
                timestamp=pdpb_pb2.Timestamp(physical=last >> LOGICAL_BITS, logical=last & (1 << LOGICAL_BITS) - 1),
            )

    def _no_tso(self) -> str:
        """Return the error text of a member that gives no timestamps; unlike other calls, Tso does not answer UNAVAILABLE."""
        state = self._state
        if state.leader == self._index:
            return ""
        if state.leader is None and state.named == self._index:  # elected, and not serving yet
            return "timestamp in memory isn't initialized"
        if state.leader is None and state.former == self._index:
            return "requested is not leader anymore"
        return "requested pd is not leader of cluster"

    def _bootstrap(self, _: pdpb_pb2.BootstrapRequest) -> Message:
        raise PdRefusal(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")

    def _store(self, request: pdpb_pb2.GetStoreRequest) -> pdpb_pb2.GetStoreResponse:
        node = self._state.nodes.get(request.store_id)
        if node is None:
            raise PdRefusal(pdpb_pb2.UNKNOWN, f"invalid store ID {request.store_id}, not found")
        return pdpb_pb2.GetStoreResponse(store=self._state.store(node), stats=pdpb_pb2.StoreStats())

    def _all_stores(self, _: pdpb_pb2.GetAllStoresRequest) -> pdpb_pb2.GetAllStoresResponse:
        return pdpb_pb2.GetAllStoresResponse(stores=[self._state.store(node) for node in self._state.nodes.values()])

    def _operator(self, _: pdpb_pb2.GetOperatorRequest) -> Message:
        """Refuse: there is no operator, since every change of a region is immediate."""
        raise PdRefusal(pdpb_pb2.REGION_NOT_FOUND, "Not Found")

    def _scan_regions(self, request: pdpb_pb2.ScanRegionsRequest) -> pdpb_pb2.ScanRegionsResponse:
        found = self._state.regions.overlapping(request.start_key, request.end_key, request.limit)
        return pdpb_pb2.ScanRegionsResponse(
            region_metas=[region.to_pb() for region in found],
            leaders=[region.leader.to_pb() for region in found],
            regions=_region_messages(found),
        )

    def _batch_scan_regions(self, request: pdpb_pb2.BatchScanRegionsRequest) -> pdpb_pb2.BatchScanRegionsResponse:
        """Regions that overlap any of several ranges, each region once."""
        last_end: bytes | None = None
        found: dict[int, Region] = {}
        for each in request.ranges:
            if each.end_key and each.start_key > each.end_key:
                raise PdRefusal(pdpb_pb2.UNKNOWN, "invalid key range, start key > end key")
            if last_end is not None and (not last_end or each.start_key < last_end):
                raise PdRefusal(pdpb_pb2.UNKNOWN, "invalid key range, ranges overlapped")
            last_end = each.end_key
            for region in self._state.regions.overlapping(each.start_key, each.end_key):
                found.setdefault(region.id, region)
        limited = list(found.values())[: request.limit if request.limit > 0 else None]
        return pdpb_pb2.BatchScanRegionsResponse(regions=_region_messages(limited))

    def _ask_batch_split(self, request: pdpb_pb2.AskBatchSplitRequest) -> pdpb_pb2.AskBatchSplitResponse:
        ids = []
        for _ in range(request.split_count):
            region_id = self._state.regions.alloc_id()
            peers = [self._state.regions.alloc_id() for _ in request.region.peers]
            ids.append(pdpb_pb2.SplitID(new_region_id=region_id, new_peer_ids=peers))
        return pdpb_pb2.AskBatchSplitResponse(ids=ids)

    def _split_regions(self, request: pdpb_pb2.SplitRegionsRequest) -> pdpb_pb2.SplitRegionsResponse:
        regions = self._state.regions
        for key in request.split_keys:
            regions.split(regions.locate(key).id, [key])
        ids = [regions.locate(key).id for key in request.split_keys]
        return pdpb_pb2.SplitRegionsResponse(finished_percentage=100, regions_id=ids)

    def _scatter(self, request: pdpb_pb2.ScatterRegionRequest) -> pdpb_pb2.ScatterRegionResponse:
        ids = list(request.regions_id) or [request.region_id or request.region.id]
        alive = [node.store_id for node in self._state.nodes.values() if node.alive]
        failed = self._state.regions.scatter(ids, alive)
        done = 100 * (len(ids) - len(failed)) // len(ids)
        return pdpb_pb2.ScatterRegionResponse(finished_percentage=done, failed_regions_id=failed)

    def _store_config(self, request: pdpb_pb2.StoreGlobalConfigRequest) -> pdpb_pb2.StoreGlobalConfigResponse:
        changes = {each.name: None if each.kind == pdpb_pb2.DELETE else each.value for each in request.changes}
        self._state.store_global_config(request.config_path, changes)
        return pdpb_pb2.StoreGlobalConfigResponse()

    def _load_config(self, request: pdpb_pb2.LoadGlobalConfigRequest) -> pdpb_pb2.LoadGlobalConfigResponse:
        values = self._state.load_global_config(request.config_path)
        items = [pdpb_pb2.GlobalConfigItem(name=name, payload=value.encode()) for name, value in values.items()]
        return pdpb_pb2.LoadGlobalConfigResponse(items=items, revision=1)

    def _load_keyspace(self, request: keyspacepb_pb2.LoadKeyspaceRequest) -> keyspacepb_pb2.LoadKeyspaceResponse:
        keyspace = self._state.keyspaces.load(request.name)
        if keyspace is None:
            raise PdRefusal(pdpb_pb2.ENTRY_NOT_FOUND, "keyspace does not exist")
        return keyspacepb_pb2.LoadKeyspaceResponse(keyspace=_keyspace(keyspace))

    def _all_keyspaces(self, request: keyspacepb_pb2.GetAllKeyspacesRequest) -> keyspacepb_pb2.GetAllKeyspacesResponse:
        found = [keyspace for keyspace in self._state.keyspaces.all() if keyspace.id >= request.start_id]
        listed = found[: request.limit] if request.limit else found
        return keyspacepb_pb2.GetAllKeyspacesResponse(keyspaces=[_keyspace(keyspace) for keyspace in listed])


def _keyspace(keyspace: KeyspaceRecord) -> keyspacepb_pb2.KeyspaceMeta:
    return keyspacepb_pb2.KeyspaceMeta(
        id=keyspace.id,
        name=keyspace.name,
        created_at=keyspace.created_at,
        state_changed_at=keyspace.created_at,
    )


def _region_response(region: Region | None) -> pdpb_pb2.GetRegionResponse:
    if region is None:
        return pdpb_pb2.GetRegionResponse()
    return pdpb_pb2.GetRegionResponse(region=region.to_pb(), leader=region.leader.to_pb())


def _region_messages(regions: Iterable[Region]) -> list[pdpb_pb2.Region]:
    return [pdpb_pb2.Region(region=region.to_pb(), leader=region.leader.to_pb()) for region in regions]


PD: Final = 0
"""The store id under which failpoints know PD."""
ANSWER_SECONDS: Final = 0.2
"""Delay before PD goes down: its port also serves the admin API, which must answer first."""
ELECTION_SECONDS: Final = 0.3
"""Seconds from the election of PD's leader until it serves, and from then until stores have found it."""
_HTTP2: Final = b"PRI * HTTP/2.0"
_CHUNK: Final = 1 << 16
_STOP_SECONDS: Final = 5.0
_ACCEPT_SECONDS: Final = 0.02
"""Delay for connections being accepted when the listener closes; they would stay open without an answer."""


class Front:
    """PD's port: ends TLS, and passes each connection on to the gRPC or the HTTP server, by its first bytes.

    One thread, one event loop.
    """

    def __init__(self, address: str, grpc_port: int, http_port: int, tls: TlsSettings | None = None) -> None:
        self.grpc_port, self.http_port = grpc_port, http_port
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        context = None
        if tls is not None:
            context = ssl_context(tls)
            context.set_alpn_protocols(["h2", "http/1.1"])
        host, _, port = address.rpartition(":")
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, host, int(port), ssl=context)
            )
        except OSError as error:
            self._loop.close()
            raise PlaygroundError(f"cannot listen on {address}: {error.strerror}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="pd-front", daemon=True)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(_ACCEPT_SECONDS)
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await self._idle.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        self._idle.clear()
        try:
            # A client that disconnects, or speaks no TLS, ends its own connection and nothing else.
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await self._serve(reader, writer)
        finally:
            writer.close()
            self._clients.discard(writer)
            if not self._clients:
                self._idle.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(_CHUNK)
        while first and len(first) < len(_HTTP2) and _HTTP2.startswith(first):
            more = await reader.read(_CHUNK)
            if not more:
                return
            first += more
        if not first:
            return
        port = self.grpc_port if first.startswith(_HTTP2) else self.http_port
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, port)
        inner_writer.write(first)
        pumps = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            inner_writer.transport.abort()  # not `close`, which may still wait for the server when the loop ends


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()


class PdServer:
    """The members of PD. To be started once."""

    def __init__(self, state: PdState, api: PdHttpApi, failpoints: FailpointTable) -> None:
        self._state, self._api, self._failpoints = state, api, failpoints
        self._http: HttpServer | None = None
        self._members: list[grpc.Server] = []
        self._fronts: list[Front] = []
        self._closed: list[Front] = []
        self._reserved: list[ReservedPort] = []
        self._change: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, admin: Admin, ports: Mapping[str, int]) -> None:
        """Start all members, on the ports of before if they are free. Raises `PlaygroundError` if ``--port`` is taken.

        PD's HTTP port also serves the admin API.
        """
        self._http = HttpServer(lambda request: admin.handle(request) or self._answer(request))
        for index in range(self._state.settings.pd_members):
            failpoints = FailpointInterceptor(self._failpoints, PD, CallClock())  # `calls` counts only calls of stores
            service = PdService(self._state, index)
            etcd = EtcdService(self._state.etcd, lambda: self._state.leader is not None)
            member, port = start_server(ANY_PORT, [service.add_to, etcd.add_to], interceptors=[failpoints])
            self._members.append(member)
            self._fronts.append(self._open_front(index, port, self._http.port, ports))
        self._state.addresses = [f"{LOOPBACK}:{front.port}" for front in self._fronts]

    def stop(self) -> None:
        """Close all ports, after a change of the leader that is under way."""
        self._stopping.set()
        if self._change is not None:
            self._change.join()
        for front in self._fronts:
            front.close()
        if self._http is not None:
            self._http.close()
        for member in self._members:
            member.stop(None)

    @property
    def ports(self) -> dict[str, int]:
        return {_name(index): front.port for index, front in enumerate(self._fronts)}

    def kill(self, seconds: float) -> None:
        """Stop PD shortly afterwards, as kill -9 does, for so many seconds; the stores continue."""
        self._change_by((ANSWER_SECONDS, self._close), (seconds, self._reopen))

    def move_leader(self, seconds: float) -> None:
        """End the leadership of PD's leader; after so many seconds the next member leads, which is the same one if it is alone.

        For the second half of that time, the next one is known as the leader, and does not serve yet.
        """
        elect, serve = self._elections()
        self._change_by((seconds / 2, elect), (seconds / 2, serve))
        self._state.end_leadership()
        self._state.named = None

    def kill_leader(self, seconds: float, lease: float = 1.0) -> None:
        """Stop PD's leader shortly afterwards, as kill -9 does, for so many seconds.

        The others name it as the leader until its lease ends. Then the next one leads; stores find it a moment later.
        """
        if self._state.settings.pd_members == 1:
            raise PlaygroundError("PD has only one member: kill-pd stops it")
        elect, serve = self._elections()
        rest = max(0.0, seconds - lease - 2 * ELECTION_SECONDS)
        self._change_by(
            (ANSWER_SECONDS, self._close_leader),
            (lease, elect),
            (ELECTION_SECONDS, serve),
            (rest, self._reopen),
        )

    def _elections(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Let the others name the next member as the leader; let it lead."""
        following = ((self._state.leader or 0) + 1) % self._state.settings.pd_members

        def elect() -> None:
            self._state.named = following

        def serve() -> None:
            self._state.lead(following)
            self._stopping.wait(ELECTION_SECONDS if self._state.died is not None else 0)
            self._state.tso.available = True

        return elect, serve

    def _change_by(self, *steps: tuple[float, Callable[[], None]]) -> None:
        """Take steps one by one in a thread, each after so many seconds."""
        if self._change is not None and self._change.is_alive():
            raise PlaygroundError("PD is down already, about to be, or has no leader")

        def run() -> None:
            for seconds, step in steps:
                self._stopping.wait(seconds)  # less if the playground ends
                step()

        self._change = threading.Thread(target=run, name="pd-change", daemon=True)
        self._change.start()

    def _open_front(self, index: int, grpc_port: int, http_port: int, ports: Mapping[str, int]) -> Front:
        """The port of a member of PD: of the first the one that was asked for, else the one of before, if it is free."""
        asked = self._state.settings.pd_port if index == 0 else 0
        address = f"{LOOPBACK}:{asked or ports.get(_name(index), 0)}"
        try:
            return Front(address, grpc_port, http_port, self._state.settings.tls)
        except PlaygroundError:
            if asked:
                raise
            return Front(ANY_PORT, grpc_port, http_port, self._state.settings.tls)

    def _answer(self, request: Request) -> Reply:
        """Answer as the leader does, to which members pass requests on; while there is none, as a member that has found none."""
        state = self._state
        if state.leader is not None:
            return self._api.handle(request)
        if state.named is None:
            return Reply(HTTPStatus.SERVICE_UNAVAILABLE, b"no leader\n", "text/plain; charset=utf-8")
        text = b"redirect failed\n" if state.named == state.died else b"redirect to not leader\n"
        return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain; charset=utf-8")

    def _close_leader(self) -> None:
        self._state.end_leadership()
        self._state.died = self._state.former
        self._close()

    def _close(self) -> None:
        """Close the port of the dead member, or of all; they refuse connections."""
        self._state.tso.available = False
        died = self._state.died
        self._closed = self._fronts if died is None else [self._fronts[died]]
        for front in self._closed:
            front.close()
        self._reserved = [ReservedPort(front.port) for front in self._closed]

    def _reopen(self) -> None:
        ports = {front.port for front in self._closed}
        self._fronts = [
            Front(f"{LOOPBACK}:{front.port}", front.grpc_port, front.http_port, self._state.settings.tls)
            if front.port in ports
            else front
            for front in self._fronts
        ]
        for port in self._reserved:
            port.close()
        self._closed, self._reserved, self._state.died = [], [], None
        self._state.tso.available = True


def _name(index: int) -> str:
    """The key of a member's port; the first one's is the key of earlier playgrounds."""
    return "pd" if index == 0 else f"pd{index + 1}"
