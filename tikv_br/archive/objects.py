"""Reads the objects of a log that may be damaged: segments, truncation, and the newest of the checkpoints in a folder."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.archive.records import (
    DATA,
    STATE,
    TRUNCATION,
    Checkpoint,
    LogDescription,
    Segment,
    Truncation,
    checkpoint_epoch,
)
from tikv_br.backupset.identity import replaced_size_damage
from tikv_br.backupset.index_entry import check_paths
from tikv_br.backupset.sealed import read_record
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.records import load
from tikv_br.storage.base import ObjectStore, exists


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """An object that is missing or altered. Its segment counts as missing."""

    name: str
    problem: str
    """A sentence that names the object."""


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
    return {epoch: info.name for info in store.list(folder) if (epoch := checkpoint_epoch(info.name)) is not None}


def read_checkpoint_ts(store: ObjectStore, description: LogDescription, damage: list[DamagedObject]) -> int:
    """The ts of the newest owner's checkpoint; 0 if it is kept elsewhere. Adds to `damage` if it is missing."""
    if not description.has_checkpoint:
        return 0
    folder = f"{description.log_id}/{STATE}"
    problem = f"{folder}/checkpoint is missing: whether the log lacks its end is unknown"
    try:
        if found := newest_checkpoint(store, folder, description.log_id):
            return found.checkpoint_ts
    except BackupDamaged as error:
        problem = error.message
    damage.append(DamagedObject(folder, problem))
    return 0


def read_truncated_ts(store: ObjectStore, log_id: str, damage: list[DamagedObject]) -> int:
    """The ts up to which changes are removed, 0 = none. Adds to `damage` if its record is damaged."""
    name = f"{log_id}/{TRUNCATION}"
    try:
        found = read_record(store, Truncation, name)
    except StorageObjectMissing:
        return 0
    except BackupDamaged as error:
        damage.append(DamagedObject(name, error.message))
        return 0
    if found.log_id != log_id:
        damage.append(DamagedObject(name, f"{name} is damaged: it belongs to the log {found.log_id}"))
        return 0
    return found.restorable_from


def read_segment(
    store: ObjectStore, log_id: str, name: str, sizes: dict[str, int], known: Segment | None
) -> Segment | DamagedObject:
    """A segment whose files are all there in their size."""
    try:
        found = known or read_record(store, Segment, name)
        check_paths((file.name for file in found.files), name)
    except (BackupDamaged, StorageObjectMissing) as error:
        return DamagedObject(name, f"{name} is missing" if isinstance(error, StorageObjectMissing) else error.message)
    if found.name != name or found.log_id != log_id:
        return DamagedObject(name, f"{name} is damaged: its content is that of {found.name}")
    for file in found.files:
        if not file.name.startswith(f"{log_id}/{DATA}/"):
            return DamagedObject(name, f"{name} is damaged: {file.name} is not a data file of this log")
        size = sizes.get(file.name)
        if size is None:  # perhaps written after the names were listed
            size = store.stat(file.name).size if exists(store, file.name) else None
        if size is None:
            return DamagedObject(file.name, f"{file.name} is missing")
        if problem := replaced_size_damage(store, file, size):
            return DamagedObject(file.name, f"{file.name} {problem}")
    return found
