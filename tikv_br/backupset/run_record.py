"""The state of a path (free, unfinished run or backup), ``backup.lock`` and the record of the run."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from tikv_br import resume_options
from tikv_br.backupset import layout
from tikv_br.backupset.manifest import Description
from tikv_br.backupset.sealed import read_record
from tikv_br.errors import BackupPathInUse, StorageConflict, StorageObjectMissing
from tikv_br.records import LATER
from tikv_br.resume_options import MAY_CHANGE, compared_as
from tikv_br.storage.base import ObjectStore, exists


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Written before the first file; removed when the backup is complete and cleaned up."""

    run_id: str = field(metadata=MAY_CHANGE)
    """Id of the run; also names the safe point in PD."""
    description: Description = field(metadata=compared_as("its fields"))
    """Description for the manifest."""
    assume_no_ttl: bool
    checksum: bool
    allow_loss: tuple[str, ...]
    """Losses that the conversion may cause."""
    options: tuple[str, ...] | None = field(default=None, metadata={**LATER, **compared_as("its items")})
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
