"""``tikv-br show``."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.storage_session import StorageSession, complete_id, storage_command, utc
from tikv_br.cli.text import human_bytes

if TYPE_CHECKING:
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.coverage import KeyRange
    from tikv_br.backupset.files import FileEntry

app = typer.Typer(rich_markup_mode=None)


class View(enum.StrEnum):
    """What to show of a backup."""

    SUMMARY = "summary"
    RANGES = "ranges"
    FILES = "files"


@app.command("show", no_args_is_help=True)
@storage_command
def show(
    session: StorageSession,
    backup_id: Annotated[
        str,
        typer.Argument(metavar="[ID]", help="The backup; without, the one at --storage.", autocompletion=complete_id),
    ] = "",
    view: Annotated[View, typer.Option("--view", help="What to show.")] = View.SUMMARY,
) -> None:
    """Show what a backup is, its ranges, or its files."""
    backup = session.backup(backup_id)
    {View.SUMMARY: _show_summary, View.RANGES: _show_ranges, View.FILES: _show_files}[view](session, backup)


def _show_summary(session: StorageSession, backup: BackupSet) -> None:
    fields = _summary(backup)
    session.output.result("backup", fields)
    session.output.table(("what", "value"), [(name, _text(name, value)) for name, value in fields.items()])


def _summary(backup: BackupSet) -> dict[str, object]:
    """All that the backup's records say of it as a whole; what a Go backup does not record is left out."""
    from tikv_br.proof.lookup import keyspaces_of

    sums = backup.totals
    fields: dict[str, object] = {
        "storage": backup.store.location.redacted(),
        "made_by": "Go TiKV-BR",
        "cluster_id": backup.cluster_id,
        "cluster_version": backup.cluster_version,
        "dst_api_version": backup.api_version.label,
        "keyspaces": list(keyspaces_of(backup)),
        "backup_ts": backup.backup_ts,
        "ranges": len(backup.ranges),
        "files": len(backup.files),
        "total_kvs": sums.total_kvs,
        "total_bytes": sums.total_bytes,
        "backup_size": sums.size,
        "crc64xor": sums.crc64xor,
        "encryption": backup.encryption,
    }
    if backup.manifest is None:
        return fields
    description, statistics = backup.manifest.description, backup.manifest.statistics
    return fields | {
        "made_by": f"tikv-br {description.tool_version}",
        "engine": description.engine,
        "file_format": description.file_format,
        "compression": description.compression,
        "api_version": description.api_version.label,
        "parent": description.parent,
        "written_to": description.storage,
        "started_ms": description.started_ms,
        "finished_ms": statistics.finished_ms,
        "tasks": statistics.tasks,
        "dropped_ttls": statistics.dropped_ttls,
        "dropped_tombstones": statistics.dropped_tombstones,
        "expiring_kvs": sum(file.expiry.total_kvs for file in backup.files),
    }


def _text(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_ms"):
        return f"{utc(value)} UTC"
    if isinstance(value, int) and name in {"total_bytes", "backup_size"}:
        return f"{human_bytes(value)} ({value:,})"
    if isinstance(value, int) and name == "crc64xor":
        return f"{value:016x}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value) or "-"


def _show_ranges(session: StorageSession, backup: BackupSet) -> None:
    rows = []
    for whole in backup.ranges:
        files = [file for file in backup.files if whole.contains(file.key_range)]
        kvs, size = sum(file.total_kvs for file in files), sum(file.size for file in files)
        fields = {"start": whole.start.hex(), "end": whole.end.hex(), "files": len(files)}
        session.output.result("range", {**fields, "total_kvs": kvs, "backup_size": size})
        rows.append((*_bounds(whole), f"{len(files):,}", f"{kvs:,}", human_bytes(size)))
    session.output.table(("start (hex)", "end (hex)", "files", "kvs", "size"), rows)


def _show_files(session: StorageSession, backup: BackupSet) -> None:
    for file in backup.files:
        session.output.result("file", _file_fields(file))
    rows = [
        (file.name, f"{file.total_kvs:,}", human_bytes(file.size), *_bounds(file.key_range)) for file in backup.files
    ]
    session.output.table(("name", "kvs", "size", "start (hex)", "end (hex)"), rows)


def _file_fields(file: FileEntry) -> dict[str, object]:
    return {
        "name": file.name,
        "size": file.size,
        "start": file.start_key.hex(),
        "end": file.end_key.hex(),
        "crc64xor": file.crc64xor,
        "total_kvs": file.total_kvs,
        "total_bytes": file.total_bytes,
        "sha256": file.sha256.hex(),
        "min_ts": file.min_ts,
        "max_ts": file.max_ts,
        "expiring_kvs": file.expiry.total_kvs,
    }


def _bounds(span: KeyRange) -> tuple[str, str]:
    return span.start.hex() or "-", span.end.hex() or "-"
