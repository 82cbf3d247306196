"""Removing a complete backup, so that it may be broken off anywhere and finished by the next run.

Under the path's lease, and in this order, the reverse of writing: a mark in the index that names all that will go;
``backup.lock`` rewritten, so that it tells this removal from a later run at the same path; ``backupmeta``, and it is no backup
any more; the manifest; the files; the lock; the index entry; the mark. Only what the backup's own records name is deleted,
and what lies in ``tikv-br/``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tikv_br.backupset import index_entry, layout, lease, sealed_json
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import THREADS, Index, pin_name, removal_name
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.backupset.lease import PathLease
from tikv_br.errors import BackupDamaged, BackupNotFound, StorageObjectMissing
from tikv_br.storage.base import ObjectStore, exists

BY_HAND = (
    "Nothing was removed. The backup of that id is one no more where it has no `backupmeta`: delete what is left of it, "
    "then this object."
)


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal under way."""

    id: str
    path: str
    """Below the index's root."""
    records: tuple[str, ...]
    """Names of the objects that say what the backup is, without `backupmeta` and lock."""
    files: tuple[str, ...]

    @property
    def lock_text(self) -> bytes:
        """What stands in the backup's lock while the removal owns the path."""
        return f"DO NOT DELETE\nThe removal of backup {self.id} has begun here; `tikv-br prune` finishes it.\n".encode()


def remove(index: Index, entry: IndexEntry) -> bool:
    """Remove a backup; False when it was pinned at the last moment, and is still whole.

    Raises `BackupNotFound` when there is none at its path or another one, `BackupDamaged` or `BackupUnsupported` when its
    records do not say which files are its own, `LeaseHeld` while another command works there; nothing is removed then. After a
    `StorageError`, or a `LeaseLost` to another command, call `finish_begun`.
    """
    store = index.store_of(entry.path)
    with lease.acquire(store, "prune") as held:
        removal = _plan(store, entry)
        index.root.put(removal_name(entry.id), sealed_json.dump(removal))
        if exists(index.root, pin_name(entry.id)):
            index.root.delete(removal_name(entry.id))
            return False
        held.confirm()  # a path that was lost meanwhile may hold another's new backup by now
        store.put(layout.LOCK, removal.lock_text)
        held.confirm()
        store.delete(layout.META)
        _remove_objects(store, removal, held)
    _forget(index, removal)
    return True


def begun(index: Index) -> list[Removal]:
    """Removals that were broken off, or run just now. Raises `BackupDamaged` when a mark does not read."""
    found = []
    for entry_id in index.removal_ids():
        try:
            found.append(_read(index.root, entry_id))
        except StorageObjectMissing:
            continue
        except BackupDamaged as error:
            error.hint = BY_HAND
            raise
    return found


def _read(root: ObjectStore, entry_id: str) -> Removal:
    name = removal_name(entry_id)
    removal = sealed_json.load(Removal, root.get(name), name)
    index_entry.check_paths((removal.path, *removal.records, *removal.files), name)
    if removal.id != entry_id:
        raise BackupDamaged(f"{name} is damaged: it is of the removal of {removal.id}")
    return removal


def finish_begun(index: Index, removal: Removal) -> bool:
    """Go on with a removal that was broken off; False when there still, or again, is a backup, which is left alone.

    Raises `LeaseHeld` while another command works at its path.
    """
    store = index.store_of(removal.path)
    with lease.acquire(store, "prune") as held:
        if exists(store, layout.META):
            index.root.delete(removal_name(removal.id))
            return False
        held.confirm()
        _remove_objects(store, removal, held)
    _forget(index, removal)
    return True


def _plan(store: ObjectStore, entry: IndexEntry) -> Removal:
    backup = BackupSet.open_any(store)
    if _entry_id(store, backup, entry) != entry.id:
        raise BackupNotFound(
            f"at {store.location} lies another backup than the index says", hint="Run `tikv-br list --rebuild`."
        )
    names = [info.name for info in store.list(layout.FOLDER) if layout.is_part(info.name)]
    records = sorted(names, key=lambda name: (name != layout.MANIFEST, name))
    return Removal(entry.id, entry.path, tuple(records), tuple(file.name for file in backup.files))


def _entry_id(store: ObjectStore, backup: BackupSet, entry: IndexEntry) -> str:
    if backup.manifest is not None:
        return index_entry.entry_of(entry.path, backup.manifest).id
    return index_entry.entry_of_foreign(entry.path, backup, store.get(layout.META), 0).id


def _remove_objects(store: ObjectStore, removal: Removal, held: PathLease) -> None:
    """All that follows the deletion of `backupmeta`. Objects that are gone already do not matter."""
    if _owns_path(store, removal):

        def delete(name: str) -> None:
            held.check()
            store.delete(name)

        for name in removal.records:
            delete(name)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="remove") as pool:
            try:
                for _ in pool.map(delete, removal.files):
                    pass
            finally:
                pool.shutdown(cancel_futures=True)
        held.confirm()
        store.sweep()  # of a prune that was killed while it rewrote the lock: nobody else writes here while the path is ours
        store.delete(layout.LOCK)


def _forget(index: Index, removal: Removal) -> None:
    """Nothing is left but the directory, which a deletion by the root takes along if it is empty, whatever the name."""
    index.root.delete(f"{removal.path}/{layout.LOCK}.gone")
    index.forget(removal.id)
    index.root.delete(removal_name(removal.id))


def _owns_path(store: ObjectStore, removal: Removal) -> bool:
    """Whether nobody else has begun anything at the path since: the lock goes last, and another run takes it first."""
    try:
        return store.get(layout.LOCK) == removal.lock_text
    except StorageObjectMissing:
        return True
