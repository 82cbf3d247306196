"""A connection to PD's HTTP port only, such as that of a scripted server."""

from __future__ import annotations

from typing import Any, cast

from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd_connection import Leader, PdConnection
from tikv_br.retry import Backoffer, Outage


class HttpConnection(PdConnection):
    """It never finds another leader."""

    def __init__(self, config: ClusterConfig, address: str) -> None:
        self.config, self.outage = config, Outage("PD", config.retry_budget)
        self._closed = False
        self._leader = Leader(address, f"http://{address}", *cast("Any", (None, None)))

    def refresh(self, stale: Leader, backoffer: Backoffer) -> None:
        """There is no other leader."""

    def _find_leader(self) -> Leader:
        return self._leader
