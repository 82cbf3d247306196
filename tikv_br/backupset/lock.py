"""What lies at a path: nothing, a run that was broken off, or a backup; and ``backup.lock``, which reminds others of it.

The lock is the Go tool's: it begins nothing where one lies. It stays when the backup is done. Whose the path is just now
says the lease, `tikv_br.backupset.lease`.
"""

from __future__ import annotations

import enum
import re

from tikv_br.backupset import layout
from tikv_br.errors import BackupPathInUse, StorageConflict, StorageObjectMissing
from tikv_br.storage.base import ObjectStore, exists

LOCK_TEXT = b"DO NOT DELETE\nA backup is being written here, or is complete; give every backup a path of its own.\n"

_OURS = re.compile(
    rf"(?:{'|'.join(layout.DATA_FOLDERS)})/[0-9a-f]{{16}}_[0-9a-f]{{16}}[/_].+"
    rf"|{layout.LEDGER}/[0-9a-f]{{16}}-[0-9a-f]{{16}}\.json"
)
"""What a task leaves, by names that nobody else gives."""


class PathState(enum.Enum):
    """What of ours lies at a path."""

    FREE = enum.auto()
    UNFINISHED = enum.auto()
    """A run has begun here and made no backup."""
    COMMITTED = enum.auto()
    """A complete backup, whose run was broken off while it tidied up."""
    REMAINS = enum.auto()
    """What stores, or tasks, finished after their run had ended and its path was emptied."""


def survey(store: ObjectStore) -> PathState:
    """What lies there. Raises `BackupPathInUse` for a backup, also of others, or a part of one; other objects do not matter."""
    if exists(store, layout.META):
        if exists(store, layout.RUN):
            return PathState.COMMITTED
        raise BackupPathInUse(f"{store.location} holds a backup already")
    text = _lock_text(store)
    if text == LOCK_TEXT:
        return PathState.UNFINISHED
    if text:
        raise BackupPathInUse(
            f"at {store.location} another tool writes a backup, or one is being removed",
            hint="See what backup.lock says; `tikv-br prune` finishes removals.",
        )
    parts = [info.name for info in store.list() if layout.is_part(info.name)]
    for name in parts:
        if not _OURS.fullmatch(name):
            raise BackupPathInUse(f"{store.location} holds {name}, a part of another backup")
    return PathState.REMAINS if parts else PathState.FREE


def put(store: ObjectStore) -> None:
    """Mark the path. Raises `BackupPathInUse` when another run was faster."""
    try:
        store.put_if_absent(layout.LOCK, LOCK_TEXT)
    except StorageConflict:
        raise BackupPathInUse(f"another run has just begun a backup at {store.location}") from None


def remove(store: ObjectStore) -> None:
    """Take the mark away. Idempotent."""
    store.delete(layout.LOCK)


def _lock_text(store: ObjectStore) -> bytes:
    """What the lock says; a text that is not ours is read again, as a bit altered on the way would refuse a sound path."""
    try:
        text = store.get(layout.LOCK)
        return text if text == LOCK_TEXT else store.get(layout.LOCK)
    except StorageObjectMissing:
        return b""
