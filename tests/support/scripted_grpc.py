"""A tiny gRPC server that answers from a script: a fault script readable in one line.

``server.script("/pdpb.PD/GetRegion", fail("UNAVAILABLE"), region)`` fails the first call and answers the second; the last
entry answers all further calls. Requests are kept in ``server.requests``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from tests.support.ports import reserve_port

FEEDS = frozenset({"/cdcpb.ChangeData/EventFeed", "/cdcpb.ChangeData/EventFeedV2"})
STREAMED_REQUESTS = frozenset({"/pdpb.PD/Tso", "/import_sstpb.ImportSST/Upload"}) | FEEDS
STREAMED_ANSWERS = frozenset({"/pdpb.PD/Tso", "/backup.Backup/backup"}) | FEEDS


@dataclass(frozen=True)
class Failure:
    """An answer that is no answer."""

    code: grpc.StatusCode
    details: str = ""


def fail(code: str, details: str = "") -> Failure:
    """A gRPC failure by the name of its status."""
    return Failure(grpc.StatusCode[code], details)


Entry = (
    Message | bytes | Failure | Callable[[bytes], "Message | bytes | Failure | Sequence[Message]"] | Sequence[Message]
)
"""One call's answer: a message, its bytes, a failure, a function of the request, or the messages of a stream."""

M = TypeVar("M", bound=Message)


class ScriptedServer(grpc.GenericRpcHandler):
    """Serves on 127.0.0.1 until closed, at a port that is nobody else's afterwards: it refuses, as a dead server's does."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self._scripts: dict[str, list[Entry]] = {}
        self._lock = threading.Lock()
        self.requests: dict[str, list[bytes]] = defaultdict(list)
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([self])
        self.address = f"127.0.0.1:{reserve_port(self)}"
        if credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, credentials)
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop at once."""
        self._server.stop(grace=None).wait()
        self._pool.shutdown()

    def script(self, method: str, *entries: Entry) -> None:
        """Answer calls of a method by these, in order; the last one stays."""
        with self._lock:
            self._scripts[method] = list(entries)

    def seen(self, method: str, message_class: type[M]) -> list[M]:
        """The requests of a method so far."""
        return [message_class.FromString(data) for data in self.requests[method]]

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Find the handler of a call; gRPC asks."""
        method = str(handler_call_details.method)
        if method not in self._scripts:
            return None
        many_in, many_out = method in STREAMED_REQUESTS, method in STREAMED_ANSWERS

        def one(request: bytes | Iterable[bytes], context: grpc.ServicerContext) -> bytes:
            return list(self._answers(method, request, context))[-1]

        def many(request: bytes | Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._answers(method, request, context)

        if many_in:
            return (
                grpc.stream_stream_rpc_method_handler(many) if many_out else grpc.stream_unary_rpc_method_handler(one)
            )
        return grpc.unary_stream_rpc_method_handler(many) if many_out else grpc.unary_unary_rpc_method_handler(one)

    def _answers(self, method: str, request: bytes | Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for data in [request] if isinstance(request, bytes) else request:
            with self._lock:
                self.requests[method].append(data)
                script = self._scripts[method]
                entry = script.pop(0) if len(script) > 1 else script[0]
            if callable(entry):
                entry = entry(data)
            if isinstance(entry, Failure):
                context.abort(entry.code, entry.details)
            for answer in entry if isinstance(entry, Sequence) and not isinstance(entry, bytes) else [entry]:
                yield answer if isinstance(answer, bytes) else answer.SerializeToString()
