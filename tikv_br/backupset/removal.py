"""Removes one backup, in steps that a later run can finish.

The names that are deleted come from the `backupmeta` of that very backup, of which a copy stays until they are gone: by its hash
it belongs to the id in the index. What the mark of an interrupted removal says is only a description.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backupmeta import decode
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.index import THREADS, Index, pin_name, removal_name
from tikv_br.backupset.index_entry import IndexEntry, check_paths, entry_id, entry_of_backup, is_of
from tikv_br.backupset.lease import PathLease
from tikv_br.cancellation import run_on_threads
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupSetError, CrypterMismatch, StorageObjectMissing
from tikv_br.records import dump, load
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.crypter import PLAIN, Crypter

log = logging.getLogger(__name__)

MANUAL_HINT = "If the folder of that backup has no `backupmeta`, delete the rest of the folder by hand; then run `tikv-br list --rebuild`."


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal under way."""

    id: str
    path: str
    """Path below the index's root."""
    records: tuple[str, ...]
    """Names of the backup's records, without `backupmeta` and lock. Only older versions read this field and the next one."""
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
        _check_is_there(store, entry)
        meta = store.get(layout.META)
        files = _files_named_by(meta, index, entry.path, entry.id)
        removal = Removal(entry.id, entry.path, (*_records_of(store), layout.REMOVED), files)
        index.root.put(removal_name(entry.id), dump(removal))
        if exists(index.root, pin_name(entry.id)):
            index.root.delete(removal_name(entry.id))
            return False
        held.confirm()  # after losing the lock, the path may hold another run's new backup
        store.put(layout.REMOVED, meta)
        store.put(layout.LOCK, removal.lock_text)
        held.confirm()
        store.delete(layout.META)
        _remove_objects(store, files, held)
    _remove_entry(index, removal)
    return True


def interrupted_removals(index: Index) -> list[Removal]:
    """Marks of removals that were interrupted, or are running. Those that do not read are left out, with a warning."""
    found = []
    for marked in sorted(index.removal_ids()):
        try:
            found.append(_read(index.root, marked))
        except StorageObjectMissing:
            continue
        except BackupSetError as error:
            log.warning("ignored the mark of a removal: %s", error.message)
    return found


def _read(root: ObjectStore, marked: str) -> Removal:
    name = removal_name(marked)
    removal = load(Removal, root.get(name), name)
    check_paths((removal.path,), name)
    if removal.id != marked:
        raise BackupDamaged(f"{name} is damaged: it describes the removal of {removal.id}")
    return removal


def finish_removal(index: Index, removal: Removal) -> bool:
    """Resume an interrupted removal; False when there still, or again, is a backup, which is left alone.

    The index must have an entry of the removal's id and path. Raises `LeaseHeld` while another command works at its path, and
    `BackupDamaged` or `CrypterMismatch` if it cannot be established what belonged to the backup.
    """
    store = index.store_of(removal.path)
    with lease.acquire(store, "prune") as held:
        if exists(store, layout.META):
            store.delete(layout.REMOVED)
            index.root.delete(removal_name(removal.id))
            return False
        held.confirm()
        if _owns_path(store, removal):
            _remove_objects(store, _left_files(index, store, removal), held)
    _remove_entry(index, removal)
    return True


def _check_is_there(store: ObjectStore, entry: IndexEntry) -> None:
    try:
        is_there = entry_of_backup(entry.path, BackupSet.open_any(store, key_mode=None), 0).id == entry.id
    except CrypterMismatch:
        is_there = is_of(entry, store.get(layout.META))
    if not is_there:
        raise BackupNotFound(
            f"the backup at {store.location} is not the one in the index", hint="Run `tikv-br list --rebuild`."
        )


def _left_files(index: Index, store: ObjectStore, removal: Removal) -> tuple[str, ...]:
    """Names of the files of a backup whose `backupmeta` is gone, by its copy, which is removed after them."""
    try:
        meta = store.get(layout.REMOVED)
    except StorageObjectMissing:
        if any(layout.is_part(info.name) for info in store.list()):
            raise BackupDamaged(
                f"cannot finish the removal of {removal.path}: {layout.REMOVED} is missing, which names its files",
                hint=MANUAL_HINT,
            ) from None
        return ()
    return _files_named_by(meta, index, removal.path, removal.id)


def _files_named_by(meta: bytes, index: Index, path: str, backup_id: str) -> tuple[str, ...]:
    """Names of a backup's files, all of them below its path and in no other backup.

    Without the key of an encrypted one: of all data files there, as the path belongs to that backup.
    """
    if entry_id(path, hashlib.sha256(meta).digest()) != backup_id:
        raise BackupDamaged(
            f"cannot remove {path}: its {layout.META} is not that of backup {backup_id}", hint=MANUAL_HINT
        )
    try:
        names = tuple(file.name for file in _decode(meta, index.root.location.crypter))
    except CrypterMismatch:
        listed = (info.name for info in index.store_of(path).list())
        names = tuple(name for name in listed if layout.is_part(name) and not layout.is_record(name))
    check_paths(names, f"{path}/{layout.META}")
    if odd := next((name for name in names if layout.is_record(name) or FileKind.of(name) is None), None):
        raise BackupDamaged(f"cannot remove {path}: its {layout.META} lists {odd!r}, which is no data file")
    _check_alone(index.root, path, (*names, f"{layout.FOLDER}/x"))
    return names


def _decode(meta: bytes, crypter: Crypter) -> Iterable[FileEntry]:
    if crypter.encrypts:
        with contextlib.suppress(CrypterMismatch):  # a backup in clear needs no key
            return decode(meta, PLAIN).files
    return decode(meta, crypter).files


def _check_alone(root: ObjectStore, path: str, names: Iterable[str]) -> None:
    """Raise `BackupDamaged` if a folder above or below ``path``, on the way to one of the names, is a backup itself."""
    folders = {str(folder) for name in names for folder in PurePosixPath(path, name).parents} - {path, "."}
    found = run_on_threads(lambda folder: exists(root, f"{folder}/{layout.META}"), sorted(folders), THREADS, "remove")
    if others := [folder for folder, is_there in zip(sorted(folders), found, strict=True) if is_there]:
        raise BackupDamaged(f"cannot remove {path}: its files lie in {others[0]}, which is another backup")


def _records_of(store: ObjectStore) -> list[str]:
    names = [info.name for info in store.list(layout.FOLDER) if layout.is_part(info.name)]
    return sorted(names, key=lambda name: (name != layout.MANIFEST, name))


def _remove_objects(store: ObjectStore, files: Sequence[str], held: PathLease) -> None:
    """All that follows the deletion of `backupmeta`. Objects that are gone already do not matter."""

    def delete(name: str) -> None:
        held.check()
        store.delete(name)

    for name in _records_of(store):
        if name != layout.REMOVED:
            delete(name)
    run_on_threads(delete, files, THREADS, "remove")
    delete(layout.REMOVED)
    held.confirm()
    store.sweep()  # partial files of a killed prune: while we hold the lock, nobody else writes here
    store.delete(layout.LOCK)


def _remove_entry(index: Index, removal: Removal) -> None:
    """Remove the empty directory, which any deletion below it does, and the index entry."""
    index.root.delete(f"{removal.path}/{layout.LOCK}.gone")
    index.remove_entry(removal.id)


def _owns_path(store: ObjectStore, removal: Removal) -> bool:
    """Return whether no other run has used the path since: it would have replaced the lock, which is removed last."""
    try:
        return store.get(layout.LOCK) == removal.lock_text
    except StorageObjectMissing:
        return True
