"""Whose path it is: the reminder object of the Go tool's family, taken by one run only.

The lock stays when the backup is done, as the Go tool's does. A lease with owner and expiry it is not.
"""

from __future__ import annotations

from tikv_br.backupset import layout
from tikv_br.backupset.files import FileKind
from tikv_br.errors import BackupPathInUse, StorageConflict, StorageError
from tikv_br.storage.base import ObjectStore, exists

LOCK_TEXT = b"DO NOT DELETE\nA backup is being written here, or is complete; give every backup a path of its own.\n"


def check_path_free(store: ObjectStore) -> None:
    """Raise `BackupPathInUse` when there is a backup at the place, or a part of one. Other objects do not matter."""
    if exists(store, layout.META):
        raise BackupPathInUse(f"{store.location} holds a backup already")
    for info in store.list():
        if info.name == layout.LOCK:
            raise BackupPathInUse(f"at {store.location} a backup is being written, or was broken off")
        if FileKind.of(info.name) or info.name.startswith(f"{layout.FOLDER}/"):
            raise BackupPathInUse(f"{store.location} holds {info.name}, a part of another backup")


def acquire(store: ObjectStore) -> None:
    """Take the path. Raises `BackupPathInUse` when another run was faster, `StorageError` when locks do not work there."""
    try:
        store.put_if_absent(layout.LOCK, LOCK_TEXT)
    except StorageConflict:
        raise BackupPathInUse(f"another run has just begun a backup at {store.location}") from None
    _prove_exclusion(store)


def release(store: ObjectStore) -> None:
    """Give the path back. Idempotent."""
    store.delete(layout.LOCK)


def _prove_exclusion(store: ObjectStore) -> None:
    """Some servers ignore the condition of a conditional request and overwrite: no lock holds there."""
    try:
        store.put_if_absent(layout.LOCK, LOCK_TEXT)
    except StorageConflict:
        return
    release(store)
    raise StorageError(
        f"{store.location} ignores conditional writes (If-None-Match), without which two runs could mix one backup",
        hint="Use a storage that honours them: Amazon S3, MinIO, Ceph from Squid, versitygw, a local directory.",
    )
