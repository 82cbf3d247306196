"""PD's HTTP API, as far as backup tools use it; recorded answers of PD 8.5.2 are its model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from tikv_br.errors import PlaygroundError
from tikv_br.playground.http_server import Reply, Request
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_config import SCHEDULERS, PdConfig
from tikv_br.playground.pd_state import NAME, PdState
from tikv_br.playground.region import Peer, Region
from tikv_br.playground.settings import PD_VERSION, TIKV_VERSION

_API: Final = "/pd/api/v1"
_MIB: Final = 1 << 20
_GIT_HASH: Final = "playground"
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404

Answer = Callable[[Request, "re.Match[str]"], Reply]


class PdHttp:
    """Answers requests under ``/pd/api``."""

    def __init__(self, state: PdState, config: PdConfig) -> None:
        self._state = state
        self._config = config
        routes: list[tuple[str, str, Answer]] = [
            ("GET", "/config/cluster-version", lambda _r, _m: Reply.json(TIKV_VERSION)),
            ("GET", "/config/schedule", lambda _r, _m: Reply.json(self._config.schedule())),
            ("POST", "/config/schedule", self._set_schedule),
            ("POST", "/config", self._set_schedule),
            ("GET", "/config/replicate", lambda _r, _m: Reply.json(self._config.replication)),
            ("GET", "/config", lambda _r, _m: Reply.json(self._whole_config())),
            ("GET", "/schedulers", self._schedulers),
            ("POST", "/schedulers/(?P<name>[^/]+)", self._pause),
            ("GET", "/stores", self._stores),
            ("GET", r"/store/(?P<id>\d+)", self._store),
            ("GET", "/regions", lambda _r, _m: Reply.json(self._listed(self._state.regions.all()))),
            ("GET", "/regions/key", self._regions_from),
            ("GET", r"/region/id/(?P<id>\d+)", self._region),
            ("GET", "/stats/region", self._stats),
            ("GET", "/members", lambda _r, _m: Reply.json(self._members())),
            ("GET", "/leader", lambda _r, _m: Reply.json(self._members()["leader"])),
            ("GET", "/health", self._health),
            ("GET", "/version", self._version),
            ("GET", "/status", self._status),
            ("GET", "/cluster", self._cluster),
            ("GET", "/cluster/status", self._cluster_status),
            ("GET", "/min-resolved-ts", self._min_resolved_ts),
            ("GET", "/gc/safepoint", self._gc),
            ("DELETE", "/gc/safepoint/(?P<service>[^/]+)", self._delete_service),
        ]
        self._routes = [(method, re.compile(_API + path), answer) for method, path, answer in routes]
        self._routes.append(("POST", re.compile("/pd/api/v2/keyspaces"), self._create_keyspace))
        self._routes.append(("GET", re.compile("/pd/api/v2/keyspaces"), self._keyspaces))

    def handle(self, request: Request) -> Reply:
        """Answer a request; 404 as Go's router words it for unknown paths."""
        for method, path, answer in self._routes:
            match = path.fullmatch(request.path.rstrip("/"))
            if match and method == request.method:
                try:
                    return answer(request, match)
                except PlaygroundError as error:
                    return Reply.json(str(error), _BAD_REQUEST)
        return Reply(_NOT_FOUND, b"404 page not found\n", "text/plain; charset=utf-8")

    # -- configuration ------------------------------------------------------------------------------------------

    def _set_schedule(self, request: Request, _: re.Match[str]) -> Reply:
        ttl = request.parameters.get("ttlSecond")
        values = {name.removeprefix("schedule."): value for name, value in json.loads(request.body or b"{}").items()}
        self._config.set_schedule(values, None if ttl is None else float(ttl))
        return Reply.json("The config is updated.")

    def _whole_config(self) -> dict[str, Any]:
        return {
            "client-urls": self._state.client_url,
            "name": NAME,
            "data-dir": self._state.settings.directory,
            "schedule": self._config.schedule(),
            "replication": self._config.replication,
            "cluster-version": TIKV_VERSION,
        }

    def _schedulers(self, request: Request, _: re.Match[str]) -> Reply:
        paused = request.parameters.get("status") == "paused"
        return Reply.json(self._config.paused() if paused else list(SCHEDULERS))

    def _pause(self, request: Request, match: re.Match[str]) -> Reply:
        self._config.pause(match["name"], float(json.loads(request.body)["delay"]))
        return Reply.json("Pause or resume the scheduler successfully.")

    # -- stores -------------------------------------------------------------------------------------------------

    def _stores(self, _request: Request, _: re.Match[str]) -> Reply:
        stores = [self._store_json(node) for node in self._state.nodes.values()]
        return Reply.json({"count": len(stores), "stores": stores})

    def _store(self, _request: Request, match: re.Match[str]) -> Reply:
        node = self._state.nodes.get(int(match["id"]))
        if node is None:
            return Reply.json(f"[PD:core:ErrStoreNotFound]store {match['id']} not found", _NOT_FOUND)
        return Reply.json(self._store_json(node))

    def _store_json(self, node: StoreNode) -> dict[str, Any]:
        meta = self._state.store(node)
        regions = [region for region in self._state.regions.all() if region.peer_on(node.store_id)]
        leaders = [region for region in regions if region.leader_store == node.store_id]
        size, leader_size = self._mebibytes(regions), self._mebibytes(leaders)
        return {
            "store": {
                "id": meta.id,
                "address": meta.address,
                "version": meta.version,
                "peer_address": meta.peer_address,
                "status_address": meta.status_address,
                "git_hash": meta.git_hash,
                "start_timestamp": meta.start_timestamp,
                "deploy_path": meta.deploy_path,
                "state_name": "Up" if node.alive else "Disconnected",
            },
            "status": {
                "capacity": "0B",
                "available": "0B",
                "used_size": "0B",
                "leader_count": len(leaders),
                "leader_weight": 1,
                "leader_score": len(leaders),
                "leader_size": leader_size,
                "region_count": len(regions),
                "region_weight": 1,
                "region_score": size,
                "region_size": size,
                "start_ts": _utc(meta.start_timestamp),
                "last_heartbeat_ts": _utc(time.time() if node.alive else meta.start_timestamp),
            },
        }

    # -- regions ------------------------------------------------------------------------------------------------

    def _listed(self, regions: list[Region]) -> dict[str, Any]:
        return {"count": len(regions), "regions": [self._region_json(region) for region in regions]}

    def _regions_from(self, request: Request, _: re.Match[str]) -> Reply:
        start, end = _keys(request, "key", "end_key")
        limit = int(request.parameters.get("limit", "16"))
        return Reply.json(self._listed(self._state.regions.overlapping(start, end, max(limit, 0))))

    def _region(self, _request: Request, match: re.Match[str]) -> Reply:
        region = self._state.regions.get(int(match["id"]))
        return Reply.json(None if region is None else self._region_json(region))

    def _region_json(self, region: Region) -> dict[str, Any]:
        size = self._state.sizes.of(region)
        return {
            "id": region.id,
            "start_key": region.start.hex().upper(),
            "end_key": region.end.hex().upper(),
            "epoch": {"conf_ver": region.conf_ver, "version": region.version},
            "peers": [_peer(peer) for peer in region.peers],
            "leader": _peer(region.leader),
            "cpu_usage": 0,
            "written_bytes": 0,
            "read_bytes": 0,
            "written_keys": 0,
            "read_keys": 0,
            "approximate_size": _mebibytes(size.size),
            "approximate_keys": size.rows,
        }

    def _stats(self, request: Request, _: re.Match[str]) -> Reply:
        start, end = _keys(request, "start_key", "end_key")
        regions = self._state.regions.overlapping(start, end)
        by_store = {str(node.store_id): node.store_id for node in self._state.nodes.values()}
        led = {name: [each for each in regions if each.leader_store == store] for name, store in by_store.items()}
        held = {name: [each for each in regions if each.peer_on(store)] for name, store in by_store.items()}
        return Reply.json(
            {
                "count": len(regions),
                "empty_count": sum(_mebibytes(self._state.sizes.of(region).size) <= 1 for region in regions),
                "storage_size": self._mebibytes(regions),
                "user_storage_size": 0,
                "storage_keys": self._rows(regions),
                "store_leader_count": {name: len(each) for name, each in led.items()},
                "store_peer_count": {name: len(each) for name, each in held.items()},
                "store_leader_size": {name: self._mebibytes(each) for name, each in led.items()},
                "store_leader_keys": {name: self._rows(each) for name, each in led.items()},
                "store_peer_size": {name: self._mebibytes(each) for name, each in held.items()},
                "store_peer_keys": {name: self._rows(each) for name, each in held.items()},
            }
        )

    def _mebibytes(self, regions: list[Region]) -> int:
        return sum(_mebibytes(self._state.sizes.of(region).size) for region in regions)

    def _rows(self, regions: list[Region]) -> int:
        return sum(self._state.sizes.of(region).rows for region in regions)

    # -- members and state --------------------------------------------------------------------------------------

    def _members(self) -> dict[str, Any]:
        member = {
            "name": NAME,
            "member_id": self._state.member_id,
            "peer_urls": [self._state.client_url],
            "client_urls": [self._state.client_url],
            "deploy_path": self._state.settings.directory,
            "binary_version": PD_VERSION,
            "git_hash": _GIT_HASH,
        }
        header = {"cluster_id": self._state.cluster_id}
        return {"header": header, "members": [member], "leader": member, "etcd_leader": member}

    def _health(self, _request: Request, _: re.Match[str]) -> Reply:
        urls = [self._state.client_url]
        return Reply.json([{"name": NAME, "member_id": self._state.member_id, "client_urls": urls, "health": True}])

    def _version(self, _request: Request, _: re.Match[str]) -> Reply:
        return Reply.json({"version": PD_VERSION, "build_time": "", "hash": "", "branch": ""})

    def _status(self, _request: Request, _: re.Match[str]) -> Reply:
        started = self._state.started_at
        status = {"build_ts": "", "version": PD_VERSION, "git_hash": _GIT_HASH, "start_timestamp": started}
        return Reply.json(status)

    def _cluster(self, _request: Request, _: re.Match[str]) -> Reply:
        replicas = self._config.replication["max-replicas"]
        return Reply.json({"id": self._state.cluster_id, "max_peer_count": replicas})

    def _cluster_status(self, _request: Request, _: re.Match[str]) -> Reply:
        started = _utc(self._state.started_at)
        return Reply.json({"raft_bootstrap_time": started, "is_initialized": True, "replication_status": "majority"})

    def _min_resolved_ts(self, _request: Request, _: re.Match[str]) -> Reply:
        return Reply.json(
            {
                "is_real_time": True,
                "min_resolved_ts": 0,
                "persist_interval": "1s",
                "stores_min_resolved_ts": None,
            }
        )

    def _gc(self, _request: Request, _: re.Match[str]) -> Reply:
        claims = self._state.gc.services()
        return Reply.json(
            {
                "service_gc_safe_points": [
                    {"service_id": name, "expired_at": claim.expires, "safe_point": claim.ts}
                    for name, claim in sorted(claims.items())
                ],
                "min_service_gc_safe_point": min(claim.ts for claim in claims.values()),
                "gc_safe_point": self._state.gc.safe_point,
            }
        )

    def _delete_service(self, _request: Request, match: re.Match[str]) -> Reply:
        self._state.gc.delete_barrier(match["service"])
        return Reply.json("Delete service GC safepoint successfully.")

    # -- keyspaces ----------------------------------------------------------------------------------------------

    def _create_keyspace(self, request: Request, _: re.Match[str]) -> Reply:
        created = self._state.keyspaces.create(json.loads(request.body)["name"])
        return Reply.json(
            {"id": created.id, "name": created.name, "state": "ENABLED", "created_at": created.created_at}
        )

    def _keyspaces(self, _request: Request, _: re.Match[str]) -> Reply:
        listed = [{"id": each.id, "name": each.name, "state": "ENABLED"} for each in self._state.keyspaces.all()]
        return Reply.json({"keyspaces": listed, "next_page_token": ""})


def _keys(request: Request, start: str, end: str) -> tuple[bytes, bytes]:
    """Physical bounds from a query. PD takes them percent-encoded, byte for byte."""
    raw = dict(part.partition("=")[::2] for part in request.query.split("&"))
    return unquote_to_bytes(raw.get(start, "")), unquote_to_bytes(raw.get(end, ""))


def _peer(peer: Peer) -> dict[str, Any]:
    return {"role_name": "Voter", "id": peer.id, "store_id": peer.store_id}


def _mebibytes(size: int) -> int:
    """A size as PD holds it; what is not empty counts as one at least."""
    return 0 if not size else max(1, size // _MIB)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
