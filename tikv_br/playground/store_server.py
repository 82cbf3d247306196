"""One store's servers: gRPC on its address, HTTP on its status address."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import grpc

from tikv_br.playground.call_clock import CallClock
from tikv_br.playground.held_port import HeldPort
from tikv_br.playground.http_server import HttpServer
from tikv_br.playground.interceptor import FailpointInterceptor
from tikv_br.playground.node import StoreNode
from tikv_br.playground.rpc import AddServices, start_server
from tikv_br.playground.settings import Settings
from tikv_br.playground.status_http import StatusHttp

ServicesOf = Callable[[StoreNode], Iterable[AddServices]]
"""Builds the services of a store anew, as a process that starts does."""


class StoreServer:
    """Starts and stops one store. The node's addresses are those it had before, as far as they are free.

    While the store is down its ports stay its own: they refuse. Thread-safe.
    """

    def __init__(self, node: StoreNode, services_of: ServicesOf, settings: Settings, clock: CallClock) -> None:
        self.node = node
        self._clock = clock
        self._services_of = services_of
        self._settings = settings
        self._lock = threading.Lock()
        self._held: list[HeldPort] = []
        self._grpc: grpc.Server | None = None
        self._http: HttpServer | None = None

    def start(self) -> None:
        """Open both ports and write them into the node; nothing to do where it runs. Raises `PlaygroundError` when one is taken."""
        node = self.node
        with self._lock:
            if self._grpc is not None:
                return
            self._hold_ports()
            self._grpc = self._start_grpc()
            status = StatusHttp(node, self._settings.region_split_size)
            self._http = HttpServer(status.handle, node.status_address, self._settings.tls)
            node.alive = True

    def stop(self) -> None:
        """Close both ports at once: calls under way are cut off, as by kill -9."""
        with self._lock:
            self.node.alive = False
            if self._grpc is not None:
                self._grpc.stop(None)  # not waited for: one of its own calls may be asking for this
                self._grpc = None
            if self._http is not None:
                self._http.close()
                self._http = None

    def release(self) -> None:
        """Let others have the ports of a store that is stopped for good, or moves."""
        for held in self._held:
            held.close()
        self._held = []

    def _hold_ports(self) -> None:
        node = self.node
        if not self._held:
            for address in (node.address, node.status_address):
                self._held.append(HeldPort(int(address.rpartition(":")[2])))
            node.address, node.status_address = (held.address for held in self._held)

    def _start_grpc(self) -> grpc.Server:
        node, tls = self.node, self._settings.tls
        failpoints = FailpointInterceptor(node.failpoints, node.store_id, self._clock)
        return start_server(node.address, self._services_of(node), interceptors=[failpoints], tls=tls)[0]
