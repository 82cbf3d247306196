"""Whether an object is the very file that the backup recorded."""

from __future__ import annotations

import hashlib

from tikv_br.backupset.files import FileEntry
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.storage.base import ObjectInfo, ObjectStore, read_chunks


def verify_file_identity(store: ObjectStore, file: FileEntry, *, etag_counts: bool = True) -> None:
    """Two small requests: length, the store's own mark, and the hash of the tail. Raises `BackupDamaged`.

    What is not recorded is not compared (the Go tool records the length only). A differing mark alone is no proof of
    damage, a copy back and forth changes it: then the whole file is hashed. ``etag_counts`` is false for a backup that
    was moved, whose marks say nothing.
    """
    info = _stat(store, file)
    if file.tail_sha256:
        tail = store.get_range(file.name, info.size - file.tail_size, file.tail_size)
        if hashlib.sha256(tail).digest() != file.tail_sha256:
            raise BackupDamaged(f"{file.name} is another file than the backup recorded: its last part differs")
    if etag_counts and file.etag and info.etag != file.etag:
        verify_file_content(store, file)


def verify_file_content(store: ObjectStore, file: FileEntry) -> None:
    """Read the whole file and compare its sha256. Raises `BackupDamaged`, also where none was recorded."""
    if not file.sha256:
        raise BackupDamaged(f"{file.name} has no recorded sha256 to compare with")
    info = _stat(store, file)
    digest = hashlib.sha256()
    for chunk in read_chunks(store, file.name, info.size):
        digest.update(chunk)
    if digest.digest() != file.sha256:
        raise BackupDamaged(f"{file.name} is altered: its sha256 is not the recorded one")


def _stat(store: ObjectStore, file: FileEntry) -> ObjectInfo:
    try:
        info = store.stat(file.name)
    except StorageObjectMissing as error:
        raise BackupDamaged(f"{file.name} is missing: {error.message}") from None
    if file.size and info.size != file.size:
        raise BackupDamaged(f"{file.name} has {info.size} bytes, not the recorded {file.size}")
    return info
