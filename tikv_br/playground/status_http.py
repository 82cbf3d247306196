"""A store's status server: what its configuration is, and that it lives."""

from __future__ import annotations

from typing import Any, Final

from formats.api_version import ApiVersion
from tikv_br.playground.http_server import Reply, Request
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_checks import MAX_KEY_SIZE

_NOT_FOUND: Final = 404


class StatusHttp:
    """Answers ``/config`` and ``/status`` of one store."""

    def __init__(self, node: StoreNode, region_split_size: int) -> None:
        self._node = node
        self._split_size = region_split_size

    def handle(self, request: Request) -> Reply:
        """The sections of the configuration that tools look at; 404 for all other paths."""
        match request.path:
            case "/config":
                return Reply.json(self._config())
            case "/status":
                return Reply()
        return Reply(_NOT_FOUND, b"path not found")

    def _config(self) -> dict[str, Any]:
        version = self._node.api_version
        return {
            "server": {"addr": self._node.address, "status-addr": self._node.status_address},
            "storage": {
                "data-dir": str(self._node.data_dir),
                "engine": "raft-kv",
                "max-key-size": MAX_KEY_SIZE,
                "api-version": 2 if version is ApiVersion.V2 else 1,
                "enable-ttl": version.has_ttl,
            },
            "raftstore": {"raft-entry-max-size": "8MiB", "right-derive-when-split": True},
            "coprocessor": {
                "region-max-size": f"{self._split_size * 3 // 2 >> 10}KiB",
                "region-split-size": f"{self._split_size >> 10}KiB",
            },
            "causal-ts": {
                "renew-interval": "100ms",
                "renew-batch-min-size": 100,
                "renew-batch-max-size": 8192,
                "alloc-ahead-buffer": "3s",
            },
        }
