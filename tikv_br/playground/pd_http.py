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
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_config import SCHEDULERS, PdConfig
from tikv_br.playground.pd_state import NAME, PdState
from tikv_br.playground.region import Peer, Region
from tikv_br.playground.servers import Reply, Request

_V1: Final = "/pd/api/v1"
_MIB: Final = 1 << 20
_GIT_HASH: Final = "playground"
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404

Handler = Callable[[Request, "re.Match[str]"], object]
"""Returns what is sent as JSON, or a `Reply`."""


class PdHttpApi:
    """Answers requests under ``/pd/api``."""

    def __init__(self, state: PdState, config: PdConfig) -> None:
        self._state = state
        self._release = state.settings.release
        self._config = config
        started, version = state.started_at, f"v{self._release.pd}"
        self._views: dict[str, Callable[[], object]] = {
            "config/cluster-version": lambda: self._release.tikv,
            "config/schedule": config.schedule,
            "config/replicate": lambda: config.replication,
            "config": self._whole_config,
            "stores": self._stores,
            "regions": lambda: self._regions_json(state.regions.all()),
            "members": self._members,
            "leader": lambda: self._members()["leader"],
            "health": self._health,
            "version": lambda: {"version": version, "build_time": "", "hash": "", "branch": ""},
            "status": lambda: {"build_ts": "", "version": version, "git_hash": _GIT_HASH, "start_timestamp": started},
            "cluster": lambda: {"id": state.cluster_id, "max_peer_count": config.replication["max-replicas"]},
            "cluster/status": lambda: {
                "raft_bootstrap_time": _utc(started),
                "is_initialized": True,
                "replication_status": "majority",
            },
            "min-resolved-ts": lambda: {
                "is_real_time": True,
                "min_resolved_ts": 0,
                "persist_interval": "1s",
                "stores_min_resolved_ts": None,
            },
            "gc/safepoint": self._gc,
        }
        self._routes: list[tuple[str, str, Handler]] = [
            ("POST", f"{_V1}/config/schedule", self._set_schedule),
            ("POST", f"{_V1}/config", self._set_schedule),
            ("GET", f"{_V1}/schedulers", self._schedulers),
            ("POST", f"{_V1}/schedulers/(?P<name>[^/]+)", self._pause),
            ("GET", rf"{_V1}/store/(?P<id>\d+)", self._store),
            ("GET", f"{_V1}/regions/key", self._regions_from),
            ("GET", rf"{_V1}/region/id/(?P<id>\d+)", self._region),
            ("GET", f"{_V1}/stats/region", self._stats),
            ("DELETE", f"{_V1}/gc/safepoint/(?P<service>[^/]+)", self._delete_service),
        ]
        if self._release.has_keyspaces:
            self._routes += [
                ("POST", "/pd/api/v2/keyspaces", self._create_keyspace),
                ("GET", "/pd/api/v2/keyspaces", self._keyspaces),
            ]

    def handle(self, request: Request) -> Reply:
        """Answer a request; 404 as Go's router words it for unknown paths."""
        path = request.path.rstrip("/")
        view = self._views.get(path.removeprefix(f"{_V1}/"))
        if view is not None and request.method == "GET":
            return Reply.json(view())
        for method, pattern, handler in self._routes:
            match = re.fullmatch(pattern, path)
            if match and method == request.method:
                try:
                    answer = handler(request, match)
                except PlaygroundError as error:
                    return Reply.json(str(error), _BAD_REQUEST)
                return answer if isinstance(answer, Reply) else Reply.json(answer)
        return Reply(_NOT_FOUND, b"404 page not found\n", "text/plain; charset=utf-8")

    def _set_schedule(self, request: Request, _: re.Match[str]) -> str:
        ttl = request.parameters.get("ttlSecond")
        values = {name.removeprefix("schedule."): value for name, value in json.loads(request.body or b"{}").items()}
        self._config.set_schedule(values, None if ttl is None else float(ttl))
        return "The config is updated."

    def _whole_config(self) -> dict[str, Any]:
        return {
            "client-urls": self._state.client_url,
            "name": NAME,
            "data-dir": self._state.settings.directory,
            "schedule": self._config.schedule(),
            "replication": self._config.replication,
            "cluster-version": self._release.tikv,
        }

    def _schedulers(self, request: Request, _: re.Match[str]) -> list[str]:
        only_paused = request.parameters.get("status") == "paused"
        return [name for name in SCHEDULERS if not only_paused or self._config.is_paused(name)]

    def _pause(self, request: Request, match: re.Match[str]) -> str:
        self._config.pause(match["name"], float(json.loads(request.body)["delay"]))
        return "Pause or resume the scheduler successfully."

    def _stores(self) -> dict[str, Any]:
        stores = [self._store_json(node) for node in self._state.nodes.values()]
        return {"count": len(stores), "stores": stores}

    def _store(self, _request: Request, match: re.Match[str]) -> object:
        node = self._state.nodes.get(int(match["id"]))
        if node is None:
            return Reply.json(f"[PD:core:ErrStoreNotFound]store {match['id']} not found", _NOT_FOUND)
        return self._store_json(node)

    def _store_json(self, node: StoreNode) -> dict[str, Any]:
        meta = self._state.store(node)
        regions = [region for region in self._state.regions.all() if region.peer_on(node.store_id)]
        leaders = [region for region in regions if region.leader_store == node.store_id]
        size = self._mebibytes(regions)
        silent = time.time() - node.last_heartbeat
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
                "state_name": "Up" if node.alive or silent < self._state.settings.disconnect_delay else "Disconnected",
            },
            "status": {
                "capacity": "0B",
                "available": "0B",
                "used_size": "0B",
                "leader_count": len(leaders),
                "leader_weight": 1,
                "leader_score": len(leaders),
                "leader_size": self._mebibytes(leaders),
                "region_count": len(regions),
                "region_weight": 1,
                "region_score": size,
                "region_size": size,
                "start_ts": _utc(meta.start_timestamp),
                "last_heartbeat_ts": _utc(node.last_heartbeat),
            },
        }

    def _regions_json(self, regions: list[Region]) -> dict[str, Any]:
        return {"count": len(regions), "regions": [self._region_json(region) for region in regions]}

    def _regions_from(self, request: Request, _: re.Match[str]) -> dict[str, Any]:
        start, end = _keys(request, "key", "end_key")
        limit = int(request.parameters.get("limit", "16"))
        return self._regions_json(self._state.regions.overlapping(start, end, max(limit, 0)))

    def _region(self, _request: Request, match: re.Match[str]) -> dict[str, Any] | None:
        region = self._state.regions.get(int(match["id"]))
        return None if region is None else self._region_json(region)

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

    def _stats(self, request: Request, _: re.Match[str]) -> dict[str, Any]:
        regions = self._state.regions.overlapping(*_keys(request, "start_key", "end_key"))
        stores = list(self._state.nodes)
        leaders = {str(store): [each for each in regions if each.leader_store == store] for store in stores}
        peers = {str(store): [each for each in regions if each.peer_on(store)] for store in stores}
        return {
            "count": len(regions),
            "empty_count": sum(self._mebibytes([region]) <= 1 for region in regions),
            "storage_size": self._mebibytes(regions),
            "user_storage_size": 0,
            "storage_keys": self._rows(regions),
            "store_leader_count": {name: len(each) for name, each in leaders.items()},
            "store_peer_count": {name: len(each) for name, each in peers.items()},
            "store_leader_size": {name: self._mebibytes(each) for name, each in leaders.items()},
            "store_leader_keys": {name: self._rows(each) for name, each in leaders.items()},
            "store_peer_size": {name: self._mebibytes(each) for name, each in peers.items()},
            "store_peer_keys": {name: self._rows(each) for name, each in peers.items()},
        }

    def _mebibytes(self, regions: list[Region]) -> int:
        return sum(_mebibytes(self._state.sizes.of(region).size) for region in regions)

    def _rows(self, regions: list[Region]) -> int:
        return sum(self._state.sizes.of(region).rows for region in regions)

    def _members(self) -> dict[str, Any]:
        members = [
            {
                "name": member.name,
                "member_id": member.member_id,
                "peer_urls": list(member.peer_urls),
                "client_urls": list(member.client_urls),
                "deploy_path": self._state.settings.directory,
                "binary_version": f"v{self._release.pd}",
                "git_hash": _GIT_HASH,
            }
            for member in self._state.members()
        ]
        leader = members[self._state.leader or 0]
        header = {"cluster_id": self._state.cluster_id}
        return {"header": header, "members": members, "leader": leader, "etcd_leader": leader}

    def _health(self) -> list[dict[str, Any]]:
        return [
            {
                "name": member.name,
                "member_id": member.member_id,
                "client_urls": list(member.client_urls),
                "health": index != self._state.died,
            }
            for index, member in enumerate(self._state.members())
        ]

    def _gc(self) -> dict[str, Any]:
        services = self._state.gc.services()
        return {
            "service_gc_safe_points": [
                {"service_id": name, "expired_at": safe_point.expires, "safe_point": safe_point.ts}
                for name, safe_point in sorted(services.items())
            ],
            "min_service_gc_safe_point": min(safe_point.ts for safe_point in services.values()),
            "gc_safe_point": self._state.gc.safe_point,
        }

    def _delete_service(self, _request: Request, match: re.Match[str]) -> str:
        self._state.gc.delete_barrier(match["service"])
        return "Delete service GC safepoint successfully."

    def _create_keyspace(self, request: Request, _: re.Match[str]) -> dict[str, Any]:
        created = self._state.keyspaces.create(json.loads(request.body)["name"])
        return {"id": created.id, "name": created.name, "state": "ENABLED", "created_at": created.created_at}

    def _keyspaces(self, _request: Request, _: re.Match[str]) -> dict[str, Any]:
        listed = [{"id": each.id, "name": each.name, "state": "ENABLED"} for each in self._state.keyspaces.all()]
        return {"keyspaces": listed, "next_page_token": ""}


def _keys(request: Request, start: str, end: str) -> tuple[bytes, bytes]:
    """Physical bounds from a query. PD takes them percent-encoded, byte for byte."""
    raw = dict(part.partition("=")[::2] for part in request.query.split("&"))
    return unquote_to_bytes(raw.get(start, "")), unquote_to_bytes(raw.get(end, ""))


def _peer(peer: Peer) -> dict[str, Any]:
    return {"role_name": "Voter", "id": peer.id, "store_id": peer.store_id}


def _mebibytes(size: int) -> int:
    """A size as PD shows it: at least 1 unless the region is empty."""
    return 0 if not size else max(1, size // _MIB)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
