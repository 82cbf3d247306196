"""Giving up the unfinished restores of a backup: what is written down about them goes, what they have restored stays."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.import_mode import ImportMode
from tikv_br.cluster.shared import shared_cluster
from tikv_br.restore.record import check_none_at_work, paused_by, remove_all, schedulers_of
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What there was."""

    forgotten_restores: int
    put_back: bool
    """Whether the cluster was in import mode for one of them, and no longer is."""


def abort_restores(location: StorageLocation, cluster: ClusterConfig | None) -> Forgotten:
    """Forget every unfinished restore that is written down at a backup, or at a place of records, and end its import mode.

    Import mode is only looked for in ``cluster``; elsewhere it ends by itself. Raises `LeaseHeld` while one of them is at
    work, `StorageError`, `ClusterError`.
    """
    store = open_store(location)
    check_none_at_work(store)
    put_back = False
    if cluster is not None:
        live = shared_cluster(cluster)
        left = paused_by(store, live.cluster_id)
        put_back = bool(left) and ImportMode(live, schedulers_of(left)).leave()
    return Forgotten(remove_all(store), put_back)
