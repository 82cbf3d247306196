"""Checks that a stored file is the recorded one."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable

from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.formats.errors import FormatError
from tikv_br.storage.base import ObjectInfo, ObjectSource, ObjectStore, read_chunks


def verify_file_identity(store: ObjectStore, file: FileEntry, *, etag_counts: bool = True) -> None:
    """Check size, ETag and the hash of the tail, by two small requests. Raises `BackupDamaged`.

    What is not recorded is not compared (the Go tool only records the size). A different ETag does not prove damage, since
    copying a file can change it: then the whole file is hashed. ``etag_counts`` is false for a backup that was moved.
    """
    info = _stat(store, file)
    if file.tail_sha256:
        digest = hashlib.sha256(store.get_range(file.name, info.size - file.tail_size, file.tail_size)).digest()
        if digest != file.tail_sha256:
            part = f"the last {file.tail_size:,} bytes"
            raise BackupDamaged(f"{file.name} {content_damage(store, file, file.tail_sha256, digest, part)}")
    if etag_counts and file.etag and info.etag != file.etag:
        verify_file_content(store, file)


def verify_file_content(store: ObjectStore, file: FileEntry, readers: int = 1) -> None:
    """Compare the sha256 of a whole file, read by `readers` requests at once.

    Raises `BackupDamaged`, also if none was recorded.
    """
    if not file.sha256:
        raise BackupDamaged(f"{file.name} has no recorded sha256 to compare with")
    info = _stat(store, file)
    digest = hashlib.sha256()
    for chunk in read_chunks(store, file.name, info.size, readers=readers):
        digest.update(chunk)
    if digest.digest() != file.sha256:
        raise BackupDamaged(f"{file.name} {content_damage(store, file, file.sha256, digest.digest())}")


def size_damage(size: int, recorded: int) -> str:
    """Return the damage that a file's size shows, as the end of a sentence; ``""`` = none. Recorded 0 = unknown."""
    if not size:
        return f"is empty (0 of {recorded:,} bytes)" if recorded else "is empty"
    if not recorded or size == recorded:
        return ""
    if size < recorded:
        return f"is truncated ({size:,} of {recorded:,} bytes)"
    return f"is longer than recorded ({size:,} bytes instead of {recorded:,})"


def replaced_size_damage(store: ObjectStore, file: FileEntry, size: int) -> str:
    """Return the damage as `size_damage`, or that it is another valid file. Reads all rows if the size differs."""
    damage = size_damage(size, file.size)
    if size and damage and _is_sound(store, file):
        return f"{_REPLACED} ({size:,} bytes instead of {file.size:,})"
    return damage


_REPLACED = "belongs to another part or to another backup: its own checksums are right, but it is not the recorded file"


def content_damage(store: ObjectStore, file: FileEntry, expected: bytes, found: bytes, part: str = "the file") -> str:
    """Return the damage of a file whose sha256, or that of a part, is not the recorded one. Reads all rows.

    Altered bytes break the checksums that the file has inside. If these are right, it is another file.
    """
    hashes = f"sha256 of {part}: expected {_short_hash(expected)}, found {_short_hash(found)}"
    if _is_sound(store, file):
        return f"{_REPLACED} ({hashes})"
    return f"has a checksum mismatch ({hashes})"


def _short_hash(digest: bytes) -> str:
    return f"{digest[:8].hex()}…"


def _is_sound(store: ObjectStore, file: FileEntry) -> bool:
    """Return whether each block or page matches its checksum in the file."""
    try:
        source = ObjectSource(store, file.name, file.cipher_iv)
        batches: Iterable[object]
        if FileKind.of(file.name) is FileKind.PARQUET:
            from tikv_br.formats.parquet import ParquetReader

            batches = ParquetReader(source, file.total_bytes).records()
        else:
            from tikv_br.formats.sst.reader import SstReader

            batches = SstReader(source).batches()
        collections.deque(batches, maxlen=0)
    except (FormatError, BackupDamaged, StorageObjectMissing):
        return False
    return True


def _stat(store: ObjectStore, file: FileEntry) -> ObjectInfo:
    try:
        info = store.stat(file.name)
    except StorageObjectMissing as error:
        raise BackupDamaged(f"{file.name} is missing: {error.message}") from None
    if damage := replaced_size_damage(store, file, info.size):
        raise BackupDamaged(f"{file.name} {damage}")
    return info
