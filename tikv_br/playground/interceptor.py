"""The interceptors of every RPC of the playground: failpoints, and the measurement of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.region_errors import METHODS, with_region_error
from tikv_br.playground.store_state import CallClock

if TYPE_CHECKING:  # at run time the class takes no parameters
    _Handler = grpc.RpcMethodHandler[Any, Any]

_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_MAKERS: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_RAW_WRITES: Final = frozenset({"RawPut", "RawBatchPut", "RawDelete", "RawBatchDelete", "RawDeleteRange"})
_DEADLINE_EXCEEDED: Final = errorpb_pb2.Error(
    message="deadline is exceeded", server_is_busy=errorpb_pb2.ServerIsBusy(reason="deadline is exceeded")
)


class FailpointInterceptor(grpc.ServerInterceptor):
    """Applies failpoints before an RPC runs, and measures it. Every server of the playground has one.

    Services apply only the failpoints of what is inside an RPC: a command of BatchCommands, a region of a backup.
    """

    def __init__(
        self, failpoints: FailpointTable, store_id: int, clock: CallClock, *, drops_late_writes: bool = True
    ) -> None:
        """``drops_late_writes``: whether a raw write that failpoints hold beyond its deadline is refused."""
        self._drops_late_writes = drops_late_writes
        self._failpoints = failpoints
        self._store_id = store_id
        self._clock = clock

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = continuation(handler_call_details)
        rpc = str(handler_call_details.method).rpartition("/")[2]
        if handler is None or rpc.lower() not in METHODS:
            return handler
        call = next(filter(None, (getattr(handler, kind) for kind in _KINDS)))

        def unary(request: object, context: grpc.ServicerContext) -> object:
            with self._clock.measure(rpc):
                began = time.monotonic()
                answer = self._failpoints.answer(rpc, request, store_id=self._store_id, context=context)
                if answer is None and self._is_late(rpc, request, time.monotonic() - began):
                    answer = with_region_error(rpc, _DEADLINE_EXCEEDED)
                return call(request, context) if answer is None else answer

        def stream(request: object, context: grpc.ServicerContext) -> Iterator[object]:
            with self._clock.measure(rpc):
                answer = self._failpoints.answer(rpc, request, store_id=self._store_id, context=context)
                if answer is None:
                    yield from call(request, context)
                else:
                    yield answer

        wrapped: _Handler = _MAKERS[handler.request_streaming, handler.response_streaming](
            stream if handler.response_streaming else unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _is_late(self, rpc: str, request: Any, seconds: float) -> bool:  # noqa: ANN401 - any message
        if not self._drops_late_writes or rpc not in _RAW_WRITES:
            return False
        limit = int(request.context.max_execution_duration_ms)
        return 0 < limit < 1000 * seconds
