"""A whole playground in one process: PD, its stores, and their lifecycle.

``python -m tikv_br.playground.cluster DIR`` runs the playground of a directory until SIGTERM or SIGINT. After a SIGKILL the
next start finds all data and uses the same ports.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import grpc

from tikv_br.errors import PlaygroundError
from tikv_br.playground.admin import Admin
from tikv_br.playground.backup_service import BackupService
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.cdc_stream import ChangeDataService
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.etcd import EtcdServer
from tikv_br.playground.failpoints import PD, FailpointInterceptor, FailpointTable
from tikv_br.playground.import_service import ImportService
from tikv_br.playground.launcher import Home
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_etcd import EtcdService, EtcdState
from tikv_br.playground.pd_http import PdConfig, PdHttpApi
from tikv_br.playground.pd_service import PdService
from tikv_br.playground.pd_state import GcState, Keyspaces, PdState
from tikv_br.playground.region import Region, RegionSizes
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.scheduler import Scheduler, first_byte_bounds
from tikv_br.playground.servers import (
    ANY_PORT,
    AddServices,
    Front,
    HttpServer,
    Reply,
    Request,
    ReservedPort,
    start_server,
)
from tikv_br.playground.settings import SETTINGS_FILE, Settings
from tikv_br.playground.sst_file import SstStore
from tikv_br.playground.store_server import StoreServer
from tikv_br.playground.store_state import CallClock, FatalRequestLog, Pace, StoreImportMode
from tikv_br.playground.tikv_service import TikvService
from tikv_br.playground.timestamps import RENEW_INTERVAL, CausalTimestamps, TimestampFault, Tso
from tikv_br.playground.txn.state import TxnState

PORT_SECONDS: Final = 5.0
"""Seconds that a restarted store waits for its ports: gRPC may not have closed one yet, or another program uses it."""
PORT_POLL_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 0.2
"""Delay before PD goes down: its port is also that of the admin API, which must answer first."""
ELECTION_SECONDS: Final = 0.3
"""Seconds from the election of PD's leader until it serves, and from then until stores have found it."""
WAKE_SECONDS: Final = 0.5
"""A signal that arrives while the process is stopped (Ctrl-Z) may reach a thread of gRPC, which does not wake the main one."""
_IDENTITY: Final = "identity"
_log = logging.getLogger(__name__)


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
            keyspaces=Keyspaces(self.engine),
            etcd=EtcdState(self.engine),
            nodes=self.nodes,
        )
        config = PdConfig(self.engine, replicas=settings.voters, stores=settings.stores)
        control = {
            "kill-store": self.kill_store,
            "restart-store": self.restart_store,
            "kill-pd": self.kill_pd,
            "move-pd-leader": self.move_pd_leader,
            "kill-pd-leader": self.kill_pd_leader,
        }
        self._admin = Admin(
            self.nodes, self.regions, self.failpoints, self.fatal_requests, self.calls, self.changes, control
        )
        self._pd_http = PdHttpApi(self.state, config)
        encoding = encoding_of(settings.version, settings.release)
        self._scheduler = Scheduler(self.state, encoding, config, self.transactions)
        self._etcd = EtcdServer(settings.path / "etcd", tls=settings.tls) if settings.etcd else None
        self._renewal_over = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="causal-ts", daemon=True)
        self._http: HttpServer | None = None
        self._members: list[grpc.Server] = []
        self._fronts: list[Front] = []
        self._closed: list[Front] = []
        self._reserved: list[ReservedPort] = []
        self._pd_change: threading.Thread | None = None

    # -- lifecycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open all ports and start the background threads. Raises `PlaygroundError` if ``--port`` is taken."""
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
        started = self._renewal.is_alive()
        self._renewal_over.set()
        if self._pd_change is not None:
            self._pd_change.join()
        if started:
            self._renewal.join()
            self._scheduler.close()
        for front in self._fronts:
            front.close()
        if self._http is not None:
            self._http.close()
        for member in self._members:
            member.stop(None)
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
            self._start_store(store, PORT_SECONDS)
            self.regions.set_store_down(store_id, down=False)

    def _store(self, store_id: int) -> StoreServer:
        store = self._stores.get(store_id)
        if store is None:
            raise PlaygroundError(f"there is no store {store_id}")
        return store

    def kill_pd(self, seconds: float) -> None:
        """Stop PD shortly afterwards, as kill -9 does, for so many seconds; the stores continue."""
        self._change_pd((ANSWER_SECONDS, self._close_pd), (seconds, self._reopen_pd))

    def move_pd_leader(self, seconds: float) -> None:
        """End the leadership of PD's leader; after so many seconds the next member leads, which is the same one if it is alone.

        For the second half of that time, the next one is known as the leader, and does not serve yet.
        """
        elect, serve = self._elections()
        self._change_pd((seconds / 2, elect), (seconds / 2, serve))
        self.state.end_leadership()
        self.state.named = None

    def kill_pd_leader(self, seconds: float, lease: float = 1.0) -> None:
        """Stop PD's leader shortly afterwards, as kill -9 does, for so many seconds.

        The others name it as the leader until its lease ends. Then the next one leads; stores find it a moment later.
        """
        if self.settings.pd_members == 1:
            raise PlaygroundError("PD has only one member: kill-pd stops it")
        elect, serve = self._elections()
        rest = max(0.0, seconds - lease - 2 * ELECTION_SECONDS)
        self._change_pd(
            (ANSWER_SECONDS, self._close_pd_leader),
            (lease, elect),
            (ELECTION_SECONDS, serve),
            (rest, self._reopen_pd),
        )

    def _elections(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Let the others name the next member as the leader; let it lead."""
        following = ((self.state.leader or 0) + 1) % self.settings.pd_members

        def elect() -> None:
            self.state.named = following

        def serve() -> None:
            self.state.lead(following)
            self._renewal_over.wait(ELECTION_SECONDS if self.state.died is not None else 0)
            self.tso.available = True

        return elect, serve

    def _change_pd(self, *steps: tuple[float, Callable[[], None]]) -> None:
        """Take steps one by one in a thread, each after so many seconds."""
        if self._pd_change is not None and self._pd_change.is_alive():
            raise PlaygroundError("PD is down already, about to be, or has no leader")

        def run() -> None:
            for seconds, step in steps:
                self._renewal_over.wait(seconds)  # less if the playground ends
                step()

        self._pd_change = threading.Thread(target=run, name="pd-change", daemon=True)
        self._pd_change.start()

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

    # -- identity -----------------------------------------------------------------------------------------------

    def _load_identity(self) -> dict[str, Any]:
        """Cluster id, stores and ports, saved or of a new cluster."""
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
        ports |= {_pd_name(index): front.port for index, front in enumerate(self._fronts)}
        self._identity["ports"] = ports
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

    # -- stores -------------------------------------------------------------------------------------------------

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

    def _start_store(self, store: StoreServer, patience: float = 0.0) -> None:
        """Start a store on its ports, or on others if those are not free within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                store.start()
            except PlaygroundError:  # another program took a port while the store was down
                store.stop()
                if time.monotonic() >= deadline:
                    break
                time.sleep(PORT_POLL_SECONDS)
            else:
                return
        _log.warning("store %d moves to other ports", store.node.store_id)
        store.release_ports()
        store.node.address = store.node.status_address = ANY_PORT
        store.start()

    def _sync_timestamps(self, region: Region) -> None:
        """Drop the cached timestamps of a new leader's store; until then the region refuses V2 writes."""

        def sync() -> None:
            node = self.nodes[region.leader_store]
            try:
                if node.alive:
                    node.causal.flush()
            except TimestampFault:
                if not self._renewal_over.is_set():
                    self._sync_timestamps(region)
            else:
                self.regions.mark_synced(region.id)

        timer = threading.Timer(self.settings.ts_sync_delay, sync)
        timer.daemon = True
        timer.start()

    def _renew(self) -> None:
        while not self._renewal_over.wait(RENEW_INTERVAL):
            for node in self.nodes.values():
                if node.alive and self.tso.available:
                    node.causal.renew()

    # -- PD -----------------------------------------------------------------------------------------------------

    def _start_pd(self) -> None:
        self._http = HttpServer(self._answer)
        for index in range(self.settings.pd_members):
            failpoints = FailpointInterceptor(self.failpoints, PD, CallClock())  # `calls` counts those of stores only
            service = PdService(self.state, index)
            etcd = EtcdService(self.state.etcd, lambda: self.state.leader is not None)
            member, port = start_server(ANY_PORT, [service.add_to, etcd.add_to], interceptors=[failpoints])
            self._members.append(member)
            self._fronts.append(self._open_front(index, port, self._http.port))
        self.state.addresses = [f"127.0.0.1:{front.port}" for front in self._fronts]

    def _open_front(self, index: int, grpc_port: int, http_port: int) -> Front:
        """The port of a member of PD: of the first the one that was asked for, else the one of before, if it is free."""
        asked = self.settings.pd_port if index == 0 else 0
        address = f"127.0.0.1:{asked or self._identity['ports'].get(_pd_name(index), 0)}"
        try:
            return Front(address, grpc_port, http_port, self.settings.tls)
        except PlaygroundError:
            if asked:
                raise
            return Front(ANY_PORT, grpc_port, http_port, self.settings.tls)

    def _answer(self, request: Request) -> Reply:
        """PD's HTTP port also serves the admin API."""
        reply, state = self._admin.handle(request), self.state
        if (
            reply is None and state.leader is None
        ):  # a member passes requests on to the one that it takes for the leader
            if state.named is None:
                return Reply(HTTPStatus.SERVICE_UNAVAILABLE, b"no leader\n", "text/plain; charset=utf-8")
            text = b"redirect failed\n" if state.named == state.died else b"redirect to not leader\n"
            return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain; charset=utf-8")
        return reply or self._pd_http.handle(request)

    def _close_pd_leader(self) -> None:
        self.state.end_leadership()
        self.state.died = self.state.former
        self._close_pd()

    def _close_pd(self) -> None:
        """Close the port of the dead member, or of all; they refuse connections."""
        self.tso.available = False
        died = self.state.died
        self._closed = self._fronts if died is None else [self._fronts[died]]
        for front in self._closed:
            front.close()
        self._reserved = [ReservedPort(front.port) for front in self._closed]

    def _reopen_pd(self) -> None:
        if self._http is None:
            return
        ports = {front.port for front in self._closed}
        self._fronts = [
            Front(f"127.0.0.1:{front.port}", front.grpc_port, self._http.port, self.settings.tls)
            if front.port in ports
            else front
            for front in self._fronts
        ]
        for port in self._reserved:
            port.close()
        self._closed, self._reserved, self.state.died = [], [], None
        self.tso.available = True


def _pd_name(index: int) -> str:
    """The key of a member's port; the first one's is that of playgrounds of before."""
    return "pd" if index == 0 else f"pd{index + 1}"


def open_playground(directory: Path, **changes: Any) -> Playground:  # noqa: ANN401 - the fields of Settings
    """A playground for tests that run it in their own process; not started yet."""
    settings = replace(Settings(directory=str(directory)), **changes)
    return Playground(settings)


def run(home: Home) -> None:
    """Run the playground of a directory until SIGTERM or SIGINT. Raises `PlaygroundError` if it cannot start."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    with home.locked():
        playground = Playground(Settings.from_json((home.directory / SETTINGS_FILE).read_text()))
        try:
            playground.start()
            home.register()
            home.write_state({**playground.describe(), "pid": os.getpid()})
            _log.info("ready: PD at %s", playground.state.address)
            while not ended.wait(WAKE_SECONDS):
                pass
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
