"""One backup in the index: what is known of it, and its names in paths."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import shown_keyspaces
from tikv_br.errors import BackupDamaged, StorageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.json_types import ApiLabel
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.records import LATER
from tikv_br.storage.base import check_name

if TYPE_CHECKING:
    from tikv_br.backupset.manifest import Manifest
    from tikv_br.formats.keys.ranges import KeyRange


FOREIGN_ENGINE = "go"
"""Value of `IndexEntry.engine` for backups of the Go TiKV-BR."""
ID_SIZE = 16
_ID = re.compile(rf"[0-9a-f]{{{ID_SIZE}}}")


_DRILL_PATH = re.compile(r"(?:.*/)?drill-[0-9]{8}T[0-9]{6}-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A complete backup. Times are milliseconds since the epoch, sizes bytes; 0 and ``""`` = not known (Go backups)."""

    id: str
    """16 hex digits, of the path and of the bytes of `backupmeta`: another backup at the same path has another id."""
    path: str
    """Path below the index's root."""
    engine: str
    """``scan``, ``store`` or `FOREIGN_ENGINE`."""
    file_format: str
    api_version: ApiLabel | None
    """API version of the source."""
    dst_api_version: ApiLabel
    """API version of the files."""
    cluster_id: int
    scope: str
    """A hash of cluster, version of the files and ranges: backups of one scope replace each other."""
    keyspaces: tuple[int, ...]
    backup_ts: int
    """Backup-ts; 0 = none."""
    parent: str
    """URL of the backup that this one continues, without credentials."""
    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    backup_size: int
    """Size of the files as stored, in bytes."""
    files: int
    started_ms: records.Milliseconds
    finished_ms: records.Milliseconds
    tool_version: str
    encryption: str
    """Value of `Crypter.method`."""
    key_mode: KeyMode = field(default=KeyMode.RAW, metadata=LATER)
    keyspace_names: tuple[str, ...] = field(default=(), metadata=LATER)
    """As that of `Description`."""

    @property
    def format_version(self) -> int:
        """As that of `Manifest`: an older version leaves the entry out."""
        return 2 if self.key_mode is KeyMode.TXN else 1

    @property
    def shown_keyspaces(self) -> str:
        """The names of its keyspaces, or their ids."""
        return shown_keyspaces(self.keyspaces, self.keyspace_names)

    @property
    def is_foreign(self) -> bool:
        return self.engine == FOREIGN_ENGINE


def load(data: bytes, name: str) -> IndexEntry:
    """Read object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` for a newer format."""
    return validated(records.load(IndexEntry, data, name), name)


def validated(entry: IndexEntry, name: str) -> IndexEntry:
    """The entry, if its id and path are valid: its path may be removed later. Raises `BackupDamaged`."""
    check_paths([entry.path], name)
    if not _ID.fullmatch(entry.id):
        raise BackupDamaged(f"{name} is damaged: {entry.id!r} is not a backup id")
    return entry


def check_paths(paths: Iterable[str], name: str) -> None:
    """Raise `BackupDamaged` if a path in object ``name`` is not below the root."""
    try:
        for path in paths:
            check_name(path)
    except StorageError as error:
        raise BackupDamaged(f"{name} is damaged: {error.message}") from None


def entry_of(path: str, made: Manifest) -> IndexEntry:
    """Return the entry of our backup at ``path``."""
    description, sums = made.description, made.statistics
    return IndexEntry(
        id=entry_id(path, made.backupmeta_sha256),
        path=check_name(path),
        engine=description.engine,
        file_format=description.file_format,
        api_version=description.api_version,
        dst_api_version=description.dst_api_version,
        cluster_id=description.cluster_id,
        scope=_scope(description.cluster_id, description.dst_api_version, description.ranges, description.key_mode),
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
        key_mode=description.key_mode,
        keyspace_names=description.keyspace_names,
    )


def entry_of_backup(path: str, backup: BackupSet, modified_ms: int) -> IndexEntry:
    """The entry of any backup. The Go tool records no time; ``modified_ms``, when `backupmeta` was written, stands for it."""
    if backup.manifest is not None:
        return entry_of(path, backup.manifest)
    sums, is_raw = backup.totals, backup.key_mode is KeyMode.RAW
    return IndexEntry(
        id=entry_id(path, hashlib.sha256(backup.store.get(layout.META)).digest()),
        path=check_name(path),
        engine=FOREIGN_ENGINE,
        file_format=backup.file_kind.value,
        api_version=None,
        dst_api_version=backup.api_version,
        cluster_id=backup.cluster_id,
        scope=_scope(backup.cluster_id, backup.api_version, backup.ranges if is_raw else (), backup.key_mode),
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
        key_mode=backup.key_mode,
    )


def is_drill_path(path: str) -> bool:
    """Return whether a drill has made the backup at a path."""
    return _DRILL_PATH.fullmatch(path) is not None


def is_of(entry: IndexEntry, backupmeta: bytes) -> bool:
    """Return whether an entry's id is that of the backup with these bytes as `backupmeta`, which needs no key."""
    return entry.id == entry_id(entry.path, hashlib.sha256(backupmeta).digest())


def entry_id(path: str, backupmeta_sha256: bytes) -> str:
    """The id of the backup at a path, by the hash of its `backupmeta`."""
    return hashlib.sha256(backupmeta_sha256 + path.encode()).hexdigest()[:ID_SIZE]


def _scope(cluster_id: int, api_version: ApiVersion, ranges: tuple[KeyRange, ...], mode: KeyMode) -> str:
    version = api_version.label if mode is KeyMode.RAW else f"{api_version.label} {mode.value}"
    text = f"{cluster_id} {version} " + " ".join(f"{part.start.hex()}-{part.end.hex()}" for part in ranges)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_SIZE]
