"""PD's HTTP API: what its gRPC does not tell, and what only HTTP can set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from tikv_br.cluster import retry
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.http_json import request_json
from tikv_br.cluster.pd_connection import PdConnection
from tikv_br.errors import ClusterUnreachable, RequestRefused

API = "/pd/api/v1"
MIB = 1 << 20
_SILENT = {"Disconnected", "Down"}


@dataclass(frozen=True, slots=True)
class RegionSize:
    """PD's estimate of a region, some seconds old; sizes are in whole MiB and so often 0 or 1."""

    bytes: int
    keys: int


class PdHttp:
    """PD's leader over HTTP. Every call raises `ClusterError` after ``config.retry_budget`` seconds of trouble."""

    def __init__(self, connection: PdConnection) -> None:
        self._connection = connection
        self._config: ClusterConfig = connection.config

    def cluster_version(self) -> str:
        """The version that all stores have at least, such as ``8.5.2``."""
        version = self._request("GET", "/config/cluster-version")
        if not isinstance(version, str):
            raise RequestRefused(f"PD: the cluster version is no text: {version!r}")
        return version.removeprefix("v")

    def region_sizes(self) -> dict[int, RegionSize]:
        """Estimates for all regions, by id. One large answer: about 500 bytes a region on the wire, 250 in memory."""
        document = cast("dict[str, Any]", self._request("GET", "/regions", object_hook=_region_size))
        return dict(document.get("regions") or ())

    def silent_stores(self) -> frozenset[int]:
        """Ids of the stores that PD has not heard of for 20 s or more, though it had before.

        A store that has just started counts as down, too, until its first heartbeat; such a one is not meant here.
        """
        document = cast("dict[str, Any]", self._request("GET", "/stores"))
        return frozenset(
            item["store"]["id"]
            for item in document.get("stores") or ()
            if item["store"].get("state_name") in _SILENT and not _never(item["status"].get("last_heartbeat_ts", ""))
        )

    def max_replicas(self) -> int:
        """How many copies of a region PD aims at."""
        document = cast("dict[str, Any]", self._request("GET", "/config/replicate"))
        return int(document["max-replicas"])

    def schedulers(self, *, paused: bool = False) -> list[str]:
        """Names of the schedulers that PD has, or of those among them that are paused."""
        path = "/schedulers?status=paused" if paused else "/schedulers"
        return list(cast("Sequence[str]", self._request("GET", path) or ()))

    def pause_scheduler(self, name: str, seconds: int) -> None:
        """Keep a scheduler still for so many seconds; 0 lets it go on at once."""
        self._request("POST", f"/schedulers/{quote(name, safe='')}", {"delay": seconds})

    def document(self, path: str) -> object:
        """The JSON document at a path below ``/pd/api/v1``; what the documents mean: `pd_status`."""
        return self._request("GET", path)

    def _request(
        self,
        method: str,
        path: str,
        payload: object = None,
        *,
        object_hook: Callable[[dict[str, Any]], object] | None = None,
    ) -> object:
        backoffer = retry.Backoffer(f"PD {path}", self._config.retry_budget)
        while True:
            leader = self._connection.leader
            url = f"{self._config.tls.scheme}://{leader.address}{API}{path}"
            try:
                tls, timeout = self._config.tls, self._config.request_timeout
                return request_json(method, url, tls, timeout, payload, object_hook=object_hook)
            except ClusterUnreachable as error:
                backoffer.wait(retry.PD_TROUBLE, error)
                self._connection.refresh(leader, backoffer)


def _region_size(document: dict[str, Any]) -> object:
    """Keep of a region what is asked for, as it is parsed: whole ones take 4 KB each."""
    if "start_key" not in document:
        return document
    return document["id"], RegionSize(document.get("approximate_size", 0) * MIB, document.get("approximate_keys", 0))


def _never(heartbeat: str) -> bool:
    """Whether a store's last heartbeat is that of one that had none: zero time, in PD's several forms."""
    return heartbeat[:4] in {"", "0001", "1970"}
