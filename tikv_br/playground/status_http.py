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
            "raftstore": {"raft-entry-max-size": "8MiB"},
            "coprocessor": {
                "region-max-size": _readable(self._split_size * 3 // 2),
                "region-split-size": _readable(self._split_size),
            },
            "causal-ts": {
                "renew-interval": "100ms",
                "renew-batch-min-size": 100,
                "renew-batch-max-size": 8192,
                "alloc-ahead-buffer": "3s",
            },
        }


def _readable(size: int) -> str:
    """A size as TiKV writes it: in the largest unit that divides it."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size}B"
