"""Faults on demand: calls answer with an error, come late, lose the connection, or find the cluster changed.

A failpoint is described by a JSON object::

    {"rpc": "RawScan", "count": 2, "skip": 1, "store_id": 1, "region_id": 16, "action": {...}}

``rpc`` is the method's name in any case, ``backup.region`` (before each region that a backup writes) or ``*``; ``count``
-1 means until it is removed; store and region are optional (store 0 is PD). The action is one of

* ``{"region_error": {"server_is_busy": {"reason": "..."}}}`` any field of ``errorpb.Error``
* ``{"abort": {"code": "UNAVAILABLE", "details": "..."}}`` any gRPC status
* ``{"drop": {}}`` the connection is lost
* ``{"delay": {"seconds": 0.5}}`` the call goes on afterwards
* ``{"kill_store": {}}`` the store called dies as of kill -9
* ``{"command": {"name": "split", "arguments": {...}}}`` an admin command is run, then the call goes on
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import json_format

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground import answers

ANY_RPC: Final = "*"
BACKUP_REGION: Final = "backup.region"
FOREVER: Final = -1

RunCommand = Callable[[str, Mapping[str, Any]], object]
"""Runs an admin command by name with its arguments."""


@dataclass(frozen=True, slots=True)
class RegionError:
    """Answer with this instead of doing the work."""

    error: errorpb_pb2.Error


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


Action = RegionError | Abort | Delay | KillStore | Command
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
    asked: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, rpc: str, store_id: int, region_id: int) -> bool:
        """Whether a call is of the kind meant, never mind how often it was already."""
        return (
            self.rpc in {ANY_RPC, rpc}
            and self.store_id in {None, store_id}
            and self.region_id in {None, region_id}
            and self.count != 0
        )

    def strike(self) -> bool:
        """Count a matching call; whether it is to be struck."""
        if self.skip:
            self.skip -= 1
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
        for action in self._struck(rpc.lower(), store_id, region_id):
            if isinstance(action, RegionError):
                return action.error
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
            case RegionError():
                raise AssertionError("region errors are answered by the caller")

    def _command(self, name: str, arguments: Mapping[str, Any]) -> None:
        if self._run_command is None:
            raise PlaygroundError(f"failpoint: no admin here to run {name}")
        self._run_command(name, arguments)


def _parse(failpoint_id: int, asked: Mapping[str, Any]) -> Failpoint:
    known = {"rpc", "action", "store_id", "region_id", "skip", "count"}
    if unknown := set(asked) - known:
        raise PlaygroundError(f"failpoint: unknown fields {sorted(unknown)}")
    rpc = str(asked.get("rpc", "")).lower()
    if rpc not in {ANY_RPC, BACKUP_REGION} and not answers.is_rpc(rpc):
        raise PlaygroundError(f"failpoint: no RPC is called {asked.get('rpc')!r}")
    action = _parse_action(asked.get("action"))
    if isinstance(action, RegionError) and rpc != BACKUP_REGION and not answers.can_carry_region_error(rpc):
        raise PlaygroundError(f"failpoint: an answer to {asked['rpc']} has no place for a region error")
    return Failpoint(
        id=failpoint_id,
        rpc=rpc,
        action=action,
        store_id=asked.get("store_id"),
        region_id=asked.get("region_id"),
        skip=int(asked.get("skip", 0)),
        count=int(asked.get("count", 1)),
        asked=dict(asked),
    )


def _parse_action(asked: object) -> Action:
    if not isinstance(asked, Mapping) or len(asked) != 1:
        raise PlaygroundError(f"failpoint: an action is an object of one field, not {asked!r}")
    [(kind, fields)] = asked.items()
    try:
        match kind:
            case "region_error":
                return RegionError(json_format.ParseDict(fields, errorpb_pb2.Error()))
            case "abort":
                return Abort(grpc.StatusCode[fields["code"]], fields.get("details", ""))
            case "drop":
                return DROP
            case "delay":
                return Delay(float(fields["seconds"]))
            case "kill_store":
                return KillStore()
            case "command":
                return Command(fields["name"], fields.get("arguments", {}))
    except (json_format.ParseError, KeyError, TypeError, ValueError) as error:
        raise PlaygroundError(f"failpoint: {kind}: {error}") from error
    raise PlaygroundError(f"failpoint: unknown action {kind!r}")
