"""``tikv-br/manifest.json``: all that is known of a backup, more than `backupmeta` has room for."""

from __future__ import annotations

from dataclasses import dataclass, field

from formats.api_version import ApiVersion
from tikv_br.backupset import layout, sealed_json
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.encrypted import seal, unseal
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.regions import RegionPart
from tikv_br.backupset.sealed_json import LATER
from tikv_br.storage.crypter import PLAIN, PLAINTEXT, Crypter


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a backup before it is done."""

    tool_version: str
    engine: str
    """``scan`` or ``store``."""
    file_format: str
    """``sst`` or ``parquet``."""
    compression: str
    cluster_id: int
    cluster_version: str
    api_version: ApiVersion
    """Of the source."""
    dst_api_version: ApiVersion
    """In which the files are written."""
    source_ranges: tuple[KeyRange, ...]
    """RPC keys of the source."""
    ranges: tuple[KeyRange, ...]
    """RPC keys of the destination version: what the files cover."""
    keyspaces: tuple[int, ...]
    """Ids, for API V2; else empty."""
    backup_ts: int
    """All writes with a smaller or equal ts are in the backup; 0 = the source has no ts."""
    parent: str
    """URL of the backup that this one continues, without credentials; ``""`` = a full backup."""
    storage: str
    """Where it was written, without credentials."""
    started_ms: int
    """Milliseconds since the epoch."""
    engine_reason: str = ""
    """Why this engine."""
    encryption: str = PLAINTEXT
    """`Crypter.method` of files and records."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over all files, and the time it took."""

    crc64xor: int
    total_kvs: int
    total_bytes: int
    backup_size: int
    """Bytes of the files as stored."""
    finished_ms: int
    tasks: int
    dropped_ttls: int = 0
    """Rows whose expiry the destination version could not keep."""
    dropped_tombstones: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole document's content."""

    description: Description
    statistics: Statistics
    files: tuple[FileEntry, ...]
    backupmeta_sha256: bytes
    """Of the bytes of `backupmeta` as written: an edited one is noticed."""
    regions: tuple[RegionPart, ...] = field(default=(), metadata=LATER)
    """Where the rows came from; empty = it was not noted."""


def dump(manifest: Manifest, crypter: Crypter = PLAIN) -> bytes:
    """The object's bytes."""
    return seal(sealed_json.dump(manifest), crypter)


def load(data: bytes, crypter: Crypter = PLAIN) -> Manifest:
    """Read the object. Raises `CrypterMismatch`, `BackupDamaged`, or `BackupUnsupported` for a newer format."""
    return sealed_json.load(Manifest, unseal(data, crypter, layout.MANIFEST), layout.MANIFEST)
