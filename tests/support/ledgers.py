"""The ledger of a backup, all at once."""

from __future__ import annotations

from tikv_br.backupset import layout
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.manifest import PathState, mark_path, path_state
from tikv_br.backupset.sealed import read_record
from tikv_br.errors import BackupPathInUse
from tikv_br.storage.base import ObjectStore


def read_entries(store: ObjectStore) -> list[LedgerEntry]:
    """All entries, by interval and attempt. Raises `BackupDamaged` or `CrypterMismatch` if one cannot be read."""
    names = [info.name for info in store.list(layout.LEDGER)]
    entries = [read_record(store, LedgerEntry, name) for name in names]
    return sorted(entries, key=lambda entry: (entry.interval, entry.attempt))


def begin_backup(store: ObjectStore) -> BackupWriter:
    """Start a backup at an empty path. Raises `BackupPathInUse` if it has a backup or a part of one."""
    if path_state(store) is not PathState.FREE:
        raise BackupPathInUse(f"{store.location} holds an interrupted backup")
    mark_path(store)
    return BackupWriter(store)
