"""The admin API of a playground: HTTP under ``/playground/`` on PD's port, for tests and for hands.

========== ===================================== ==========================================================
GET        /playground/regions                   every region: id, bounds (hex), epoch, peers, leader
GET        /playground/stores                    every store: address, whether it lives, import mode
GET        /playground/feeds                     every subscription of a change feed: store, region, request, span
GET        /playground/calls                     how long stores had calls under way, what they fetched; DELETE begins anew
GET        /playground/crimes                    deadly requests so far; DELETE forgets them
GET        /playground/failpoints                every failpoint; POST arms one (see `failpoints`); DELETE all
DELETE     /playground/failpoints/<id>           disarms one
POST       /playground/<command>                 runs a command: a JSON object with the arguments in, its result out
========== ===================================== ==========================================================

Commands (keys are physical bounds in hex: V1 raw bytes, V2 memcomparable):

* ``split`` {keys, region_id?}, ``merge`` {source, target}, ``transfer-leader`` {region_id, store_id},
  ``move-peer`` {region_id, from_store, to_store}, ``scatter`` {}: regions get around at once
* ``kill-store`` {store_id}: its ports refuse and its connections break, as by kill -9; ``restart-store`` {store_id}
* ``flush`` {store_id}: the store drops its cached timestamps; ``expire-import-mode`` {store_id}: back to Normal as
  after ten minutes without a SwitchMode
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, Protocol

from tikv_br.errors import PlaygroundError
from tikv_br.playground.call_clock import CallClock
from tikv_br.playground.crimes import CrimeLog
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.import_mode import ImportMode
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable

PREFIX: Final = "/playground/"
_OK: Final = 200
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404

Answer = tuple[int, Any]
"""HTTP status and what goes into the body as JSON."""


class StoreControl(Protocol):
    """The process that runs the stores."""

    @property
    def nodes(self) -> Mapping[int, StoreNode]:
        """Every store by its id, living or not."""
        ...

    def kill_store(self, store_id: int) -> None:
        """Stop a store as kill -9 does; no error when it is dead."""
        ...

    def restart_store(self, store_id: int) -> None:
        """Start a dead store on the ports it had; no error when it lives."""
        ...


class Admin:
    """Answers the admin API. Thread-safe as far as what it steers is."""

    def __init__(
        self,
        control: StoreControl,
        regions: RegionTable,
        failpoints: FailpointTable,
        crimes: CrimeLog,
        import_modes: Mapping[int, ImportMode],
        calls: CallClock,
    ) -> None:
        self._control = control
        self._regions = regions
        self._failpoints = failpoints
        self._crimes = crimes
        self._import_modes = import_modes
        self._calls = calls
        self._views: dict[str, Callable[[], object]] = {
            "regions": lambda: [_region_json(region) for region in regions.all()],
            "stores": lambda: [self._store_json(node) for node in control.nodes.values()],
            "feeds": next(iter(control.nodes.values())).changes.describe,  # all stores share it
            "calls": self._describe_calls,
            "crimes": lambda: [asdict(crime) for crime in crimes.all()],
        }
        self._commands: dict[str, Callable[..., object]] = {
            "split": self._split,
            "merge": self._merge,
            "transfer-leader": self._transfer_leader,
            "move-peer": self._move_peer,
            "scatter": self._scatter,
            "kill-store": self._kill_store,
            "restart-store": self._restart_store,
            "flush": self._flush,
            "expire-import-mode": self._expire_import_mode,
        }
        failpoints.use_commands(self.run)

    def handle(self, method: str, path: str, query: str, body: bytes) -> Answer | None:
        """Answer one HTTP request; None when the path is none of ours. ``query`` is not used."""
        del query
        if not path.startswith(PREFIX):
            return None
        name, _, rest = path[len(PREFIX) :].strip("/").partition("/")
        try:
            return self._answer(method, name, rest, body)
        except (PlaygroundError, ValueError, TypeError) as error:
            return _BAD_REQUEST, {"error": str(error)}

    def run(self, name: str, arguments: Mapping[str, Any]) -> object:
        """Run a command. Raises `PlaygroundError` for an unknown one or one that cannot be done."""
        command = self._commands.get(name)
        if command is None:
            raise PlaygroundError(f"unknown command {name!r}: one of {', '.join(self._commands)}")
        return command(**arguments)

    def _answer(self, method: str, name: str, rest: str, body: bytes) -> Answer:
        match method, name:
            case "GET", name if name in self._views:
                return _OK, self._views[name]()
            case "DELETE", "calls" | "crimes":
                (self._forget_calls if name == "calls" else self._crimes.clear)()
                return _OK, {}
            case "GET", "crimes":
                return _OK, [asdict(crime) for crime in self._crimes.all()]
            case _, "failpoints":
                return self._answer_failpoints(method, rest, body)
            case "POST", name if name in self._commands:
                return _OK, self.run(name, json.loads(body or b"{}"))
        return _NOT_FOUND, {"error": f"no such admin call: {method} {PREFIX}{name}"}

    def _answer_failpoints(self, method: str, rest: str, body: bytes) -> Answer:
        match method:
            case "GET":
                return _OK, [failpoint.to_json() for failpoint in self._failpoints.all()]
            case "POST":
                return _OK, self._failpoints.add(json.loads(body)).to_json()
            case "DELETE" if rest:
                self._failpoints.remove(int(rest))
                return _OK, {}
            case "DELETE":
                self._failpoints.clear()
                return _OK, {}
        return _NOT_FOUND, {"error": f"failpoints know no {method}"}

    def _describe_calls(self) -> dict[str, Any]:
        nodes = self._control.nodes.values()
        return {
            **self._calls.describe(),
            "least_seconds": max(node.pace.worked for node in nodes),
            "downloads": {node.store_id: dict(node.downloads) for node in nodes},
        }

    def _forget_calls(self) -> None:
        self._calls.clear()
        for node in self._control.nodes.values():
            node.pace.clear()
            node.downloads.clear()

    # -- commands -----------------------------------------------------------------------------------------------

    def _split(self, keys: list[str], region_id: int = 0) -> list[dict[str, Any]]:
        bounds = [bytes.fromhex(key) for key in keys]
        if region_id:
            return [_region_json(region) for region in self._regions.split(region_id, bounds)]
        pieces: dict[int, Region] = {}
        for bound in bounds:
            split = self._regions.split(self._regions.locate(bound).id, [bound])
            pieces.update((region.id, region) for region in split)
        return [_region_json(region) for region in sorted(pieces.values(), key=lambda piece: piece.start)]

    def _merge(self, source: int, target: int) -> dict[str, Any]:
        return _region_json(self._regions.merge(source, target))

    def _transfer_leader(self, region_id: int, store_id: int) -> dict[str, Any]:
        return _region_json(self._regions.transfer_leader(region_id, store_id))

    def _move_peer(self, region_id: int, from_store: int, to_store: int) -> dict[str, Any]:
        return _region_json(self._regions.move(region_id, from_store, to_store))

    def _scatter(self) -> list[dict[str, Any]]:
        """Give each living store its turn to lead, in key order."""
        living = [node.store_id for node in self._control.nodes.values() if node.alive]
        for turn, region in enumerate(self._regions.all()):
            store_id = living[turn % len(living)]
            if region.peer_on(store_id):
                self._regions.transfer_leader(region.id, store_id)
            else:
                self._regions.move(region.id, region.leader_store, store_id)
        return [_region_json(region) for region in self._regions.all()]

    def _kill_store(self, store_id: int) -> dict[str, Any]:
        self._control.kill_store(self._node(store_id).store_id)
        return self._store_json(self._node(store_id))

    def _restart_store(self, store_id: int) -> dict[str, Any]:
        self._control.restart_store(self._node(store_id).store_id)
        return self._store_json(self._node(store_id))

    def _flush(self, store_id: int) -> dict[str, Any]:
        self._node(store_id).causal.flush()
        return {}

    def _expire_import_mode(self, store_id: int) -> dict[str, Any]:
        self._import_modes[self._node(store_id).store_id].expire()
        return self._store_json(self._node(store_id))

    # -- helpers ------------------------------------------------------------------------------------------------

    def _node(self, store_id: int) -> StoreNode:
        node = self._control.nodes.get(store_id)
        if node is None:
            raise PlaygroundError(f"there is no store {store_id}")
        return node

    def _store_json(self, node: StoreNode) -> dict[str, Any]:
        mode = self._import_modes.get(node.store_id)
        return {
            "store_id": node.store_id,
            "address": node.address,
            "status_address": node.status_address,
            "alive": node.alive,
            "import_mode": mode is not None and mode.importing,
        }


def _region_json(region: Region) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(region.to_json())
    return fields
