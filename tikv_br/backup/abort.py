"""Removing what an unfinished run has left, and never a finished backup."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.backup.backup_ts import service_id
from tikv_br.backupset import layout, lease, run_record
from tikv_br.backupset.backup_set import BackupWriter
from tikv_br.cluster import safepoint
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import BackupDamaged, CrypterMismatch
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True, slots=True)
class Aborted:
    """What there was."""

    unfinished_run: str
    """Its id; ``""`` = not known."""
    removed_objects: int
    released: bool
    """Whether PD was told that GC may go on."""


def abort_backup(location: StorageLocation, cluster: ClusterConfig | None, lock_wait: float = 0.0) -> Aborted:
    """Remove what unfinished runs have left at a path and, with ``cluster``, release their safe point.

    Raises `BackupPathInUse` for a complete backup and for what is not of this tool, `LeaseHeld` while a run is alive.
    """
    store = open_store(location)
    if next(iter(store.list()), None) is None:
        return Aborted("", 0, released=False)
    with lease.acquire(store, "abort", wait=lock_wait) as held:
        try:
            begun = run_record.read(store)
        except (BackupDamaged, CrypterMismatch):  # it goes, whatever it was
            begun = None
        held.confirm()
        if begun is not None and cluster is not None and not exists(store, layout.META):
            safepoint.release(shared_cluster(cluster).pd, service_id(begun.run_id))  # its name goes with the record
        removed = BackupWriter(store).discard(held.check)
    return Aborted(begun.run_id if begun else "", removed, begun is not None and cluster is not None)
