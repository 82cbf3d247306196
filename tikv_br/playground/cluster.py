"""A whole playground in this process: PD, its stores, and what goes on between them."""

from __future__ import annotations

import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc

from formats.api_version import ApiVersion
from tikv_br.errors import PlaygroundError
from tikv_br.playground.admin import Admin
from tikv_br.playground.call_clock import CallClock
from tikv_br.playground.causal import RENEW_INTERVAL, CausalTimestamps
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.cdc_service import ChangeDataService
from tikv_br.playground.crimes import CrimeLog
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.engine import Engine
from tikv_br.playground.etcd import EtcdServer
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.front import Front
from tikv_br.playground.gc import GcState
from tikv_br.playground.http_server import HttpServer, Reply, Request
from tikv_br.playground.interceptor import PD, FailpointInterceptor
from tikv_br.playground.keyspaces import Keyspaces
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pace import Pace
from tikv_br.playground.pd_config import PdConfig
from tikv_br.playground.pd_http import PdHttp
from tikv_br.playground.pd_service import PdService
from tikv_br.playground.pd_state import PdState
from tikv_br.playground.raw_service import RawService
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.rpc import AddServices, start_server
from tikv_br.playground.scheduler import Scheduler, first_byte_bounds
from tikv_br.playground.settings import Settings
from tikv_br.playground.sizes import RegionSizes
from tikv_br.playground.sst_services import SstServices
from tikv_br.playground.store_server import StoreServer
from tikv_br.playground.tso import Tso

ANY_PORT: Final = "127.0.0.1:0"
PORT_SECONDS: Final = 5.0
"""For which a store that is restarted waits for its ports: gRPC may not have closed one yet, or another program listens there."""
PORT_POLL_SECONDS: Final = 0.05
_IDENTITY: Final = "identity"
_log = logging.getLogger(__name__)


