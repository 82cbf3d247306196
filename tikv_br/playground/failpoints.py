"""Faults on demand: calls answer with an error, come late, lose the connection, or find the cluster changed.

A failpoint is described by a JSON object::

    {"rpc": "RawScan", "count": 2, "skip": 1, "store_id": 1, "region_id": 16, "action": {...}}

``rpc`` is the method's name in any case, ``*``, or a point within an RPC: ``backup.region`` (before each region that a
backup writes), ``cdc.register`` (before each registration of a change feed), ``cdc.scan`` (before each batch of an
incremental scan), ``cdc.resolved`` (before a region's resolved-ts is told), ``cdc.transfer`` (when a store loses the lead of a
region that somebody is subscribed to there), ``storage.read`` and ``storage.write`` (when a store fetches or writes a file of a
backup). ``count`` -1 means until it is removed; store and region are optional (store 0 is PD). With ``chance`` (0 to 1) it strikes
that share of the calls, by ``seed``. The action is one of

* ``{"region_error": {"server_is_busy": {"reason": "..."}}}`` any field of ``errorpb.Error``
* ``{"feed_error": {"congested": {"region_id": "16"}}}`` at a point ``cdc.*``: ends the region's subscription with any
  field of ``cdcpb.Error``
* ``{"overrun": {"seconds": 2}}`` at ``cdc.transfer`` only, and alone there: the old leader does not notice for so long, and goes on
  to tell resolved-ts, PD's newest, while the new leader writes below them
* ``{"storage_error": {"message": "..."}}`` at a point ``storage.*``: the storage fails so; with ``"after": true`` the file was written
* ``{"cut": {}}`` and ``{"flip": {}}`` at ``storage.read``: the file comes short, or with one bit altered
* ``{"abort": {"code": "UNAVAILABLE", "details": "..."}}`` any gRPC status
* ``{"drop": {}}`` the connection is lost
* ``{"delay": {"seconds": 0.5}}`` the call goes on afterwards
* ``{"kill_store": {}}`` the store called dies as of kill -9
* ``{"command": {"name": "split", "arguments": {...}}}`` an admin command is run, then the call goes on
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import json_format

from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground import answers

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
    """Answer with this instead of doing the work."""

    error: errorpb_pb2.Error


@dataclass(frozen=True, slots=True)
class FeedError:
    """End a region's subscription with this."""

    error: cdcpb_pb2.Error


@dataclass(frozen=True, slots=True)
class Overrun:
    """Let a store that lost a region's lead tell resolved-ts for so long, ahead of the new leader's writes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StorageTrouble:
    """Let the storage fail, or give other bytes than it has."""

    kind: str
    """``storage_error``, ``cut`` or ``flip``."""
    message: str = ""
    after: bool = False
    """Whether a write has had its effect."""

    @property
    def damages(self) -> bool:
        """Whether other bytes are read than were written."""
        return self.kind in {"cut", "flip"}


@dataclass(frozen=True, slots=True)
class Abort:
    """End the call with a gRPC status."""

    code: grpc.StatusCode
    details: str


@dataclass(frozen=True, slots=True)
class Delay:
    """Let the call wait, then go on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KillStore:
    """Kill the store that was called."""


@dataclass(frozen=True, slots=True)
class Command:
    """Run an admin command while the call waits, then go on."""

    name: str
    arguments: Mapping[str, Any]


Action = RegionError | FeedError | Overrun | StorageTrouble | Abort | Delay | KillStore | Command
DROP: Final = Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@dataclass(slots=True)
class Failpoint:
    """One fault that was asked for, with how often it still may and already did strike."""

    id: int
    rpc: str
    action: Action
    store_id: int | None = None
    region_id: int | None = None
    skip: int = 0
    count: int = 1
    hits: int = 0
    chance: float = 1.0
    throws: random.Random = field(default_factory=random.Random)
    asked: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, rpc: str, store_id: int, region_id: int) -> bool:
        """Whether a call is of the kind meant, never mind how often it was already."""
        return (
            (self.rpc == rpc or (self.rpc == ANY_RPC and rpc not in FEED_POINTS | STORAGE_POINTS | {CDC_TRANSFER}))
            and self.store_id in {None, store_id}
            and self.region_id in {None, region_id}
            and self.count != 0
        )

    def strike(self) -> bool:
        """Count a matching call; whether it is to be struck."""
        if self.skip:
            self.skip -= 1
            return False
        if self.throws.random() >= self.chance:
            return False
        self.hits += 1
        if self.count != FOREVER:
            self.count -= 1
        return True

    def to_json(self) -> dict[str, Any]:
        """As it was asked for, with id, hits so far, and what is left."""
        return {**self.asked, "id": self.id, "hits": self.hits, "skip": self.skip, "count": self.count}


