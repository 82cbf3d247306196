"""Servers and ports: gRPC, HTTP, and ports reserved for a store that is down."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import grpc
from google.protobuf.message import Message

from tikv_br.errors import PlaygroundError
from tikv_br.playground.settings import TlsSettings

if TYPE_CHECKING:  # at run time the class takes no parameters
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]

LOOPBACK: Final = "127.0.0.1"
ANY_PORT: Final = f"{LOOPBACK}:0"

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
]
_THREADS: Final = 96
"""Upper bound; each open stream takes one. They are started as they are needed."""

AddServices = Callable[[grpc.Server], None]


def unary(request_type: type[Message], call: Callable[[Any, grpc.ServicerContext], Message | bytes]) -> Handler:
    """A handler whose answer may be a message or its serialized bytes."""
    return grpc.unary_unary_rpc_method_handler(call, request_type.FromString, _serialize)


def bidi(request_type: type[Message], call: Callable[[Any, grpc.ServicerContext], Iterable[Message]]) -> Handler:
    """A handler of a stream each way."""
    return grpc.stream_stream_rpc_method_handler(call, request_type.FromString, _serialize)


def _serialize(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def start_server(
    address: str,
    add_services: Iterable[AddServices],
    *,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    tls: TlsSettings | None = None,
) -> tuple[grpc.Server, int]:
    """Start a server on ``host:port`` (port 0: any free one) and return it with its port.

    Raises `PlaygroundError` when the port is taken.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"),
        interceptors=list(interceptors),
        options=_OPTIONS,
    )
    for add in add_services:
        add(server)
    server.add_generic_rpc_handlers([_health()])
    try:
        port = server.add_secure_port(address, _credentials(tls)) if tls else server.add_insecure_port(address)
    except RuntimeError as error:
        raise PlaygroundError(f"cannot listen on {address}: {error}") from error
    server.start()
    return server, port


def _credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    key, certificate, authority = (Path(path).read_bytes() for path in (tls.key, tls.cert, tls.ca))
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=tls.mutual
    )


def _health() -> grpc.GenericRpcHandler:
    """The standard health service, always answering SERVING."""
    check: Handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"\x08\x01")
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. ``query`` is the text after ``?``."""

    method: str
    path: str
    query: str
    body: bytes

    @property
    def parameters(self) -> dict[str, str]:
        """The query's parameters; of one given twice the last."""
        return dict(parse_qsl(self.query, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json; charset=UTF-8"

    @classmethod
    def json(cls, value: object, status: int = 200) -> Reply:
        return cls(status, json.dumps(value, indent=2).encode() + b"\n")


App = Callable[[Request], Reply]


class HttpServer:
    """An HTTP/1.1 server on a thread of its own; serves an app until closed."""

    def __init__(self, app: App, address: str = ANY_PORT, tls: TlsSettings | None = None) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server = _QuietServer((host, int(port)), _handler_of(app))
        except OSError as error:
            raise PlaygroundError(f"cannot listen on {address}: {error.strerror}") from error
        if tls:
            self._server.socket = ssl_context(tls).wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once; the port is free afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """The credentials of a server for TLS, with clients' certificates if they are mutual."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(Path(tls.cert), Path(tls.key))
    context.verify_mode = ssl.CERT_REQUIRED if tls.mutual else ssl.CERT_OPTIONAL
    return context


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect early."""


def _handler_of(app: App) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = app(Request(self.command, parts.path, parts.query, body))
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server finds them by name

        def log_message(self, *_: object) -> None:
            """Log no requests."""

    return Handler


class ReservedPort:
    """A port that refuses connections, and that the kernel gives to nobody else: its socket is bound and does not listen.

    Servers that set SO_REUSEADDR, as all of ours do, can listen there all the same.
    """

    def __init__(self, port: int = 0) -> None:
        """Port 0 means any. Raises `PlaygroundError` when it is taken."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise PlaygroundError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        self.address = f"{LOOPBACK}:{self.port}"

    def close(self) -> None:
        self._socket.close()
