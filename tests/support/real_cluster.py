"""Clusters of real servers behind `ClusterContract`, shared by the tests of a process."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tests.support.live_cluster import LiveCluster, config_of
from tests.support.live_txn_backups import delete_range
from tests.support.playground_admin import AdminRefused, Json
from tests.support.ports import accepts
from tests.support.real_servers import CHOSEN, RealServers, Server, Shape
from tests.support.waiting import eventually
from tikv_br.cluster import split
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.codec import MAX_KEYSPACE, KeyCodec, KeyMode, decode
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.group.model import ROOT
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.scheduler import first_byte_bounds

KEYSPACE_SPLIT_SECONDS = 6.0
"""PD splits a new cluster at the bounds of keyspace 0 after some three seconds; older ones do not."""
OPERATOR_SECONDS = 15.0
IDLE_STORES = 2
"""Stores of idle clusters that are kept for the next test."""


class EmulatorOnly(AssertionError):
    """A test that was taken to run on both kinds of clusters asked for what only a playground can do."""


class RealCluster(LiveCluster):
    """A cluster of real servers for one test, or for those that share a fixture."""

    def __init__(self, servers: RealServers) -> None:
        state = {"pd_members": servers.members, "stores": []}
        super().__init__(state, config_of(servers.members, servers.shape.tls))
        self._servers = servers
        self._by_id: dict[int, Server] = {}
        self._keyspaces = {0}
        self._change: threading.Thread | None = None
        self._lasting: set[str] = set()

    # ------------------------------------------------------------------------------------------------------ how it starts

    def await_ready(self) -> None:
        """Wait until PD lists all stores, and every region has all its voters; then split as the shape says."""
        shape = self._servers.shape

        def is_ready() -> bool:
            self._servers.assert_alive()
            try:
                self._find_stores()
                regions = self.regions() if len(self._by_id) == shape.stores else []
            except (AdminRefused, OSError, http.client.HTTPException):
                return False
            return bool(regions) and all(
                len(region["peers"]) >= shape.voters and region["leader_store"] for region in regions
            )

        eventually(is_ready, every=0.1)
        with contextlib.suppress(AssertionError):
            eventually(lambda: len(self.regions()) >= 5, KEYSPACE_SPLIT_SECONDS, every=0.1)
        eventually(is_ready, every=0.1)
        if shape.regions > 1 and len(self.regions()) <= 5:
            self.split(*first_byte_bounds(encoding_of(shape.api_version), shape.regions))
        for name in shape.keyspaces:
            self.create_keyspace(name)
        self._lasting = self._find_lasting()

    def _find_lasting(self) -> set[str]:
        """What cannot be undone: keyspaces, whose ids PD counts upwards, and in API V1 bounds at raw keys, which no transaction can pass."""
        found = set[str]()
        if self._servers.shape.api_version is ApiVersion.V2:
            with contextlib.suppress(AdminRefused):  # PD before 7.1
                found |= {each["name"] for each in self.get("/pd/api/v2/keyspaces")["keyspaces"]}
        elif self._servers.shape.api_version is ApiVersion.V1:
            found |= {each["start"] for each in self.regions() if not _is_encoded(bytes.fromhex(each["start"]))}
        return found

    def _find_stores(self) -> None:
        listed = self.get("/pd/api/v1/stores")["stores"]
        ids = {each["store"]["address"]: each["store"]["id"] for each in listed if each["store"]["state_name"] == "Up"}
        self._by_id = {
            ids[server.address]: server
            for server in self._servers.stores
            if server.address in ids and accepts(server.address)
        }
        self.store_ids = list(self._by_id)

    # -------------------------------------------------------------------------------------------------------------- verbs

    def raw(self, keyspace_id: int = 0) -> RawClient:
        self._keyspaces.add(keyspace_id)
        return super().raw(keyspace_id)

    def create_keyspace(self, name: str) -> int:
        created = super().create_keyspace(name)
        self._keyspaces.add(created)
        return created

    def regions(self) -> list[Json]:
        listed = self.get("/pd/api/v1/regions")["regions"] or []
        found = [
            {
                "id": each["id"],
                "start": each["start_key"].lower(),
                "end": each["end_key"].lower(),
                "conf_ver": each["epoch"].get("conf_ver", 0),
                "version": each["epoch"].get("version", 0),
                "peers": [[peer["id"], peer["store_id"]] for peer in each["peers"] or []],
                "leader_store": (each.get("leader") or {}).get("store_id", 0),
            }
            for each in listed
        ]
        return sorted(found, key=lambda region: bytes.fromhex(region["start"]))

    def split(self, *bounds: bytes) -> list[Json]:
        for codec, keys in self._rpc_keys(bounds).items():
            split.split_at(self.cluster, codec, keys)
        wanted = {bound.hex() for bound in bounds}
        self._await(lambda: wanted <= {region["start"] for region in self.regions()}, "split")
        return self.regions()

    def _rpc_keys(self, bounds: tuple[bytes, ...]) -> dict[KeyCodec, list[bytes]]:
        version, found = self._servers.shape.api_version, dict[KeyCodec, list[bytes]]()
        for bound in filter(None, bounds):
            if version is not ApiVersion.V2:
                found.setdefault(KeyCodec(version), []).append(bound)
                continue
            key, _ = decode(bound)
            mode = KeyMode.TXN if key[:1] == b"x" else KeyMode.RAW
            found.setdefault(KeyCodec(version, int.from_bytes(key[1:4], "big"), mode), []).append(key)
        return found

    def merge(self, source: int, target: int) -> None:
        self._operate(
            lambda: source not in {region["id"] for region in self.regions()},
            name="merge-region",
            source_region_id=source,
            target_region_id=target,
        )

    def transfer_leader(self, region_id: int, store_id: int) -> None:
        if self._region(region_id)["leader_store"] != store_id:
            self._operate(
                lambda: self._region(region_id)["leader_store"] == store_id,
                name="transfer-leader",
                region_id=region_id,
                to_store_id=store_id,
            )

    def move_peer(self, region_id: int, from_store: int, to_store: int) -> None:
        def has_moved() -> bool:
            places = {store_id for _, store_id in self._region(region_id)["peers"]}
            return to_store in places and from_store not in places

        self._operate(
            has_moved, name="transfer-peer", region_id=region_id, from_store_id=from_store, to_store_id=to_store
        )

    def scatter(self) -> None:
        alive = [store_id for store_id, server in self._by_id.items() if server.alive]
        wanted = dict[int, int]()
        for number, region in enumerate(self.regions()):
            places = [store_id for _, store_id in region["peers"] if store_id in alive]
            if places and region["leader_store"] != places[number % len(places)]:
                wanted[region["id"]] = places[number % len(places)]
        for region_id, store_id in wanted.items():
            with contextlib.suppress(AdminRefused):  # it may be gone by now
                self._call(
                    "POST",
                    "/pd/api/v1/operators",
                    {"name": "transfer-leader", "region_id": region_id, "to_store_id": store_id},
                )

        def is_done() -> bool:
            leaders = {region["id"]: region["leader_store"] for region in self.regions()}
            return all(leaders.get(region_id, store_id) == store_id for region_id, store_id in wanted.items())

        with contextlib.suppress(AdminRefused):  # others may move them meanwhile
            self._await(is_done, "scatter")

    def flush(self, store_id: int) -> None:
        self.cluster.flush_timestamps()

    def _region(self, region_id: int) -> Json:
        for region in self.regions():
            if region["id"] == region_id:
                return region
        raise AdminRefused(f"there is no region {region_id}")

    def _operate(self, is_done: Callable[[], bool], **operator: Json) -> None:
        """Have PD move something, and wait until it has."""
        self._call("POST", "/pd/api/v1/operators", operator)
        self._await(is_done, str(operator))

    def _await(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + OPERATOR_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                raise AdminRefused(f"not done after {OPERATOR_SECONDS} s: {what}")
            time.sleep(0.05)

    # -------------------------------------------------------------------------------------------------- servers that fail

    def kill_store(self, store_id: int) -> None:
        self.disturbed = True
        self._store(store_id).kill()

    @contextlib.contextmanager
    def frozen_store(self, store_id: int) -> Iterator[None]:
        self.disturbed = True
        with self._servers.frozen(self._store(store_id)):
            yield

    @contextlib.contextmanager
    def frozen_pd(self) -> Iterator[None]:
        self.disturbed = True
        with contextlib.ExitStack() as stack:
            for server in self._servers.pds:
                stack.enter_context(self._servers.frozen(server))
            yield

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for store_id in self._by_id:
                stack.enter_context(self.frozen_store(store_id))
            stack.enter_context(self.frozen_pd())
            yield

    def restart_store(self, store_id: int) -> None:
        server = self._store(store_id)
        if not server.alive:
            server.start()
            eventually(lambda: not server.alive or accepts(server.address))
            self._servers.assert_alive()

    def _store(self, store_id: int) -> Server:
        if store_id not in self._by_id:
            raise AdminRefused(f"there is no store {store_id}")
        return self._by_id[store_id]

    def kill_pd(self, seconds: float) -> None:
        self._kill_pds(self._servers.pds, seconds)

    def kill_pd_leader(self, seconds: float, lease: float = 1.0) -> None:
        if len(self._servers.pds) == 1:
            raise AdminRefused("PD has only one member: kill_pd stops it")
        name = self.get("/pd/api/v1/leader")["name"]
        self._kill_pds([server for server in self._servers.pds if server.name == name], seconds)

    def move_pd_leader(self, seconds: float) -> None:
        self.disturbed = True
        self._call("POST", "/pd/api/v1/leader/resign")

    def _kill_pds(self, servers: list[Server], seconds: float) -> None:
        if self._change is not None and self._change.is_alive():
            raise AdminRefused("PD is down already")
        self.disturbed = True

        def bring_back() -> None:
            time.sleep(seconds)
            for server in servers:
                server.start()

        for server in servers:
            server.kill()
        self._change = threading.Thread(target=bring_back, name="pd-change")
        self._change.start()

    def await_pd(self) -> None:
        if self._change is not None:
            self._change.join()
        super().await_pd()

    def heal(self) -> None:
        self.await_pd()
        for store_id in self.store_ids:
            self.restart_store(store_id)

    def fatal_requests(self) -> list[Json]:
        return [{"store": server.name, "log": server.last_words()} for server in self._servers.dead()]

    # --------------------------------------------------------------------------------------------------- between tests

    def clean(self) -> None:
        """Remove rows, safe points and records of a test; regions stay as they are."""
        version = self._servers.shape.api_version
        for name in self.safe_points():
            self.cluster.pd.update_service_safe_point(name, 0, 0)
        for name in self.get("/pd/api/v1/schedulers?status=paused") or []:
            self._call("POST", f"/pd/api/v1/schedulers/{name}", {"delay": 0})
        self.cluster.pd_etcd.delete(f"{ROOT}/{self.cluster.cluster_id}/", prefix=True)
        for keyspace_id in self._keyspaces if version is ApiVersion.V2 else (0,):
            self.raw(keyspace_id).delete_range(EVERY_KEY)
            # A cluster of V1 that has been split at raw keys has no transactions; the last keyspace has no end that stores accept.
            if version is not ApiVersion.V1TTL and keyspace_id < MAX_KEYSPACE:
                with contextlib.suppress(ClusterUnfit):
                    delete_range(self, keyspace_id)

    @property
    def reusable(self) -> bool:
        """Whether the next test cannot tell it from a new one: GC's safe point never goes back."""
        if self.disturbed or self._servers.dead():
            return False
        return not self.get("/pd/api/v1/gc/safepoint")["gc_safe_point"] and self._find_lasting() == self._lasting

    def _call(self, method: str, path: str, body: Json = None) -> Json:
        if not path.startswith("/pd/"):
            self._refuse(f"{method} {path}")
        return super()._call(method, path, body)

    def _refuse(self, what: str) -> NoReturn:
        raise EmulatorOnly(f"only a playground can do this: {what}. Mark the test: pytest.mark.emulator_only(reason)")