class Playground:
    """Everything that a playground is made of. `start` it, `stop` it; not to be started twice."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = Engine.open(settings.path / "rocksdb")
        self.regions = RegionTable(self.engine)
        self.sizes = RegionSizes(self.engine, settings.data_weight)
        self.tso = Tso(self.engine, lambda: time.time() + settings.clock_ahead)
        self.failpoints = FailpointTable()
        self.changes = ChangeHub(self.regions, self.failpoints)
        self.crimes = CrimeLog(settings.path / "crimes.jsonl")
        self.calls = CallClock()
        self._identity = self._load_identity()
        self._nodes = {store_id: self._node(store_id) for store_id in self._identity["stores"]}
        self._sst = SstServices()
        for node in self._nodes.values():
            self._sst.add_store(node)
        self._stores = {
            store_id: StoreServer(node, self._services_of, settings, self.calls)
            for store_id, node in self._nodes.items()
        }
        self.state = PdState(
            settings=settings,
            cluster_id=self._identity["cluster_id"],
            engine=self.engine,
            regions=self.regions,
            sizes=self.sizes,
            tso=self.tso,
            gc=GcState(self.engine, barriers=settings.gc_barriers),
            keyspaces=Keyspaces(self.engine),
            nodes=self._nodes,
        )
        self._config = PdConfig(self.engine, replicas=settings.voters, stores=settings.stores)
        self._admin = Admin(self, self.regions, self.failpoints, self.crimes, self._sst.import_modes, self.calls)
        self._pd_http = PdHttp(self.state, self._config)
        self._scheduler = Scheduler(
            settings,
            self.engine,
            self.regions,
            self.sizes,
            encoding_of(settings.version),
            self._config,
            self._nodes,
        )
        self._etcd = EtcdServer(settings.path / "etcd", tls=settings.tls) if settings.etcd else None
        self._renewal_over = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="causal-ts", daemon=True)
        self._grpc: grpc.Server | None = None
        self._http: HttpServer | None = None
        self._front: Front | None = None

    @property
    def nodes(self) -> Mapping[int, StoreNode]:
        """Every store by its id, living or not."""
        return self._nodes

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open all ports and begin the chores. Raises `PlaygroundError` when a port that was asked for is taken."""
        if self._etcd is not None:
            self._etcd.start()
        self.regions.on_new_leader(self._sync_timestamps)
        for store in self._stores.values():
            self._start_store(store)
        self._start_pd()
        self._save_identity()
        self._scheduler.start()
        self._renewal.start()

    def stop(self) -> None:
        """Close all ports and the database."""
        self._renewal_over.set()
        if self._renewal.is_alive():
            self._renewal.join()
            self._scheduler.close()
        for server in (self._front, self._http):
            if server is not None:
                server.close()
        if self._grpc is not None:
            self._grpc.stop(None)
        for store in self._stores.values():
            store.stop()
            store.release()
        if self._etcd is not None:
            self._etcd.stop()
        self.engine.close()

    def kill_store(self, store_id: int) -> None:
        """Stop a store as kill -9 does; its regions get new leaders after the election timeout."""
        self.regions.set_store_down(store_id, down=True)
        self._stores[store_id].stop()

    def restart_store(self, store_id: int) -> None:
        """Start a dead store on the ports it had, with an empty cache of timestamps."""
        node = self._nodes[store_id]
        if not node.alive:
            node.causal = CausalTimestamps(self.tso, self.settings.ts_ahead)
            self._start_store(self._stores[store_id], PORT_SECONDS)
            self.regions.set_store_down(store_id, down=False)

    def describe(self) -> dict[str, Any]:
        """What ``playground start --output json`` prints, but for the process."""
        return {
            "pd": self.state.address,
            "stores": [
                {"id": node.store_id, "address": node.address, "status_address": node.status_address}
                for node in self._nodes.values()
            ],
            "dir": self.settings.directory,
            "api_version": self.settings.version.label,
            "cluster_id": self.state.cluster_id,
            "etcd": None if self._etcd is None else self._etcd.address,
            "tls": self.settings.tls is not None,
        }

    # -- inside -------------------------------------------------------------------------------------------------

    def _load_identity(self) -> dict[str, Any]:
        """Cluster id, stores and ports as they were, or a new cluster's."""
        kept = self.engine.get_meta(_IDENTITY)
        if kept is not None:
            identity: dict[str, Any] = json.loads(kept)
            return identity
        self.regions.clear()  # a start that was cut off may have left some
        cluster_id = self.settings.cluster_id or secrets.randbits(62) | 1 << 62
        identity = {"cluster_id": cluster_id, "stores": self._bootstrap(), "ports": {}}
        self.engine.put_meta({_IDENTITY: json.dumps(identity).encode()})
        return identity

    def _bootstrap(self) -> list[int]:
        """A new cluster as PD makes it: the first store, its region, then the other stores and their replicas."""
        settings, regions = self.settings, self.regions
        if not 0 < settings.voters <= settings.stores:
            raise PlaygroundError(f"{settings.voters} replicas need as many stores, there are {settings.stores}")
        stores = [regions.alloc_id()]
        first = regions.bootstrap(stores[0])
        stores += [regions.alloc_id() for _ in range(1, settings.stores)]
        for store_id in stores[1 : settings.voters]:
            regions.add_peer(first.id, store_id)
        regions.split(first.id, first_byte_bounds(encoding_of(settings.version), settings.regions))
        return stores

    def _node(self, store_id: int) -> StoreNode:
        ports = self._identity["ports"].get(str(store_id), {})
        data_dir = self.settings.path / f"store-{store_id}"
        data_dir.mkdir(exist_ok=True)
        return StoreNode(
            store_id=store_id,
            cluster_id=self._identity["cluster_id"],
            address=ports.get("address", ANY_PORT),
            status_address=ports.get("status_address", ANY_PORT),
            api_version=ApiVersion(self.settings.api_version),
            engine=self.engine,
            regions=self.regions,
            tso=self.tso,
            causal=CausalTimestamps(self.tso, self.settings.ts_ahead),
            failpoints=self.failpoints,
            crimes=self.crimes,
            changes=self.changes,
            sizes=self.sizes,
            data_dir=data_dir,
            pace=Pace(self.settings.store_speed, self.settings.data_weight),
        )

    def _services_of(self, node: StoreNode) -> Iterable[AddServices]:
        feeds = ChangeDataService(node, self.settings.resolved_ts_interval, self.settings.feed_quota)
        return [RawService(node).add_to, functools.partial(self._sst.add_to, node=node), feeds.add_to]

    def _start_store(self, store: StoreServer, patience: float = 0.0) -> None:
        """On the ports that it had; on others where those are not free within so many seconds."""
        until = time.monotonic() + patience
        while True:
            try:
                store.start()
            except PlaygroundError:  # somebody took a port while we were down
                store.stop()
                if time.monotonic() >= until:
                    break
                time.sleep(PORT_POLL_SECONDS)
            else:
                return
        _log.warning("store %d moves to other ports", store.node.store_id)
        store.release()
        store.node.address = store.node.status_address = ANY_PORT
        store.start()

    def _start_pd(self) -> None:
        settings = self.settings
        failpoints = FailpointInterceptor(self.failpoints, PD)
        self._grpc, grpc_port = start_server(ANY_PORT, [PdService(self.state).add_to], interceptors=[failpoints])
        self._http = HttpServer(self._answer)
        kept = self._identity["ports"].get("pd", 0)
        address = f"127.0.0.1:{settings.pd_port or kept}"
        try:
            self._front = Front(address, grpc_port, self._http.port, settings.tls)
        except PlaygroundError:
            if settings.pd_port:
                raise
            self._front = Front(ANY_PORT, grpc_port, self._http.port, settings.tls)
        self.state.address = f"127.0.0.1:{self._front.port}"

    def _answer(self, request: Request) -> Reply:
        """PD's HTTP port also serves the admin API."""
        admin = self._admin.handle(request.method, request.path, request.query, request.body)
        return self._pd_http.handle(request) if admin is None else Reply.json(admin[1], admin[0])

    def _save_identity(self) -> None:
        ports: dict[str, Any] = {
            str(node.store_id): {"address": node.address, "status_address": node.status_address}
            for node in self._nodes.values()
        }
        ports["pd"] = int(self.state.address.rpartition(":")[2])
        self._identity["ports"] = ports
        self.engine.put_meta({_IDENTITY: json.dumps(self._identity).encode()})

    def _sync_timestamps(self, region: Region) -> None:
        """A new leader's store drops its cached timestamps; until that is done V2 writes are refused."""

        def sync() -> None:
            node = self._nodes[region.leader_store]
            if node.alive:
                node.causal.flush()
            self.regions.mark_synced(region.id)

        timer = threading.Timer(self.settings.ts_sync_delay, sync)
        timer.daemon = True
        timer.start()

    def _renew(self) -> None:
        while not self._renewal_over.wait(RENEW_INTERVAL):
            for node in self._nodes.values():
                if node.alive:
                    node.causal.renew()


def open_playground(directory: Path, **changes: Any) -> Playground:  # noqa: ANN401 - the fields of Settings
    """A playground for tests that run it in their own process; not started yet."""
    settings = replace(Settings(directory=str(directory)), **changes)
    return Playground(settings)
