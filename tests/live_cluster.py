"""A playground for tests: started as a process of its own, steered by its admin API, stopped and checked for crimes."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.api_version import ApiVersion
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.playground import launcher


class LiveCluster:
    """A running playground and a client of it."""

    def __init__(self, state: dict[str, Any], config: ClusterConfig) -> None:
        self.pd: str = state["pd"]
        self.store_ids: list[int] = [store["id"] for store in state["stores"]]
        self.config = config
        self.cluster = Cluster.connect(config)

    def raw(self, keyspace_id: int = 0) -> RawClient:
        """Return a client of one keyspace."""
        return self.cluster.raw(keyspace_id)

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Ask PD's HTTP port."""
        return self._call("GET", path)

    def run(self, command: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Run a command of the admin API."""
        return self._call("POST", f"/playground/{command}", arguments)

    def regions(self) -> list[dict[str, Any]]:
        """Return all regions as the playground has them."""
        found: list[dict[str, Any]] = self.get("/playground/regions")
        return found

    def fail(self, rpc: str, action: dict[str, Any], **limits: int) -> int:
        """Arm a failpoint and return its id."""
        return int(self._call("POST", "/playground/failpoints", {"rpc": rpc, "action": action, **limits})["id"])

    def hits(self, failpoint: int) -> int:
        """Return how often a failpoint has struck."""
        return next(int(item["hits"]) for item in self.get("/playground/failpoints") if item["id"] == failpoint)

    def heal(self) -> None:
        """Disarm all failpoints and restart dead stores."""
        self._call("DELETE", "/playground/failpoints")
        for store_id in self.store_ids:
            self.run("restart-store", store_id=store_id)

    def _call(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        connection = http.client.HTTPConnection(self.pd, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            data = answer.read()
        assert answer.status == http.client.OK, f"{method} {path}: {answer.status} {data!r}"
        return json.loads(data)


@contextlib.contextmanager
def live_cluster(directory: Path, api_version: ApiVersion, **settings: object) -> Iterator[LiveCluster]:
    """Run a playground for the length of the block; a request that would have killed a real store fails the test."""
    settings = {"api_version": api_version.value, "keyspace_split_delay": 0.0, "balance": False, **settings}
    started = launcher.start(directory, settings, detached=False)
    try:
        live = LiveCluster(started.state, ClusterConfig(pd=(started.state["pd"],), retry_budget=10.0))
        with live.cluster:
            yield live
            assert live.get("/playground/crimes") == []
    finally:
        started.process.terminate()
        started.process.wait(20)
