"""The one place where failpoints, and the clock of calls, meet RPCs: every server of the playground has this interceptor.

Services need not ask the failpoints themselves, save for what an RPC holds inside: the commands of BatchCommands, the
regions of a backup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import Message

from tikv_br.playground import answers
from tikv_br.playground.call_clock import CallClock
from tikv_br.playground.node import Failpoints

PD: Final = 0
"""The store id under which failpoints know PD."""

if TYPE_CHECKING:  # at run time the class takes no parameters
    _Handler = grpc.RpcMethodHandler[Any, Any]

_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_MAKERS: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class FailpointInterceptor(grpc.ServerInterceptor):
    """Lets failpoints strike before the RPC's own code runs. ``store_id`` is that of the server, `PD` for PD's.

    With a ``clock`` it says how long calls take, failpoints included.
    """

    def __init__(self, failpoints: Failpoints, store_id: int, clock: CallClock | None = None) -> None:
        self._failpoints = failpoints
        self._store_id = store_id
        self._clock = clock

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the method's handler, whichever of the four kinds it is."""
        handler = continuation(handler_call_details)
        rpc = str(handler_call_details.method).rpartition("/")[2]
        if handler is None or not answers.is_rpc(rpc):
            return handler
        return self._wrapped(handler, rpc)

    def _wrapped(self, handler: _Handler, rpc: str) -> _Handler:
        around = self._around_stream if handler.response_streaming else self._around_unary
        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        call = next(filter(None, (getattr(handler, kind) for kind in _KINDS)))
        wrapped: _Handler = make(
            around(call, rpc),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _around_unary(self, call: Callable[..., Any], rpc: str) -> Callable[..., Any]:
        def answer(request: object, context: grpc.ServicerContext) -> object:
            with self._timed(rpc):
                struck = self._struck(rpc, request, context)
                return call(request, context) if struck is None else struck

        return answer

    def _around_stream(self, call: Callable[..., Any], rpc: str) -> Callable[..., Any]:
        def answer(request: object, context: grpc.ServicerContext) -> Iterator[object]:
            with self._timed(rpc):
                struck = self._struck(rpc, request, context)
                if struck is None:
                    yield from call(request, context)
                else:
                    yield struck

        return answer

    def _timed(self, rpc: str) -> AbstractContextManager[None]:
        return nullcontext() if self._clock is None else self._clock.running(rpc)

    def _struck(self, rpc: str, request: object, context: grpc.ServicerContext) -> Message | None:
        """The answer that a failpoint wants given, None to go on."""
        error = self._failpoints.intercept(
            rpc, store_id=self._store_id, region_id=answers.region_of(request), context=context
        )
        return None if error is None else answers.with_region_error(rpc, error)
