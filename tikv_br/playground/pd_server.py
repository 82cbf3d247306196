"""PD's servers: its members and their ports, and changes of its leader on demand."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import grpc

from tikv_br.errors import PlaygroundError
from tikv_br.playground.admin import Admin
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.interceptor import FailpointInterceptor
from tikv_br.playground.pd_etcd import EtcdService
from tikv_br.playground.pd_http import PdHttpApi
from tikv_br.playground.pd_service import PdService
from tikv_br.playground.pd_state import PdState
from tikv_br.playground.servers import (
    ANY_PORT,
    LOOPBACK,
    HttpServer,
    Reply,
    Request,
    ReservedPort,
    ssl_context,
    start_server,
)
from tikv_br.playground.settings import TlsSettings
from tikv_br.playground.store_state import CallClock

PD: Final = 0
"""The store id under which failpoints know PD."""
ANSWER_SECONDS: Final = 0.2
"""Delay before PD goes down: its port is also that of the admin API, which must answer first."""
ELECTION_SECONDS: Final = 0.3
"""Seconds from the election of PD's leader until it serves, and from then until stores have found it."""
_HTTP2: Final = b"PRI * HTTP/2.0"
_CHUNK: Final = 1 << 16
_STOP_SECONDS: Final = 5.0
_ACCEPT_SECONDS: Final = 0.02
"""Delay for connections being accepted when the listener closes; they would stay open without an answer."""


class Front:
    """PD's port: ends TLS, and passes each connection on to the gRPC or the HTTP server, by its first bytes.

    One thread, one event loop.
    """

    def __init__(self, address: str, grpc_port: int, http_port: int, tls: TlsSettings | None = None) -> None:
        self.grpc_port, self.http_port = grpc_port, http_port
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        context = None
        if tls is not None:
            context = ssl_context(tls)
            context.set_alpn_protocols(["h2", "http/1.1"])
        host, _, port = address.rpartition(":")
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, host, int(port), ssl=context)
            )
        except OSError as error:
            self._loop.close()
            raise PlaygroundError(f"cannot listen on {address}: {error.strerror}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="pd-front", daemon=True)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(_ACCEPT_SECONDS)
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await self._idle.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        self._idle.clear()
        try:
            # A client that disconnects, or speaks no TLS, ends its own connection and nothing else.
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await self._serve(reader, writer)
        finally:
            writer.close()
            self._clients.discard(writer)
            if not self._clients:
                self._idle.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(_CHUNK)
        while first and len(first) < len(_HTTP2) and _HTTP2.startswith(first):
            more = await reader.read(_CHUNK)
            if not more:
                return
            first += more
        if not first:
            return
        port = self.grpc_port if first.startswith(_HTTP2) else self.http_port
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, port)
        inner_writer.write(first)
        pumps = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            inner_writer.transport.abort()  # not `close`, which may still wait for the server when the loop ends


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()


