"""A whole playground in one process: PD, its stores, each with gRPC on its address and HTTP on its status address, and their lifecycle.

``python -m tikv_br.playground.cluster DIR`` runs the playground of a directory until SIGTERM or SIGINT. After a SIGKILL the
next start finds all data and uses the same ports.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc

from tikv_br import signals
from tikv_br.errors import PlaygroundError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.admin import Admin
from tikv_br.playground.backup_service import BackupService
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.cdc_stream import ChangeDataService
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.etcd import EtcdServer
from tikv_br.playground.failpoints import FailpointInterceptor, FailpointTable
from tikv_br.playground.home import Home
from tikv_br.playground.import_service import ImportService
from tikv_br.playground.node import StoreNode, TimestampRenewal
from tikv_br.playground.pd_config import PdConfig
from tikv_br.playground.pd_etcd import EtcdState
from tikv_br.playground.pd_gc import GcState
from tikv_br.playground.pd_http import PdHttpApi
from tikv_br.playground.pd_server import PdServer
from tikv_br.playground.pd_state import Keyspaces, PdState
from tikv_br.playground.region import RegionSizes
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.request_checks import MAX_KEY_SIZE
from tikv_br.playground.scheduler import Scheduler, first_byte_bounds
from tikv_br.playground.servers import ANY_PORT, AddServices, HttpServer, Reply, Request, ReservedPort, start_server
from tikv_br.playground.settings import SETTINGS_FILE, Settings
from tikv_br.playground.sst_file import SstStore
from tikv_br.playground.store_state import CallClock, FatalRequestLog, Pace, StoreImportMode
from tikv_br.playground.tikv_service import TikvService
from tikv_br.playground.timestamps import CausalTimestamps, Tso
from tikv_br.playground.txn.state import TxnState

_NOT_FOUND: Final = 404
_POLL_SECONDS: Final = 0.05
_log = logging.getLogger(__name__)


def _status_reply(request: Request, node: StoreNode, settings: Settings) -> Reply:
    """Answer ``/config``, as far as tools use it, and ``/status``; 404 for all other paths."""
    if request.path == "/status":
        return Reply()
    if request.path != "/config":
        return Reply(_NOT_FOUND, b"path not found")
    version = node.api_version
    causal = node.release.causal_config(settings.ts_ahead)
    return Reply.json(
        {
            "server": {"addr": node.address, "status-addr": node.status_address},
            "storage": {
                "data-dir": str(node.data_dir),
                "engine": "raft-kv",
                "max-key-size": MAX_KEY_SIZE,
                "api-version": 2 if version is ApiVersion.V2 else 1,
                "enable-ttl": version.has_ttl,
            },
            "raftstore": {"raft-entry-max-size": "8MiB"},
            "coprocessor": {
                "region-max-size": _readable(settings.region_split_size * 3 // 2),
                "region-split-size": _readable(settings.region_split_size),
            },
        }
        | ({"causal-ts": causal} if causal else {})
    )


def _readable(size: int) -> str:
    """A size as TiKV shows it: in the largest unit that divides it."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size}B"


ServicesOf = Callable[[StoreNode], Iterable[AddServices]]
"""Builds the services of a store that starts."""


class StoreServer:
    """Starts and stops one store, on the node's addresses. A stopped store's ports stay reserved. Thread-safe."""

    def __init__(self, node: StoreNode, services_of: ServicesOf, settings: Settings, clock: CallClock) -> None:
        self.node = node
        self._clock = clock
        self._services_of = services_of
        self._settings = settings
        self._lock = threading.Lock()
        self._reserved: list[ReservedPort] = []
        self._grpc: grpc.Server | None = None
        self._http: HttpServer | None = None

    def start(self, patience: float = 0.0) -> None:
        """Start on the node's addresses, unless it runs; on others if those are not free within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._open()
            except PlaygroundError:  # another program took a port while the store was down
                self.stop()
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_SECONDS)
        _log.warning("store %d moves to other ports", self.node.store_id)
        self.release_ports()
        self.node.address = self.node.status_address = ANY_PORT
        return self._open()

    def _open(self) -> None:
        """Open both ports, and set the node's addresses. Raises `PlaygroundError` if a port is taken."""
        node, settings = self.node, self._settings
        with self._lock:
            if self._grpc is not None:
                return
            if not self._reserved:
                for address in (node.address, node.status_address):
                    self._reserved.append(ReservedPort(int(address.rpartition(":")[2])))
                node.address, node.status_address = (port.address for port in self._reserved)
            failpoints = FailpointInterceptor(
                node.failpoints, node.store_id, self._clock, drops_late_writes=node.release.drops_late_writes
            )
            services = self._services_of(node)
            self._grpc, _ = start_server(node.address, services, interceptors=[failpoints], tls=settings.tls)
            self._http = HttpServer(
                lambda request: _status_reply(request, node, settings),
                node.status_address,
                settings.tls,
            )
            node.alive = True

    def stop(self) -> None:
        """Close both ports at once: calls in flight break off, as by kill -9."""
        with self._lock:
            if self.node.alive:
                self.node.died_at = time.time()
            self.node.alive = False
            if self._grpc is not None:
                self._grpc.stop(None)  # without waiting: one of its own calls may be the one that stops it
                self._grpc = None
            if self._http is not None:
                self._http.close()
                self._http = None

    def release_ports(self) -> None:
        """Release the ports of a store that is stopped for good, or moves."""
        for port in self._reserved:
            port.close()
        self._reserved = []


