"""One store's servers: gRPC on its address, HTTP on its status address."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import grpc

from tikv_br.errors import PlaygroundError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.interceptor import FailpointInterceptor
from tikv_br.playground.node import StoreNode
from tikv_br.playground.request_checks import MAX_KEY_SIZE
from tikv_br.playground.servers import ANY_PORT, AddServices, HttpServer, Reply, Request, ReservedPort, start_server
from tikv_br.playground.settings import Settings
from tikv_br.playground.store_state import CallClock

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
