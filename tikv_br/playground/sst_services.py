"""Backup and ImportSST of all stores of a playground, with what the stores must know of each other for it."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from tikv_br.playground.backup_service import BackupService
from tikv_br.playground.import_mode import ImportMode
from tikv_br.playground.import_service import ImportService
from tikv_br.playground.node import StoreNode
from tikv_br.playground.sst_store import SstStore


class SstServices:
    """One for the playground; every store must be made known before any of them serves."""

    def __init__(self) -> None:
        self._files: dict[int, SstStore] = {}
        self._modes: dict[int, ImportMode] = {}

    @property
    def import_modes(self) -> Mapping[int, ImportMode]:
        """The mode of each store, by its id."""
        return self._modes

    def add_store(self, node: StoreNode) -> None:
        """Make a store known: its folder for SSTs, in normal mode. Files left from before wait on."""
        self._files[node.store_id] = SstStore(node.data_dir / "import", node.api_version)
        self._modes[node.store_id] = ImportMode()

    def add_to(self, server: grpc.Server, node: StoreNode) -> None:
        """Register both services of a store; again after a restart, which ends import mode."""
        self._modes[node.store_id].expire()
        BackupService(node).add_to(server)
        ImportService(node, self._files, self._modes[node.store_id]).add_to(server)
