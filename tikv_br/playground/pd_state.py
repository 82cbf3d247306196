"""What PD knows, shared by its gRPC services and its HTTP API."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tikv_br.cluster.pb import metapb_pb2, pdpb_pb2
from tikv_br.playground.engine import Engine
from tikv_br.playground.gc import GcState
from tikv_br.playground.keyspaces import Keyspaces
from tikv_br.playground.node import StoreNode
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.settings import TIKV_VERSION, Settings
from tikv_br.playground.sizes import RegionSizes
from tikv_br.playground.tso import Tso

NAME: Final = "pd1"
_GLOBAL_CONFIG: Final = "global_config"


@dataclass(slots=True)
class PdState:
    """One PD, always the leader."""

    settings: Settings
    cluster_id: int
    engine: Engine
    regions: RegionTable
    sizes: RegionSizes
    tso: Tso
    gc: GcState
    keyspaces: Keyspaces
    nodes: Mapping[int, StoreNode]
    address: str = ""
    """host:port of clients, known once the port is open."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    _config_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def member_id(self) -> int:
        """An id that stays the same for a playground."""
        return self.cluster_id ^ 0x5A5A_5A5A_5A5A_5A5A

    @property
    def client_url(self) -> str:
        """Where clients reach this PD."""
        return f"{'https' if self.settings.tls else 'http'}://{self.address}"

    def member(self) -> pdpb_pb2.Member:
        """This PD as a member."""
        return pdpb_pb2.Member(
            name=NAME, member_id=self.member_id, peer_urls=[self.client_url], client_urls=[self.client_url]
        )

    def store(self, node: StoreNode) -> metapb_pb2.Store:
        """A store as PD lists it: PD does not take it off its list when it is down."""
        return metapb_pb2.Store(
            id=node.store_id,
            address=node.address,
            version=TIKV_VERSION,
            peer_address=node.address,
            status_address=node.status_address,
            git_hash="Unknown git hash",
            start_timestamp=self.started_at,
            deploy_path=str(node.data_dir),
        )

    def store_global_config(self, path: str, changes: Mapping[str, str | None]) -> None:
        """Set (or, with None, delete) named values under a path."""
        with self._config_lock:
            everything = self._global_config()
            values = everything.setdefault(path, {})
            for name, value in changes.items():
                if value is None:
                    values.pop(name, None)
                else:
                    values[name] = value
            self.engine.put_meta({_GLOBAL_CONFIG: json.dumps(everything).encode()})

    def load_global_config(self, path: str) -> dict[str, str]:
        """All values under a path."""
        with self._config_lock:
            return dict(self._global_config().get(path, {}))

    def _global_config(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self.engine.get_meta(_GLOBAL_CONFIG) or b"{}")
        return kept