class FailpointTable:
    """All failpoints of a playground. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._failpoints: dict[int, Failpoint] = {}
        self._run_command: RunCommand | None = None

    def use_commands(self, run: RunCommand) -> None:
        """Tell how `Command` and `KillStore` are carried out."""
        self._run_command = run

    def add(self, asked: Mapping[str, Any]) -> Failpoint:
        """Arm a failpoint described as in the module's docstring. Raises `PlaygroundError` for one that cannot be."""
        failpoint = _parse(next(self._ids), asked)
        with self._lock:
            self._failpoints[failpoint.id] = failpoint
        return failpoint

    def remove(self, failpoint_id: int) -> None:
        """Disarm one; no error when it is gone already."""
        with self._lock:
            self._failpoints.pop(failpoint_id, None)

    def clear(self) -> None:
        """Disarm all."""
        with self._lock:
            self._failpoints.clear()

    def all(self) -> list[Failpoint]:
        """Every failpoint, also those whose count is used up, in the order they were added."""
        with self._lock:
            return list(self._failpoints.values())

    def intercept(
        self, rpc: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> errorpb_pb2.Error | None:
        """Let every failpoint that a call meets strike, in order, until one ends the call.

        Returns the region error to answer with, None when the call shall go its way; ends the call through the
        context where that was asked for. The interceptor calls this for each RPC.
        """
        answer = self._strike(rpc.lower(), store_id, region_id, context)
        return answer.error if isinstance(answer, RegionError) else None

    def intercept_feed(
        self, point: str, *, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> cdcpb_pb2.Error | None:
        """As `intercept`, at a point of a change feed: the error that ends the region's subscription, or None."""
        answer = self._strike(point, store_id, region_id, context)
        return answer.error if isinstance(answer, FeedError) else None

    def intercept_storage(self, point: str, *, store_id: int) -> StorageTrouble | None:
        """What is to happen to a file that a store fetches or writes; None: nothing."""
        actions = self._struck(point, store_id, 0)
        return next((action for action in actions if isinstance(action, StorageTrouble)), None)

    def overrun(self, *, store_id: int, region_id: int) -> float:
        """Seconds for which a store shall not notice that it lost a region's lead; 0 as a rule."""
        actions = self._struck(CDC_TRANSFER, store_id, region_id)
        return sum(action.seconds for action in actions if isinstance(action, Overrun))

    def _strike(
        self, rpc: str, store_id: int, region_id: int, context: grpc.ServicerContext
    ) -> RegionError | FeedError | None:
        for action in self._struck(rpc, store_id, region_id):
            if isinstance(action, RegionError | FeedError):
                return action
            self._carry_out(action, store_id, context)
        return None

    def _struck(self, rpc: str, store_id: int, region_id: int) -> list[Action]:
        """Actions up to and with the first that ends the call; later failpoints keep their counts."""
        struck: list[Action] = []
        with self._lock:
            for failpoint in self._failpoints.values():
                if failpoint.matches(rpc, store_id, region_id) and failpoint.strike():
                    struck.append(failpoint.action)
                    if not isinstance(failpoint.action, Delay | Command):
                        break
        return struck

    def _carry_out(self, action: Action, store_id: int, context: grpc.ServicerContext) -> None:
        match action:
            case Delay(seconds):
                time.sleep(seconds)
            case Command(name, arguments):
                self._command(name, arguments)
            case KillStore():
                self._command("kill-store", {"store_id": store_id})
                context.abort(DROP.code, DROP.details)
            case Abort(code, details):
                context.abort(code, details)
            case RegionError() | FeedError() | Overrun() | StorageTrouble():
                raise AssertionError("errors are answered by the caller")

    def _command(self, name: str, arguments: Mapping[str, Any]) -> None:
        if self._run_command is None:
            raise PlaygroundError(f"failpoint: no admin here to run {name}")
        self._run_command(name, arguments)


def _parse(failpoint_id: int, asked: Mapping[str, Any]) -> Failpoint:
    known = {"rpc", "action", "store_id", "region_id", "skip", "count", "chance", "seed"}
    if unknown := set(asked) - known:
        raise PlaygroundError(f"failpoint: unknown fields {sorted(unknown)}")
    rpc = str(asked.get("rpc", "")).lower()
    if rpc not in {ANY_RPC, BACKUP_REGION, CDC_TRANSFER, *FEED_POINTS, *STORAGE_POINTS} and not answers.is_rpc(rpc):
        raise PlaygroundError(f"failpoint: no RPC is called {asked.get('rpc')!r}")
    action = _parse_action(asked.get("action"))
    if isinstance(action, RegionError) and rpc != BACKUP_REGION and not answers.can_carry_region_error(rpc):
        raise PlaygroundError(f"failpoint: an answer to {asked['rpc']} has no place for a region error")
    if isinstance(action, FeedError) and rpc not in FEED_POINTS:
        raise PlaygroundError(f"failpoint: a feed error belongs to one of {', '.join(sorted(FEED_POINTS))}")
    if isinstance(action, Overrun) != (rpc == CDC_TRANSFER):
        raise PlaygroundError(f"failpoint: an overrun belongs to {CDC_TRANSFER}, and nothing else does")
    if isinstance(action, StorageTrouble) != (rpc in STORAGE_POINTS):
        raise PlaygroundError("failpoint: trouble of the storage belongs to a point storage.*, and nothing else does")
    if isinstance(action, StorageTrouble) and action.damages and rpc != STORAGE_READ:
        raise PlaygroundError(f"failpoint: what is written is not altered; {action.kind} belongs to {STORAGE_READ}")
    return Failpoint(
        id=failpoint_id,
        rpc=rpc,
        action=action,
        store_id=asked.get("store_id"),
        region_id=asked.get("region_id"),
        skip=int(asked.get("skip", 0)),
        count=int(asked.get("count", 1)),
        chance=float(asked.get("chance", 1)),
        throws=random.Random(asked.get("seed")),  # noqa: S311 - faults, no secrets
        asked=dict(asked),
    )


def _parse_trouble(kind: str, fields: Mapping[str, Any]) -> StorageTrouble:
    if kind != "storage_error":
        return StorageTrouble(kind)
    return StorageTrouble(kind, str(fields["message"]), bool(fields.get("after", False)))


def _parse_action(asked: object) -> Action:
    if not isinstance(asked, Mapping) or len(asked) != 1:
        raise PlaygroundError(f"failpoint: an action is an object of one field, not {asked!r}")
    [(kind, fields)] = asked.items()
    try:
        match kind:
            case "region_error":
                return RegionError(json_format.ParseDict(fields, errorpb_pb2.Error()))
            case "feed_error":
                return FeedError(json_format.ParseDict(fields, cdcpb_pb2.Error()))
            case "delay" | "overrun":
                return (Delay if kind == "delay" else Overrun)(float(fields["seconds"]))
            case "storage_error" | "cut" | "flip":
                return _parse_trouble(kind, fields)
            case "abort" | "drop":
                return DROP if kind == "drop" else Abort(grpc.StatusCode[fields["code"]], fields.get("details", ""))
            case "kill_store":
                return KillStore()
            case "command":
                return Command(fields["name"], fields.get("arguments", {}))
    except (json_format.ParseError, KeyError, TypeError, ValueError) as error:
        raise PlaygroundError(f"failpoint: {kind}: {error}") from error
    raise PlaygroundError(f"failpoint: unknown action {kind!r}")
