"""The admin API of a playground: HTTP under ``/playground/`` on PD's port, for tests and for manual use.

docs/playground-failpoints.md lists the calls and commands.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from tikv_br.errors import PlaygroundError
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.servers import Reply, Request
from tikv_br.playground.store_state import CallClock, FatalRequestLog
from tikv_br.playground.timestamps import TimestampFault

PREFIX: Final = "/playground/"
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404


class Admin:
    """Answers the admin API. Thread-safe as far as what it controls is."""

    def __init__(
        self,
        nodes: Mapping[int, StoreNode],
        regions: RegionTable,
        failpoints: FailpointTable,
        fatal_requests: FatalRequestLog,
        calls: CallClock,
        changes: ChangeHub,
        control: Mapping[str, Callable[..., None]],
    ) -> None:
        """``control``: commands that stop and start servers, by name."""
        self._nodes = nodes
        self._regions = regions
        self._failpoints = failpoints
        self._fatal_requests = fatal_requests
        self._calls = calls
        self._views: dict[str, Callable[[], object]] = {
            "regions": lambda: [_region_json(region) for region in regions.all()],
            "stores": lambda: [_store_json(node) for node in nodes.values()],
            "feeds": changes.describe,
            "calls": self._describe_calls,
            "fatal_requests": lambda: [asdict(request) for request in fatal_requests.all()],
        }
        self._commands: dict[str, Callable[..., object]] = {
            "split": self._split,
            "merge": lambda source, target: _region_json(regions.merge(source, target)),
            "transfer-leader": lambda region_id, store_id: _region_json(regions.transfer_leader(region_id, store_id)),
            "move-peer": lambda region_id, from_store, to_store: _region_json(
                regions.move(region_id, from_store, to_store)
            ),
            "scatter": self._scatter,
            "flush": self._flush,
            "expire-import-mode": lambda store_id: self._node(store_id).import_mode.switch(importing=False),
            **control,
        }
        failpoints.run_command = self.run

    def handle(self, request: Request) -> Reply | None:
        """Answer one HTTP request; None if its path is not the admin API's."""
        if not request.path.startswith(PREFIX):
            return None
        name, _, rest = request.path[len(PREFIX) :].strip("/").partition("/")
        try:
            return self._answer(request.method, name, rest, request.body)
        except (PlaygroundError, ValueError, TypeError) as error:
            return Reply.json({"error": str(error)}, _BAD_REQUEST)

    def run(self, name: str, arguments: Mapping[str, Any]) -> object:
        """Run a command. Raises `PlaygroundError` if it is unknown or fails."""
        command = self._commands.get(name)
        if command is None:
            raise PlaygroundError(f"unknown command {name!r}; commands: {', '.join(self._commands)}")
        return command(**arguments) or {}

    def _answer(self, method: str, name: str, rest: str, body: bytes) -> Reply:
        match method, name:
            case "GET", name if name in self._views:
                return Reply.json(self._views[name]())
            case "POST", name if name in self._commands:
                return Reply.json(self.run(name, json.loads(body or b"{}")))
            case "GET", "failpoints":
                return Reply.json([failpoint.to_json() for failpoint in self._failpoints.all()])
            case "POST", "failpoints":
                return Reply.json(self._failpoints.add(json.loads(body)).to_json())
            case "DELETE", "failpoints" if rest:
                self._failpoints.remove(int(rest))
            case "DELETE", "failpoints":
                self._failpoints.clear()
            case "DELETE", "calls":
                self._clear_calls()
            case "DELETE", "fatal_requests":
                self._fatal_requests.clear()
            case _:
                return Reply.json({"error": f"no such admin call: {method} {PREFIX}{name}"}, _NOT_FOUND)
        return Reply.json({})

    def _describe_calls(self) -> dict[str, Any]:
        nodes = self._nodes.values()
        return {
            **self._calls.describe(),
            "least_seconds": max(node.pace.worked for node in nodes),
            "downloads": {node.store_id: dict(node.downloads) for node in nodes},
        }

    def _clear_calls(self) -> None:
        self._calls.clear()
        for node in self._nodes.values():
            node.pace.clear()
            node.downloads.clear()

    def _split(self, keys: list[str], region_id: int = 0) -> list[dict[str, Any]]:
        bounds = [bytes.fromhex(key) for key in keys]
        if region_id:
            return [_region_json(region) for region in self._regions.split(region_id, bounds)]
        pieces: dict[int, Region] = {}
        for bound in bounds:
            split = self._regions.split(self._regions.locate(bound).id, [bound])
            pieces.update((region.id, region) for region in split)
        return [_region_json(region) for region in sorted(pieces.values(), key=lambda piece: piece.start)]

    def _scatter(self) -> list[dict[str, Any]]:
        alive = [node.store_id for node in self._nodes.values() if node.alive]
        self._regions.scatter([region.id for region in self._regions.all()], alive)
        return [_region_json(region) for region in self._regions.all()]

    def _flush(self, store_id: int) -> None:
        with contextlib.suppress(TimestampFault):  # the cache is empty all the same
            self._node(store_id).causal.flush()

    def _node(self, store_id: int) -> StoreNode:
        node = self._nodes.get(store_id)
        if node is None:
            raise PlaygroundError(f"there is no store {store_id}")
        return node


def _store_json(node: StoreNode) -> dict[str, Any]:
    return {
        "store_id": node.store_id,
        "address": node.address,
        "status_address": node.status_address,
        "alive": node.alive,
        "import_mode": node.import_mode.importing,
        "download_limit": node.download_limit.rate,
    }


def _region_json(region: Region) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(region.to_json())
    return fields
