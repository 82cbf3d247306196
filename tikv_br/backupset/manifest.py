"""``tikv-br/manifest.json``, our record of a backup."""

from __future__ import annotations

from dataclasses import dataclass, field

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.sealed import seal, unseal
from tikv_br.formats.json_types import ApiLabel, Hex
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import LATER, RecordSequence
from tikv_br.resume_options import MAY_CHANGE
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import PLAIN, PLAINTEXT, Crypter


@dataclass(frozen=True, slots=True)
class Description:
    """The properties of a backup that are known before it is complete."""

    tool_version: str = field(metadata=MAY_CHANGE)
    engine: str
    """``scan`` or ``store``."""
    file_format: str
    """``sst`` or ``parquet``."""
    compression: str
    cluster_id: int
    cluster_version: str = field(metadata=MAY_CHANGE)
    api_version: ApiLabel
    """API version of the source."""
    dst_api_version: ApiLabel
    """API version of the files."""
    source_ranges: tuple[KeyRange, ...]
    """RPC keys of the source."""
    ranges: tuple[KeyRange, ...] = field(metadata=MAY_CHANGE)
    """RPC keys of the destination version: what the files cover."""
    keyspaces: tuple[int, ...]
    """Ids, for API V2; else empty."""
    backup_ts: int = field(metadata=MAY_CHANGE)
    """All writes with a smaller or equal ts are in the backup; 0 = the source has no ts."""
    parent: str
    """URL of the backup that this one continues, without credentials; ``""`` = a full backup."""
    storage: str = field(metadata=MAY_CHANGE)
    """URL at which the backup was written, without credentials."""
    started_ms: records.Milliseconds = field(metadata=MAY_CHANGE)
    """Milliseconds since the epoch."""
    engine_reason: str = field(default="", metadata=MAY_CHANGE)
    """Reason for the choice of the engine."""
    encryption: str = PLAINTEXT
    """`Crypter.method` of files and records."""
    scanned_ts: int = field(default=0, metadata={**LATER, **MAY_CHANGE})
    """TSO after the last row was read: from then on, base and log give every row of any time. 0 = not recorded."""
    since_ts: int = field(default=0, metadata=LATER)
    """Lower limit of the changes in an incremental backup, exclusive: the parent's backup-ts."""
    parent_sha256: Hex = field(default=b"", metadata=LATER)
    """Hash of the parent's `backupmeta`: distinguishes the parent from another backup at its URL."""
    merged_from: tuple[str, ...] = field(default=(), metadata=LATER)
    """URLs of the backups and the log that a merged backup was made from, without credentials."""
    version_check_skipped: bool = field(default=False, metadata={**LATER, **MAY_CHANGE})
    """True if it was made with ``--skip-version-check``."""
    key_mode: KeyMode = field(default=KeyMode.RAW, metadata=LATER)
    keyspace_names: tuple[str, ...] = field(default=(), metadata={**LATER, **MAY_CHANGE})
    """Names in PD of `keyspaces`, in their order; an empty one if PD knew none. Empty = not recorded."""

    @property
    def names(self) -> dict[int, str]:
        """The recorded names of keyspaces by their ids."""
        return {id_: name for id_, name in zip(self.keyspaces, self.keyspace_names, strict=False) if name}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over all files, and the time it took."""

    crc64xor: int
    total_kvs: int
    total_bytes: int
    backup_size: int
    """Bytes of the files as stored."""
    finished_ms: records.Milliseconds
    tasks: int
    dropped_ttls: int = 0
    """Rows whose expiry the destination version could not keep."""
    dropped_tombstones: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole document's content."""

    description: Description
    statistics: Statistics
    files: RecordSequence[FileEntry]
    """A tuple, or the `RecordList` of a commit."""
    backupmeta_sha256: Hex
    """Hash of `backupmeta` as written: detects an edited one."""
    regions: tuple[RegionPart, ...] = field(default=(), metadata=LATER)
    """Regions that the rows came from; empty = not recorded."""

    @property
    def format_version(self) -> int:
        """2 for a transactional backup, so that a version that only knows RawKV asks for a newer one; see `records`."""
        return 2 if self.description.key_mode is KeyMode.TXN else 1


_MANY_FILES = 10_000
"""About 6 MB of JSON."""


def dump(manifest: Manifest, crypter: Crypter = PLAIN) -> bytes:
    """Serialize and seal a manifest."""
    return seal(b"".join(records.dump_pieces(manifest)), crypter)


def write(store: ObjectStore, manifest: Manifest) -> None:
    """Write the object, in pieces if it is large and not encrypted. Raises `StorageError`."""
    if store.location.crypter.encrypts or len(manifest.files) < _MANY_FILES:
        store.put(layout.MANIFEST, dump(manifest, store.location.crypter))
        return
    with store.open_writer(layout.MANIFEST) as writer:
        for piece in records.dump_pieces(manifest):
            writer.write(piece)
        writer.close()


def load(data: bytes, crypter: Crypter = PLAIN) -> Manifest:
    """Read the object. Raises `CrypterMismatch`, `BackupDamaged`, or `BackupUnsupported` for a newer format."""
    return records.load(Manifest, unseal(data, crypter, layout.MANIFEST), layout.MANIFEST)