class PdServer:
    """The members of PD. To be started once."""

    def __init__(self, state: PdState, api: PdHttpApi, failpoints: FailpointTable) -> None:
        self._state, self._api, self._failpoints = state, api, failpoints
        self._http: HttpServer | None = None
        self._members: list[grpc.Server] = []
        self._fronts: list[Front] = []
        self._closed: list[Front] = []
        self._reserved: list[ReservedPort] = []
        self._change: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, admin: Admin, ports: Mapping[str, int]) -> None:
        """Start all members, on the ports of before if they are free. Raises `PlaygroundError` if ``--port`` is taken.

        PD's HTTP port also serves the admin API.
        """
        self._http = HttpServer(lambda request: admin.handle(request) or self._answer(request))
        for index in range(self._state.settings.pd_members):
            failpoints = FailpointInterceptor(self._failpoints, PD, CallClock())  # `calls` counts those of stores only
            service = PdService(self._state, index)
            etcd = EtcdService(self._state.etcd, lambda: self._state.leader is not None)
            member, port = start_server(ANY_PORT, [service.add_to, etcd.add_to], interceptors=[failpoints])
            self._members.append(member)
            self._fronts.append(self._open_front(index, port, self._http.port, ports))
        self._state.addresses = [f"{LOOPBACK}:{front.port}" for front in self._fronts]

    def stop(self) -> None:
        """Close all ports, after a change of the leader that is under way."""
        self._stopping.set()
        if self._change is not None:
            self._change.join()
        for front in self._fronts:
            front.close()
        if self._http is not None:
            self._http.close()
        for member in self._members:
            member.stop(None)

    @property
    def ports(self) -> dict[str, int]:
        return {_name(index): front.port for index, front in enumerate(self._fronts)}

    def kill(self, seconds: float) -> None:
        """Stop PD shortly afterwards, as kill -9 does, for so many seconds; the stores continue."""
        self._change_by((ANSWER_SECONDS, self._close), (seconds, self._reopen))

    def move_leader(self, seconds: float) -> None:
        """End the leadership of PD's leader; after so many seconds the next member leads, which is the same one if it is alone.

        For the second half of that time, the next one is known as the leader, and does not serve yet.
        """
        elect, serve = self._elections()
        self._change_by((seconds / 2, elect), (seconds / 2, serve))
        self._state.end_leadership()
        self._state.named = None

    def kill_leader(self, seconds: float, lease: float = 1.0) -> None:
        """Stop PD's leader shortly afterwards, as kill -9 does, for so many seconds.

        The others name it as the leader until its lease ends. Then the next one leads; stores find it a moment later.
        """
        if self._state.settings.pd_members == 1:
            raise PlaygroundError("PD has only one member: kill-pd stops it")
        elect, serve = self._elections()
        rest = max(0.0, seconds - lease - 2 * ELECTION_SECONDS)
        self._change_by(
            (ANSWER_SECONDS, self._close_leader),
            (lease, elect),
            (ELECTION_SECONDS, serve),
            (rest, self._reopen),
        )

    def _elections(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Let the others name the next member as the leader; let it lead."""
        following = ((self._state.leader or 0) + 1) % self._state.settings.pd_members

        def elect() -> None:
            self._state.named = following

        def serve() -> None:
            self._state.lead(following)
            self._stopping.wait(ELECTION_SECONDS if self._state.died is not None else 0)
            self._state.tso.available = True

        return elect, serve

    def _change_by(self, *steps: tuple[float, Callable[[], None]]) -> None:
        """Take steps one by one in a thread, each after so many seconds."""
        if self._change is not None and self._change.is_alive():
            raise PlaygroundError("PD is down already, about to be, or has no leader")

        def run() -> None:
            for seconds, step in steps:
                self._stopping.wait(seconds)  # less if the playground ends
                step()

        self._change = threading.Thread(target=run, name="pd-change", daemon=True)
        self._change.start()

    def _open_front(self, index: int, grpc_port: int, http_port: int, ports: Mapping[str, int]) -> Front:
        """The port of a member of PD: of the first the one that was asked for, else the one of before, if it is free."""
        asked = self._state.settings.pd_port if index == 0 else 0
        address = f"{LOOPBACK}:{asked or ports.get(_name(index), 0)}"
        try:
            return Front(address, grpc_port, http_port, self._state.settings.tls)
        except PlaygroundError:
            if asked:
                raise
            return Front(ANY_PORT, grpc_port, http_port, self._state.settings.tls)

    def _answer(self, request: Request) -> Reply:
        """Answer as the leader does, to which members pass requests on; while there is none, as a member that has found none."""
        state = self._state
        if state.leader is not None:
            return self._api.handle(request)
        if state.named is None:
            return Reply(HTTPStatus.SERVICE_UNAVAILABLE, b"no leader\n", "text/plain; charset=utf-8")
        text = b"redirect failed\n" if state.named == state.died else b"redirect to not leader\n"
        return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain; charset=utf-8")

    def _close_leader(self) -> None:
        self._state.end_leadership()
        self._state.died = self._state.former
        self._close()

    def _close(self) -> None:
        """Close the port of the dead member, or of all; they refuse connections."""
        self._state.tso.available = False
        died = self._state.died
        self._closed = self._fronts if died is None else [self._fronts[died]]
        for front in self._closed:
            front.close()
        self._reserved = [ReservedPort(front.port) for front in self._closed]

    def _reopen(self) -> None:
        ports = {front.port for front in self._closed}
        self._fronts = [
            Front(f"{LOOPBACK}:{front.port}", front.grpc_port, front.http_port, self._state.settings.tls)
            if front.port in ports
            else front
            for front in self._fronts
        ]
        for port in self._reserved:
            port.close()
        self._closed, self._reserved, self._state.died = [], [], None
        self._state.tso.available = True


def _name(index: int) -> str:
    """The key of a member's port; the first one's is that of playgrounds of before."""
    return "pd" if index == 0 else f"pd{index + 1}"