PORT_SECONDS: Final = 5.0
"""Seconds that a restarted store waits for its ports: gRPC may not have closed one yet, or another program uses it."""
_IDENTITY: Final = "identity"


class Playground:
    """PD and its stores. To be started once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = RocksEngine.open(settings.path / "rocksdb")
        self.regions = RegionTable(self.engine)
        self.sizes = RegionSizes(self.engine, settings.data_weight)
        self.tso = Tso(self.engine, lambda: time.time() + settings.clock_ahead)
        self.failpoints = FailpointTable()
        self.changes = ChangeHub(self.regions, self.failpoints, settings.release)
        self.transactions = TxnState(self.tso, settings.release)
        self.fatal_requests = FatalRequestLog(settings.path / "fatal_requests.jsonl")
        self.calls = CallClock()
        self._identity = self._load_identity()
        self.nodes: Mapping[int, StoreNode] = {store_id: self._node(store_id) for store_id in self._identity["stores"]}
        self._stores = {
            store_id: StoreServer(node, self._services_of, settings, self.calls)
            for store_id, node in self.nodes.items()
        }
        self.state = PdState(
            settings=settings,
            cluster_id=self._identity["cluster_id"],
            engine=self.engine,
            regions=self.regions,
            sizes=self.sizes,
            tso=self.tso,
            gc=GcState(self.engine, barriers=settings.gc_barriers or settings.release.has_barriers),
            keyspaces=Keyspaces(self.engine, settings.keyspaces),
            etcd=EtcdState(self.engine),
            nodes=self.nodes,
        )
        config = PdConfig(self.engine, replicas=settings.voters, stores=settings.stores)
        self._pd = PdServer(self.state, PdHttpApi(self.state, config), self.failpoints)
        control = {
            "kill-store": self.kill_store,
            "restart-store": self.restart_store,
            "kill-pd": self._pd.kill,
            "move-pd-leader": self._pd.move_leader,
            "kill-pd-leader": self._pd.kill_leader,
        }
        self._admin = Admin(
            self.nodes, self.regions, self.failpoints, self.fatal_requests, self.calls, self.changes, control
        )
        encoding = encoding_of(settings.version, settings.release)
        self._scheduler = Scheduler(self.state, encoding, config, self.transactions)
        self._etcd = EtcdServer(settings.path / "etcd", tls=settings.tls) if settings.etcd else None
        self._renewal = TimestampRenewal(self.nodes, self.regions, self.tso, settings.ts_sync_delay)

    def start(self) -> None:
        """Open all ports and start the background threads. Raises `PlaygroundError` if ``--port`` is taken."""
        if self._etcd is not None:
            self._etcd.start()
        self._renewal.start()
        for store in self._stores.values():
            store.start()
        self._pd.start(self._admin, self._identity["ports"])
        self._save_identity()
        self._scheduler.start()

    def stop(self) -> None:
        self._pd.stop()
        self._renewal.stop()
        self._scheduler.close()
        for store in self._stores.values():
            store.stop()
            store.release_ports()
        if self._etcd is not None:
            self._etcd.stop()
        self.engine.close()

    def kill_store(self, store_id: int) -> None:
        """Stop a store as kill -9 does; its regions get new leaders after the election timeout."""
        store = self._store(store_id)
        self.regions.set_store_down(store_id, down=True)
        store.stop()

    def restart_store(self, store_id: int) -> None:
        """Start a dead store on its ports, with an empty cache of timestamps."""
        store = self._store(store_id)
        node = store.node
        if not node.alive:
            node.causal = CausalTimestamps(self.tso, node.release.ts_ahead(self.settings.ts_ahead))
            store.start(PORT_SECONDS)
            self.regions.set_store_down(store_id, down=False)

    def _store(self, store_id: int) -> StoreServer:
        store = self._stores.get(store_id)
        if store is None:
            raise PlaygroundError(f"there is no store {store_id}")
        return store

    def describe(self) -> dict[str, Any]:
        """Return the output of ``playground start --output json``, without the process id."""
        return {
            "pd": self.state.address,
            "pd_members": self.state.addresses,
            "stores": [
                {"id": node.store_id, "address": node.address, "status_address": node.status_address}
                for node in self.nodes.values()
            ],
            "dir": self.settings.directory,
            "api_version": self.settings.version.label,
            "tikv_version": self.settings.release.tikv,
            "cluster_id": self.state.cluster_id,
            "etcd": None if self._etcd is None else self._etcd.address,
            "tls": self.settings.tls is not None,
        }

    def _load_identity(self) -> dict[str, Any]:
        saved = self.engine.get_meta(_IDENTITY)
        if saved is not None:
            identity: dict[str, Any] = json.loads(saved)
            return identity
        self.regions.clear()  # an interrupted start may have left some
        cluster_id = self.settings.cluster_id or secrets.randbits(62) | 1 << 62
        identity = {"cluster_id": cluster_id, "stores": self._bootstrap(), "ports": {}}
        self.engine.put_meta({_IDENTITY: json.dumps(identity).encode()})
        return identity

    def _save_identity(self) -> None:
        ports: dict[str, Any] = {
            str(node.store_id): {"address": node.address, "status_address": node.status_address}
            for node in self.nodes.values()
        }
        self._identity["ports"] = ports | self._pd.ports
        self.engine.put_meta({_IDENTITY: json.dumps(self._identity).encode()})

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
        regions.split(first.id, first_byte_bounds(encoding_of(settings.version, settings.release), settings.regions))
        return stores

    def _node(self, store_id: int) -> StoreNode:
        settings = self.settings
        ports = self._identity["ports"].get(str(store_id), {})
        data_dir = settings.path / f"store-{store_id}"
        data_dir.mkdir(exist_ok=True)
        return StoreNode(
            store_id=store_id,
            cluster_id=self._identity["cluster_id"],
            address=ports.get("address", ANY_PORT),
            status_address=ports.get("status_address", ANY_PORT),
            api_version=settings.version,
            release=settings.release,
            engine=self.engine,
            regions=self.regions,
            tso=self.tso,
            causal=CausalTimestamps(self.tso, settings.release.ts_ahead(settings.ts_ahead)),
            failpoints=self.failpoints,
            fatal_requests=self.fatal_requests,
            sizes=self.sizes,
            data_dir=data_dir,
            files=SstStore(data_dir / "import", settings.version),
            import_mode=StoreImportMode(),
            download_limit=Pace(),
            pace=Pace(settings.store_speed, settings.data_weight),
        )

    def _services_of(self, node: StoreNode) -> Iterable[AddServices]:
        """The services of a store that starts, which is in normal mode and has no download limit."""
        node.import_mode.switch(importing=False)
        node.download_limit.limit(0)
        feeds = ChangeDataService(node, self.changes, self.settings.resolved_ts_interval, self.settings.feed_quota)
        return [
            TikvService(node, self.changes, self.transactions).add_to,
            BackupService(node, self.transactions).add_to,
            ImportService(node, self.nodes).add_to,
            feeds.add_to,
        ]


def open_playground(directory: Path, **changes: Any) -> Playground:  # noqa: ANN401 - the fields of Settings
    """A playground for tests that run it in their own process; not started yet."""
    settings = replace(Settings(directory=str(directory)), **changes)
    return Playground(settings)


def run(home: Home) -> None:
    """Run the playground of a directory until SIGTERM or SIGINT. Raises `PlaygroundError` if it cannot start."""
    ended = threading.Event()
    with signals.stopping(ended, only_first=True), home.locked():
        playground = Playground(Settings.from_json((home.directory / SETTINGS_FILE).read_text()))
        try:
            playground.start()
            home.register()
            home.write_state({**playground.describe(), "pid": os.getpid()})
            _log.info("ready: PD at %s", playground.state.address)
            ended.wait()
            home.unregister()
        finally:
            playground.stop()
    _log.info("ended")


def main(arguments: list[str]) -> int:
    """Run as a process; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run(Home(Path(arguments[0])))
    except PlaygroundError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # at once: threads of calls that still wait, such as limited downloads, have nobody to answer
