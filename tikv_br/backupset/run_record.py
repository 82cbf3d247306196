"""``tikv-br/run.json``: what the run under way at a path is, so that another process can go on with it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tikv_br.backupset import layout
from tikv_br.backupset.encrypted import read_record, write_record
from tikv_br.backupset.manifest import Description
from tikv_br.errors import StorageObjectMissing
from tikv_br.storage.base import ObjectStore

_OF_NO_MATTER = {"tool_version", "engine_reason", "cluster_version", "ranges", "backup_ts", "storage", "started_ms"}
"""Fields of the description that may differ when a run is gone on with, or follow from others."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Written before the first file; removed when the backup is complete and tidied up."""

    run_id: str
    """Also names the safe point in PD."""
    description: Description
    """As it will stand in the manifest."""
    assume_no_ttl: bool
    checksum: bool
    allow_loss: tuple[str, ...]
    """What the conversion may lose."""


def write(store: ObjectStore, record: RunRecord) -> None:
    """Record the run. Raises `StorageError`."""
    write_record(store, layout.RUN, record)


def read(store: ObjectStore) -> RunRecord | None:
    """The run that has begun at the path; None where there is none. Raises `CrypterMismatch`, `BackupDamaged`, `BackupUnsupported`."""
    try:
        return read_record(store, RunRecord, layout.RUN)
    except StorageObjectMissing:
        return None


def remove(store: ObjectStore) -> None:
    """Forget the run. Idempotent."""
    store.delete(layout.RUN)


def differences(begun: RunRecord, wanted: RunRecord) -> list[str]:
    """What decides on the content of the backup and is not the same: ``engine was store, is scan``."""
    pairs = [
        (field.name, getattr(begun.description, field.name), getattr(wanted.description, field.name))
        for field in fields(Description)
        if field.name not in _OF_NO_MATTER
    ]
    pairs += [
        (name, getattr(begun, name), getattr(wanted, name)) for name in ("assume_no_ttl", "checksum", "allow_loss")
    ]
    return [
        f"{name.replace('_', ' ')} was {_text(one)}, is {_text(other)}" for name, one, other in pairs if one != other
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(getattr(value, "label", value))
