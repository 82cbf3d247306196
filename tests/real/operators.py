"""What the provider of real servers asks of PD's HTTP API, and a playground does by its admin API instead."""

from __future__ import annotations

import json
from typing import Any

from tikv_br.errors import PlaygroundError
from tikv_br.playground.cluster import Playground
from tikv_br.playground.pd_http import PdHttpApi
from tikv_br.playground.servers import Reply, Request

_MEMBERS = "/pd/api/v1/leader/resign"


class OperatorApi(PdHttpApi):
    """PD's HTTP API with operators and resignation. Names of members are those of the stand-ins: pd-1, pd-2, ..."""

    def __init__(self, playground: Playground) -> None:
        super().__init__(playground.state, playground._pd._api._config)
        self._playground = playground

    def handle(self, request: Request) -> Reply:
        """Answer a request."""
        if request.method == "POST" and request.path == "/pd/api/v1/operators":
            try:
                self._operate(json.loads(request.body))
            except PlaygroundError as error:
                return Reply.json(str(error), 500)
            return Reply.json("The operator is created.")
        if request.method == "POST" and request.path == _MEMBERS:
            self._playground._pd.move_leader(0.5)
            return Reply.json("The resign command is submitted.")
        if request.path == "/pd/api/v1/leader":
            return Reply.json({"name": f"pd-{(self._playground.state.leader or 0) + 1}"})
        return super().handle(request)

    def _operate(self, operator: dict[str, Any]) -> None:
        regions = self._playground.regions
        match operator:
            case {"name": "transfer-leader", "region_id": region, "to_store_id": store}:
                regions.transfer_leader(region, store)
            case {"name": "merge-region", "source_region_id": source, "target_region_id": target}:
                regions.merge(source, target)
            case {"name": "transfer-peer", "region_id": region, "from_store_id": before, "to_store_id": after}:
                regions.move(region, before, after)
            case _:
                raise PlaygroundError(f"unknown operator {operator}")
