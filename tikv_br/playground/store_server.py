"""One store's servers: gRPC on its address, HTTP on its status address."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from tikv_br.playground.call_clock import CallClock
from tikv_br.playground.http_server import HttpServer
from tikv_br.playground.interceptor import FailpointInterceptor
from tikv_br.playground.node import StoreNode
from tikv_br.playground.rpc import AddServices, start_server
from tikv_br.playground.settings import Settings
from tikv_br.playground.status_http import StatusHttp

ServicesOf = Callable[[StoreNode], Iterable[AddServices]]
"""Builds the services of a store anew, as a process that starts does."""


class StoreServer:
    """Starts and stops one store. The node's addresses are those it had before, as far as they are free."""

    def __init__(self, node: StoreNode, services_of: ServicesOf, settings: Settings, clock: CallClock) -> None:
        self.node = node
        self._clock = clock
        self._services_of = services_of
        self._settings = settings
        self._grpc: grpc.Server | None = None
        self._http: HttpServer | None = None

    def start(self) -> None:
        """Open both ports and write them into the node. Raises `PlaygroundError` when one is taken."""
        node, tls = self.node, self._settings.tls
        status = StatusHttp(node, self._settings.region_split_size)
        self._http = HttpServer(status.handle, node.status_address, tls)
        node.status_address = f"127.0.0.1:{self._http.port}"
        failpoints = FailpointInterceptor(node.failpoints, node.store_id, self._clock)
        services = list(self._services_of(node))
        self._grpc, port = start_server(node.address, services, interceptors=[failpoints], tls=tls)
        node.address = f"127.0.0.1:{port}"
        node.alive = True

    def stop(self) -> None:
        """Close both ports at once: calls under way are cut off, as by kill -9."""
        self.node.alive = False
        if self._grpc is not None:
            self._grpc.stop(None)  # not waited for: one of its own calls may be asking for this
            self._grpc = None
        if self._http is not None:
            self._http.close()
            self._http = None