def _is_encoded(bound: bytes) -> bool:
    """Whether a region's bound is the encoding of a key, as all are in API V2, and those of transactions in V1."""
    try:
        return not bound or bool(decode(bound))
    except FormatError:
        return False


class Pool:
    """Clusters that run: those of tests, and a few idle ones."""

    def __init__(self) -> None:
        self._idle: list[RealServers] = []
        atexit.register(self.close)

    @contextlib.contextmanager
    def lease(self, api_version: ApiVersion, **settings: Any) -> Iterator[RealCluster]:  # noqa: ANN401 - those of `Shape`
        """An empty cluster for the length of the block."""
        servers = self._take(Shape(api_version, **settings))
        reuse = False
        try:
            servers.await_pd()
            live = RealCluster(servers)
            with live.cluster:
                live.await_ready()
                yield live
                live.await_pd()
                live.assert_innocent()
                if live.reusable and not servers.shape.pd_port:
                    live.clean()
                    reuse = True
        finally:
            if reuse:
                self._idle.append(servers)
                self._trim(IDLE_STORES)
            else:
                servers.stop()

    def close(self) -> None:
        """Stop idle clusters."""
        self._trim(0)

    def _take(self, shape: Shape) -> RealServers:
        for servers in self._idle:
            if servers.shape == shape and not servers.dead():
                self._idle.remove(servers)
                return servers
        self._trim(max(0, IDLE_STORES - shape.stores))
        assert CHOSEN is not None
        servers = RealServers(shape, CHOSEN)
        try:
            servers.start()
        except BaseException:
            servers.stop()
            raise
        return servers

    def _trim(self, stores: int) -> None:
        while sum(servers.shape.stores for servers in self._idle) > stores:
            self._idle.pop(0).stop()


POOL = Pool()
