"""Failpoints: calls return errors, are delayed, lose the connection, or find the cluster changed; the interceptor of every RPC, which also measures calls.

docs/playground-failpoints.md describes the JSON objects that arm them.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.region_errors import METHODS, can_carry_region_error, region_of, with_region_error
from tikv_br.playground.store_state import CallClock

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]

ANY_RPC: Final = "*"
BACKUP_REGION: Final = "backup.region"
CDC_REGISTER: Final = "cdc.register"
CDC_SCAN: Final = "cdc.scan"
CDC_RESOLVED: Final = "cdc.resolved"
CDC_TRANSFER: Final = "cdc.transfer"
STORAGE_READ: Final = "storage.read"
STORAGE_WRITE: Final = "storage.write"
STORAGE_POINTS: Final = frozenset({STORAGE_READ, STORAGE_WRITE})
FEED_POINTS: Final = frozenset({CDC_REGISTER, CDC_SCAN, CDC_RESOLVED})
FOREVER: Final = -1

RunCommand = Callable[[str, Mapping[str, Any]], object]
"""Runs an admin command by name with its arguments."""


@dataclass(frozen=True, slots=True)
class RegionError:
    """The call returns this region error."""

    error: errorpb_pb2.Error


@dataclass(frozen=True, slots=True)
class FeedError:
    """A region's subscription ends with this error."""

    error: cdcpb_pb2.Error


