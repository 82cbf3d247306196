"""``tikv-br/manifest.json``, our record of a backup.

The state of a path (free, unfinished run or backup), ``backup.lock`` and the record of the run.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated

from msgspec import Struct

from tikv_br import records, resume_options
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.sealed import read_record, seal, unseal
from tikv_br.errors import BackupPathInUse, StorageConflict, StorageObjectMissing
from tikv_br.formats.json_types import ApiLabel, Hex
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import Later, RecordSequence
from tikv_br.resume_options import MayChange, compared_as
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.crypter import PLAIN, PLAINTEXT, Crypter


class Description(Struct, frozen=True):
    """The properties of a backup that are known before it is complete."""

    tool_version: MayChange[str]
    engine: str
    """``scan`` or ``store``."""
    file_format: str
    """``sst`` or ``parquet``."""
    compression: str
    cluster_id: int
    cluster_version: MayChange[str]
    api_version: ApiLabel
    """API version of the source."""
    dst_api_version: ApiLabel
    """API version of the files."""
    source_ranges: tuple[KeyRange, ...]
    """RPC keys of the source."""
    ranges: MayChange[tuple[KeyRange, ...]]
    """RPC keys of the destination version: what the files cover."""
    keyspaces: tuple[int, ...]
    """Ids, for API V2; else empty."""
    backup_ts: MayChange[int]
    """All writes with a smaller or equal ts are in the backup; 0 = the source has no ts."""
    parent: str
    """URL of the backup that this one continues, without credentials; ``""`` = a full backup."""
    storage: MayChange[str]
    """URL at which the backup was written, without credentials."""
    started_ms: MayChange[records.Milliseconds]
    """Milliseconds since the epoch."""
    engine_reason: MayChange[str] = ""
    """Reason for the choice of the engine."""
    encryption: str = PLAINTEXT
    """`Crypter.method` of files and records."""
    scanned_ts: Later[MayChange[int]] = 0
    """TSO after the last row was read: from then on, base and log give every row of any time. 0 = not recorded."""
    since_ts: Later[int] = 0
    """Lower limit of the changes in an incremental backup, exclusive: the parent's backup-ts."""
    parent_sha256: Later[Hex] = b""
    """Hash of the parent's `backupmeta`: distinguishes the parent from another backup at its URL."""
    merged_from: Later[tuple[str, ...]] = ()
    """URLs of the backups and the log that a merged backup was made from, without credentials."""
    version_check_skipped: Later[MayChange[bool]] = False
    """True if it was made with ``--skip-version-check``."""
    key_mode: Later[KeyMode] = KeyMode.RAW
    keyspace_names: Later[MayChange[tuple[str, ...]]] = ()
    """Names in PD of `keyspaces`, in their order; an empty one if PD knew none. Empty = not recorded."""

    @property
    def names(self) -> dict[int, str]:
        """The recorded names of keyspaces by their ids."""
        return {id_: name for id_, name in zip(self.keyspaces, self.keyspace_names, strict=False) if name}


class Statistics(Struct, frozen=True):
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


class Manifest(Struct, frozen=True):
    """The whole document's content."""

    description: Description
    statistics: Statistics
    files: RecordSequence[FileEntry]
    """A tuple, or the `RecordList` of a commit."""
    backupmeta_sha256: Hex
    """Hash of `backupmeta` as written: detects an edited one."""
    regions: Later[tuple[RegionPart, ...]] = ()
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


class RunRecord(Struct, frozen=True):
    """Written before the first file; removed when the backup is complete and cleaned up."""

    run_id: MayChange[str]
    """Id of the run; also names the safe point in PD."""
    description: Annotated[Description, compared_as("its fields")]
    """Description for the manifest."""
    assume_no_ttl: bool
    checksum: bool
    allow_loss: tuple[str, ...]
    """Losses that the conversion may cause."""
    options: Later[Annotated[tuple[str, ...] | None, compared_as("its items")]] = None
    """Other options that a resumed run must share, by `resume_options.chosen`; None = not recorded."""


def read_run(store: ObjectStore) -> RunRecord | None:
    """Return the unfinished run at the path, or None. Raises `CrypterMismatch`, `BackupDamaged`, `BackupUnsupported`."""
    try:
        return read_record(store, RunRecord, layout.RUN)
    except StorageObjectMissing:
        return None


def differences(begun: RunRecord, wanted: RunRecord) -> list[str]:
    """The options that a resumed run must share and that differ, as ``engine was store, is scan``."""
    values = [resume_options.compared(each.description) | resume_options.compared(each) for each in (begun, wanted)]
    return resume_options.differences(*values) + resume_options.chosen_differences(begun.options, wanted.options)


LOCK_TEXT = b"DO NOT DELETE\nA backup is being written here, or is complete; give every backup a path of its own.\n"

_OURS = re.compile(
    rf"(?:{'|'.join(layout.DATA_FOLDERS)})/[0-9a-f]{{16}}_[0-9a-f]{{16}}[/_].+"
    rf"|{layout.LEDGER}/[0-9a-f]{{16}}-[0-9a-f]{{16}}\.json"
)
"""Names that only tasks of tikv-br give."""


class PathState(enum.Enum):
    """State of a path."""

    FREE = enum.auto()
    UNFINISHED = enum.auto()
    """A run that has not completed its backup."""
    COMMITTED = enum.auto()
    """A complete backup, whose run was interrupted during cleanup."""
    REMAINS = enum.auto()
    """Files that stores or tasks finished after their run was discarded."""


def path_state(store: ObjectStore) -> PathState:
    """The state of the path. Raises `BackupPathInUse` for a backup of any tool, or a part of one; other objects do not matter."""
    if exists(store, layout.META):
        if exists(store, layout.RUN):
            return PathState.COMMITTED
        raise BackupPathInUse(f"{store.location} already holds a backup")
    text = _lock_text(store)
    if text == LOCK_TEXT:
        return PathState.UNFINISHED
    if text:
        raise BackupPathInUse(
            f"another tool is writing a backup at {store.location}, or a backup is being removed there",
            hint="Read backup.lock there; `tikv-br prune` finishes interrupted removals.",
        )
    parts = [info.name for info in store.list() if layout.is_part(info.name)]
    for name in parts:
        if not _OURS.fullmatch(name):
            raise BackupPathInUse(f"{store.location} holds {name}, which is part of another backup")
    return PathState.REMAINS if parts else PathState.FREE


def mark_path(store: ObjectStore) -> None:
    """Mark the path. Raises `BackupPathInUse` when another run was faster."""
    try:
        store.put_if_absent(layout.LOCK, LOCK_TEXT)
    except StorageConflict:
        raise BackupPathInUse(f"another run has just started a backup at {store.location}") from None


def _lock_text(store: ObjectStore) -> bytes:
    """The text of the lock; one that is not ours is read again, in case it was corrupted in transit."""
    try:
        text = store.get(layout.LOCK)
        return text if text == LOCK_TEXT else store.get(layout.LOCK)
    except StorageObjectMissing:
        return b""
