"""Removes one backup, in steps that a later run can finish."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import THREADS, Index, pin_name, removal_name
from tikv_br.backupset.index_entry import IndexEntry, check_paths, entry_of_backup
from tikv_br.backupset.lease import PathLease
from tikv_br.cancellation import run_on_threads
from tikv_br.errors import BackupDamaged, BackupNotFound, StorageObjectMissing
from tikv_br.records import dump, load
from tikv_br.storage.base import ObjectStore, exists

MANUAL_HINT = (
    "Nothing was removed. If the folder of that backup has no `backupmeta`, delete the rest of the folder, then this "
    "object."
)


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal under way."""

    id: str
    path: str
    """Path below the index's root."""
    records: tuple[str, ...]
    """Names of the backup's records, without `backupmeta` and lock."""
    files: tuple[str, ...]

    @property
    def lock_text(self) -> bytes:
        """Content of the backup's lock while the removal owns the path."""
        return f"DO NOT DELETE\nThe removal of backup {self.id} has begun here; `tikv-br prune` finishes it.\n".encode()


def remove(index: Index, entry: IndexEntry) -> bool:
    """Remove a backup; False when it was pinned at the last moment, and is still whole.

    Raises `BackupNotFound` when there is none at its path or another one, `BackupDamaged` or `BackupUnsupported` when its
    records do not list its files, `LeaseHeld` while another command works there; nothing is removed then. After a
    `StorageError`, or a `LeaseLost` to another command, call `finish_removal`.
    """
    store = index.store_of(entry.path)
    with lease.acquire(store, "prune") as held:
        removal = _plan(store, entry)
        index.root.put(removal_name(entry.id), dump(removal))
        if exists(index.root, pin_name(entry.id)):
            index.root.delete(removal_name(entry.id))
            return False
        held.confirm()  # after losing the lock, the path may hold another run's new backup
        store.put(layout.LOCK, removal.lock_text)
        held.confirm()
        store.delete(layout.META)
        _remove_objects(store, removal, held)
    _remove_entry(index, removal)
    return True


def interrupted_removals(index: Index) -> list[Removal]:
    """Removals that were interrupted, or are running. Raises `BackupDamaged` when a mark does not read."""
    found = []
    for entry_id in index.removal_ids():
        try:
            found.append(_read(index.root, entry_id))
        except StorageObjectMissing:
            continue
        except BackupDamaged as error:
            error.hint = MANUAL_HINT
            raise
    return found


def _read(root: ObjectStore, entry_id: str) -> Removal:
    name = removal_name(entry_id)
    removal = load(Removal, root.get(name), name)
    check_paths((removal.path, *removal.records, *removal.files), name)
    if removal.id != entry_id:
        raise BackupDamaged(f"{name} is damaged: it describes the removal of {removal.id}")
    return removal


def finish_removal(index: Index, removal: Removal) -> bool:
    """Resume an interrupted removal; False when there still, or again, is a backup, which is left alone.

    Raises `LeaseHeld` while another command works at its path.
    """
    store = index.store_of(removal.path)
    with lease.acquire(store, "prune") as held:
        if exists(store, layout.META):
            index.root.delete(removal_name(removal.id))
            return False
        held.confirm()
        _remove_objects(store, removal, held)
    _remove_entry(index, removal)
    return True


def _plan(store: ObjectStore, entry: IndexEntry) -> Removal:
    backup = BackupSet.open_any(store, key_mode=None)
    if entry_of_backup(entry.path, backup, 0).id != entry.id:
        raise BackupNotFound(
            f"the backup at {store.location} is not the one in the index", hint="Run `tikv-br list --rebuild`."
        )
    names = [info.name for info in store.list(layout.FOLDER) if layout.is_part(info.name)]
    records = sorted(names, key=lambda name: (name != layout.MANIFEST, name))
    return Removal(entry.id, entry.path, tuple(records), tuple(file.name for file in backup.files))


def _remove_objects(store: ObjectStore, removal: Removal, held: PathLease) -> None:
    """All that follows the deletion of `backupmeta`. Objects that are gone already do not matter."""
    if _owns_path(store, removal):

        def delete(name: str) -> None:
            held.check()
            store.delete(name)

        for name in removal.records:
            delete(name)
        run_on_threads(delete, removal.files, THREADS, "remove")
        held.confirm()
        store.sweep()  # partial files of a killed prune: while we hold the lock, nobody else writes here
        store.delete(layout.LOCK)


def _remove_entry(index: Index, removal: Removal) -> None:
    """Remove the empty directory, which any deletion below it does, and the index entry."""
    index.root.delete(f"{removal.path}/{layout.LOCK}.gone")
    index.remove_entry(removal.id)
    index.root.delete(removal_name(removal.id))


def _owns_path(store: ObjectStore, removal: Removal) -> bool:
    """Return whether no other run has used the path since: it would have replaced the lock, which is removed last."""
    try:
        return store.get(layout.LOCK) == removal.lock_text
    except StorageObjectMissing:
        return True
