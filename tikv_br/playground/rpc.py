"""gRPC servers as TiKV and PD set them up: unlimited messages, any rate of pings, many streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from tikv_br.errors import PlaygroundError
from tikv_br.playground.settings import TlsSettings

if TYPE_CHECKING:  # at run time the class takes no parameters
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]

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
    return grpc.unary_unary_rpc_method_handler(call, request_type.FromString, serialize)


def bidi(request_type: type[Message], call: Callable[[Any, grpc.ServicerContext], Iterable[Message]]) -> Handler:
    """A handler of a stream each way."""
    return grpc.stream_stream_rpc_method_handler(call, request_type.FromString, serialize)


def serialize(answer: Message | bytes) -> bytes:
    """The bytes of an answer."""
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

    def serving(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        return b"\x08\x01"

    check: Handler = grpc.unary_unary_rpc_method_handler(serving)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