@dataclass(frozen=True, slots=True)
class Overrun:
    """A store that lost a region's leadership sends resolved-ts for that time, ahead of the new leader's writes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StorageFailure:
    """The storage fails (``storage_error``), returns damaged bytes (``cut``, ``flip``), or a disk is full (``disk_full``)."""

    kind: str
    message: str = ""
    after: bool = False
    """Write the file nevertheless."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The call ends with a gRPC status."""

    code: grpc.StatusCode
    details: str
    kills_store: bool = False
    """The called store is killed before."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The call waits, then continues."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FailpointCommand:
    """An admin command runs, then the call continues."""

    name: str
    arguments: Mapping[str, Any]


Action = RegionError | FeedError | Overrun | StorageFailure | Abort | Delay | FailpointCommand
DROP: Final = Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@dataclass(slots=True)
class Failpoint:
    """One armed failpoint. ``skip`` and ``count`` are the remaining calls, ``hits`` the calls affected so far."""

    id: int
    rpc: str
    action: Action
    definition: Mapping[str, Any]
    store_id: int | None = None
    region_id: int | None = None
    skip: int = 0
    count: int = 1
    hits: int = 0
    chance: float = 1.0
    random: random.Random = field(default_factory=random.Random)

    def matches(self, rpc: str, store_id: int, region_id: int) -> bool:
        """Return whether the failpoint applies to such a call and is not used up."""
        return (
            (self.rpc == rpc or (self.rpc == ANY_RPC and rpc not in FEED_POINTS | STORAGE_POINTS | {CDC_TRANSFER}))
            and self.store_id in {None, store_id}
            and self.region_id in {None, region_id}
            and self.count != 0
        )

    def trigger(self) -> bool:
        """Count a matching call; whether the call is affected."""
        if self.skip:
            self.skip -= 1
            return False
        if self.random.random() >= self.chance:
            return False
        self.hits += 1
        if self.count != FOREVER:
            self.count -= 1
        return True

    def to_json(self) -> dict[str, Any]:
        return {**self.definition, "id": self.id, "hits": self.hits, "skip": self.skip, "count": self.count}


class FailpointTable:
    """All failpoints of a playground. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._failpoints: dict[int, Failpoint] = {}
        self.run_command: RunCommand | None = None

    def add(self, definition: Mapping[str, Any]) -> Failpoint:
        """Arm a failpoint. Raises `PlaygroundError` for an invalid definition."""
        failpoint = _parse(next(self._ids), definition)
        with self._lock:
            self._failpoints[failpoint.id] = failpoint
        return failpoint

    def remove(self, failpoint_id: int) -> None:
        """Disarm one; no error if there is none of that id."""
        with self._lock:
            self._failpoints.pop(failpoint_id, None)

    def clear(self) -> None:
        with self._lock:
            self._failpoints.clear()

    def all(self) -> list[Failpoint]:
        """Every failpoint, also those whose count is used up, in the order they were added."""
        with self._lock:
            return list(self._failpoints.values())

    def answer(self, rpc: str, request: object, *, store_id: int, context: grpc.ServicerContext) -> Message | None:
        """Return the response to send instead of running a call; None = run it. Otherwise as `intercept`."""
        error = self.intercept(rpc, store_id=store_id, region_id=region_of(request), context=context)
        return None if error is None else with_region_error(rpc, error)

    def intercept(
        self, rpc: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> errorpb_pb2.Error | None:
        """Apply the failpoints that a call matches, in order, until one ends it.

        Returns the region error to answer with, or None to continue. An action such as `Abort` ends the call through
        ``context``.
        """
        action = self._apply(rpc.lower(), store_id, region_id, context)
        return action.error if isinstance(action, RegionError) else None

    def intercept_feed(
        self, point: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> cdcpb_pb2.Error | None:
        """Return the error that ends a region's subscription at a point of a change feed; None = continue."""
        action = self._apply(point, store_id, region_id, context)
        return action.error if isinstance(action, FeedError) else None

    def intercept_storage(self, point: str, *, store_id: int) -> StorageFailure | None:
        actions = self._triggered(point, store_id, 0)
        return next((action for action in actions if isinstance(action, StorageFailure)), None)

    def overrun(self, *, store_id: int, region_id: int) -> float:
        """Seconds for which a store does not notice that it lost a region's leadership, usually 0."""
        actions = self._triggered(CDC_TRANSFER, store_id, region_id)
        return sum(action.seconds for action in actions if isinstance(action, Overrun))

    def _apply(
        self, rpc: str, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> RegionError | FeedError | None:
        for action in self._triggered(rpc, store_id, region_id):
            match action:
                case RegionError() | FeedError():
                    return action
                case Delay(seconds):
                    time.sleep(seconds)
                case FailpointCommand(name, arguments):
                    self._command(name, arguments)
                case Abort(code, details, kills_store):
                    if kills_store:
                        self._command("kill-store", {"store_id": store_id})
                    context.abort(code, details)
        return None

    def _triggered(self, rpc: str, store_id: int, region_id: int) -> list[Action]:
        """Actions up to and with the first that ends the call; later failpoints keep their counts."""
        triggered: list[Action] = []
        with self._lock:
            for failpoint in self._failpoints.values():
                if failpoint.matches(rpc, store_id, region_id) and failpoint.trigger():
                    triggered.append(failpoint.action)
                    if not isinstance(failpoint.action, Delay | FailpointCommand):
                        break
        return triggered

    def _command(self, name: str, arguments: Mapping[str, Any]) -> None:
        if self.run_command is None:
            raise PlaygroundError(f"failpoint: cannot run the command {name}: the admin API is not ready")
        self.run_command(name, arguments)


def _parse(failpoint_id: int, definition: Mapping[str, Any]) -> Failpoint:
    known = {"rpc", "action", "store_id", "region_id", "skip", "count", "chance", "seed"}
    if unknown := set(definition) - known:
        raise PlaygroundError(f"failpoint: unknown fields {sorted(unknown)}")
    rpc = str(definition.get("rpc", "")).lower()
    if rpc not in {ANY_RPC, BACKUP_REGION, CDC_TRANSFER, *FEED_POINTS, *STORAGE_POINTS, *METHODS}:
        raise PlaygroundError(f"failpoint: unknown RPC or point {definition.get('rpc')!r}")
    action = _parse_action(definition.get("action"))
    if isinstance(action, RegionError) and rpc != BACKUP_REGION and not can_carry_region_error(rpc):
        raise PlaygroundError(f"failpoint: the response of {definition['rpc']} has no field for a region error")
    if isinstance(action, FeedError) and rpc not in FEED_POINTS:
        raise PlaygroundError(f"failpoint: feed_error requires one of the points {', '.join(sorted(FEED_POINTS))}")
    if isinstance(action, Overrun) != (rpc == CDC_TRANSFER):
        raise PlaygroundError(f"failpoint: overrun requires the point {CDC_TRANSFER}, which supports no other action")
    if isinstance(action, StorageFailure) != (rpc in STORAGE_POINTS):
        raise PlaygroundError("failpoint: storage faults require a point storage.*, which supports no other action")
    if isinstance(action, StorageFailure) and action.kind in {"cut", "flip"} and rpc != STORAGE_READ:
        raise PlaygroundError(f"failpoint: {action.kind} requires the point {STORAGE_READ}; writes cannot be altered")
    return Failpoint(
        id=failpoint_id,
        rpc=rpc,
        action=action,
        definition=dict(definition),
        store_id=definition.get("store_id"),
        region_id=definition.get("region_id"),
        skip=int(definition.get("skip", 0)),
        count=int(definition.get("count", 1)),
        chance=float(definition.get("chance", 1)),
        random=random.Random(definition.get("seed")),  # noqa: S311 - faults, no secrets
    )


def _parse_action(definition: object) -> Action:  # noqa: C901, PLR0911 - one case per kind
    if not isinstance(definition, Mapping) or len(definition) != 1:
        raise PlaygroundError(f"failpoint: an action must be an object with one field, not {definition!r}")
    [(kind, fields)] = definition.items()
    try:
        match kind:
            case "region_error":
                return RegionError(json_format.ParseDict(fields, errorpb_pb2.Error()))
            case "feed_error":
                return FeedError(json_format.ParseDict(fields, cdcpb_pb2.Error()))
            case "delay":
                return Delay(float(fields["seconds"]))
            case "overrun":
                return Overrun(float(fields["seconds"]))
            case "storage_error":
                return StorageFailure(kind, str(fields["message"]), bool(fields.get("after", False)))
            case "cut" | "flip" | "disk_full":
                return StorageFailure(kind)
            case "abort":
                return Abort(grpc.StatusCode[fields["code"]], fields.get("details", ""))
            case "drop":
                return DROP
            case "kill_store":
                return replace(DROP, kills_store=True)
            case "command":
                return FailpointCommand(fields["name"], fields.get("arguments", {}))
    except (json_format.ParseError, KeyError, TypeError, ValueError) as error:
        raise PlaygroundError(f"failpoint: {kind}: {error}") from error
    raise PlaygroundError(f"failpoint: unknown action {kind!r}")


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
