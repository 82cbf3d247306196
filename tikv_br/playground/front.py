"""PD's one port: gRPC and HTTP/1.1 side by side, told apart by a connection's first bytes, TLS taken off here."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from typing import Final

from tikv_br.errors import PlaygroundError
from tikv_br.playground.http_server import ssl_context
from tikv_br.playground.settings import TlsSettings

_HTTP2: Final = b"PRI * HTTP/2.0"
_CHUNK: Final = 1 << 16
_STOP_SECONDS: Final = 5.0


class Front:
    """Accepts connections and passes each on to the gRPC or the HTTP server behind. One thread, one event loop."""

    def __init__(self, address: str, grpc_port: int, http_port: int, tls: TlsSettings | None = None) -> None:
        self._grpc_port = grpc_port
        self._http_port = http_port
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        host, _, port = address.rpartition(":")
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, host, int(port), ssl=_context(tls))
            )
        except OSError as error:
            self._loop.close()
            raise PlaygroundError(f"cannot listen on {address}: {error.strerror}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="pd-front", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and drop every connection."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await self._idle.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        self._idle.clear()
        try:
            # A client that goes away, or speaks no TLS, ends its own connection and nothing else.
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
        port = self._grpc_port if first.startswith(_HTTP2) else self._http_port
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
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
            inner_writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()


def _context(tls: TlsSettings | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl_context(tls)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
