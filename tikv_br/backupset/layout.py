"""Names of the objects of a backup, relative to its place. The first two are the Go tool's."""

from __future__ import annotations

import hashlib

from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileKind

META = "backupmeta"
"""Written last: without it there is no backup."""
LOCK = "backup.lock"
FOLDER = "tikv-br"
"""What only this tool reads."""
MANIFEST = f"{FOLDER}/manifest.json"
LEDGER = f"{FOLDER}/ledger"
"""Folder of what tasks have done; gone after the commit."""
RESTORE = f"{FOLDER}/restore"
"""Folder of what unfinished restores have written down."""
SST_FOLDER = "sst"
_ENDINGS = {FileKind.SST: "_default.sst", FileKind.PARQUET: ".parquet"}
"""The Go tool takes the column family from the name of an SST, not from its record."""


def interval_id(interval: KeyRange) -> str:
    """A name for an interval: 16 hex digits."""
    length = len(interval.start).to_bytes(4, "big")
    return hashlib.sha256(length + interval.start + interval.end).hexdigest()[:16]


def data_name(kind: FileKind, interval: KeyRange, attempt: str, number: int) -> str:
    """Name of a task's file; ``attempt`` is the attempt's own, so that no two ever write to one name."""
    return f"{kind.value}/{interval_id(interval)}_{attempt}_{number:05d}{_ENDINGS[kind]}"


def store_folder(interval: KeyRange, attempt: str) -> str:
    """Folder for what stores write for an attempt, under names of their own."""
    return f"{SST_FOLDER}/{interval_id(interval)}_{attempt}"


def ledger_name(interval: KeyRange, attempt: str) -> str:
    """Name of the record that an attempt leaves when it has done its interval."""
    return f"{LEDGER}/{interval_id(interval)}-{attempt}.json"
