"""One backup as the index knows it: what `list` shows and `prune` decides by."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.api_version import ApiVersion
from tikv_br.backupset import sealed_json
from tikv_br.errors import BackupDamaged, StorageError
from tikv_br.storage.base import check_name

if TYPE_CHECKING:  # to list backups takes no protobuf
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.coverage import KeyRange
    from tikv_br.backupset.manifest import Manifest

FOREIGN_ENGINE = "go"
"""What `IndexEntry.engine` says of backups of the Go TiKV-BR."""
ID_SIZE = 16
_ID = re.compile(rf"[0-9a-f]{{{ID_SIZE}}}")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A complete backup. Times are milliseconds since the epoch, sizes bytes; 0 and ``""`` = not known (Go backups)."""

    id: str
    """16 hex digits, of the path and of the bytes of `backupmeta`: another backup at the same path has another id."""
    path: str
    """Below the index's root."""
    engine: str
    """``scan``, ``store`` or `FOREIGN_ENGINE`."""
    file_format: str
    api_version: ApiVersion | None
    """Of the source."""
    dst_api_version: ApiVersion
    """Of the files."""
    cluster_id: int
    scope: str
    """A hash of cluster, version of the files and ranges: backups of one scope replace each other."""
    keyspaces: tuple[int, ...]
    backup_ts: int
    """0 = none."""
    parent: str
    """URL of the backup that this one continues, without credentials."""
    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    backup_size: int
    """Of the files as stored."""
    files: int
    started_ms: int
    finished_ms: int
    tool_version: str
    encryption: str
    """`Crypter.method`."""

    @property
    def is_foreign(self) -> bool:
        """Whether another tool made it."""
        return self.engine == FOREIGN_ENGINE


def dump(entry: IndexEntry) -> bytes:
    """The object's bytes."""
    return sealed_json.dump(entry)


def load(data: bytes, name: str) -> IndexEntry:
    """Read object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` for a newer format."""
    return checked(sealed_json.load(IndexEntry, data, name), name)


def checked(entry: IndexEntry, name: str) -> IndexEntry:
    """The entry, if its id and path are such: what it names may be removed later. Raises `BackupDamaged`."""
    check_paths([entry.path], name)
    if not _ID.fullmatch(entry.id):
        raise BackupDamaged(f"{name} is damaged: {entry.id!r} is no id")
    return entry


def check_id(entry: IndexEntry, entry_id: str, name: str) -> None:
    """Raise `BackupDamaged` when object ``name`` holds the entry of another backup."""
    if entry.id != entry_id:
        raise BackupDamaged(f"{name} is damaged: it holds the entry of {entry.id}")


def check_paths(paths: Iterable[str], name: str) -> None:
    """Raise `BackupDamaged` when what object ``name`` says to be below the root is not."""
    try:
        for path in paths:
            check_name(path)
    except StorageError as error:
        raise BackupDamaged(f"{name} is damaged: {error.message}") from None


def entry_of(path: str, made: Manifest) -> IndexEntry:
    """The entry of a backup of ours that lies at ``path``."""
    description, sums = made.description, made.statistics
    return IndexEntry(
        id=_id(path, made.backupmeta_sha256),
        path=check_name(path),
        engine=description.engine,
        file_format=description.file_format,
        api_version=description.api_version,
        dst_api_version=description.dst_api_version,
        cluster_id=description.cluster_id,
        scope=_scope(description.cluster_id, description.dst_api_version, description.ranges),
        keyspaces=description.keyspaces,
        backup_ts=description.backup_ts,
        parent=description.parent,
        total_kvs=sums.total_kvs,
        total_bytes=sums.total_bytes,
        backup_size=sums.backup_size,
        files=len(made.files),
        started_ms=description.started_ms,
        finished_ms=sums.finished_ms,
        tool_version=description.tool_version,
        encryption=description.encryption,
    )


def entry_of_foreign(path: str, backup: BackupSet, backupmeta: bytes, modified_ms: int) -> IndexEntry:
    """The entry of a backup of the Go tool, which records no time: that of writing `backupmeta` stands for it."""
    sums = backup.totals
    return IndexEntry(
        id=_id(path, hashlib.sha256(backupmeta).digest()),
        path=check_name(path),
        engine=FOREIGN_ENGINE,
        file_format=backup.file_kind.value,
        api_version=None,
        dst_api_version=backup.api_version,
        cluster_id=backup.cluster_id,
        scope=_scope(backup.cluster_id, backup.api_version, backup.ranges),
        keyspaces=(),
        backup_ts=backup.backup_ts,
        parent="",
        total_kvs=sums.total_kvs,
        total_bytes=sums.total_bytes,
        backup_size=sums.size,
        files=len(backup.files),
        started_ms=0,
        finished_ms=modified_ms,
        tool_version="",
        encryption=backup.encryption,
    )


def _id(path: str, backupmeta_sha256: bytes) -> str:
    return hashlib.sha256(backupmeta_sha256 + path.encode()).hexdigest()[:ID_SIZE]


def _scope(cluster_id: int, api_version: ApiVersion, ranges: tuple[KeyRange, ...]) -> str:
    text = f"{cluster_id} {api_version.label} " + " ".join(f"{part.start.hex()}-{part.end.hex()}" for part in ranges)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_SIZE]
