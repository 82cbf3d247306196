"""The newest of the checkpoints that the owners of a sync have written to a folder."""

from __future__ import annotations

from tikv_br.archive.records import Checkpoint, checkpoint_epoch
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.records import load
from tikv_br.storage.base import ObjectStore


def newest_checkpoint(store: ObjectStore, folder: str, changefeed_id: str) -> Checkpoint | None:
    """That of the owner with the highest epoch; None before the first. Raises `BackupDamaged`, `BackupUnsupported`."""
    # A listing during a takeover may miss the old owner's file, already removed, and the new owner's, not there yet.
    while saved := _names(store, folder) or _names(store, folder):
        epoch = max(saved)
        name = saved[epoch]
        try:
            found = load(Checkpoint, store.get(name), name)
        except StorageObjectMissing:
            continue  # a later owner has just removed it
        if (found.changefeed_id, found.epoch) != (changefeed_id, epoch):
            raise BackupDamaged(f"{name} is damaged: it belongs to {found.changefeed_id}, epoch {found.epoch}")
        return found
    return None


def _names(store: ObjectStore, folder: str) -> dict[int, str]:
    """The names of the checkpoints, by epoch."""
    return {epoch: info.name for info in store.list(folder) if (epoch := checkpoint_epoch(info.name)) is not None}
