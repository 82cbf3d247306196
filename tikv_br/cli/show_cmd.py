"""``tikv-br show`` and ``tikv-br cat``."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import typer

from tikv_br.cli import backup_flags, key_flags
from tikv_br.cli.command import argument, command, flag
from tikv_br.cli.output import KeyForm, Output, human_bytes, label, picked, quote, read_key
from tikv_br.cli.point_flags import LogSourceFlags
from tikv_br.cluster.timestamps import show_time, show_ts
from tikv_br.errors import KeyNotFound, UsageError
from tikv_br.formats.keys.codec import MAX_KEYSPACE, KeyMode
from tikv_br.formats.keys.text import format_key

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.files import FileEntry
    from tikv_br.backupset.rows import FoundValue
    from tikv_br.formats.keys.ranges import KeyRange


log = logging.getLogger(__name__)


class ShowFlags(backup_flags.ChosenBackupFlags):
    view: Literal["summary", "ranges", "files"] = flag("summary", "Part of the backup to show.")
    source: LogSourceFlags


@command("show", example="s3://backups/monday --view files")
def show_backup(flags: ShowFlags, context: typer.Context) -> None:
    """Show the summary, the ranges or the files of a backup."""
    backup = flags.backup(context)
    if flags.view == "summary":
        _show_summary(flags.out, backup, flags.source.source(flags.storage_flags))
    else:
        {"ranges": _show_ranges, "files": _show_files}[flags.view](flags.out, backup)


def _show_summary(out: Output, backup: BackupSet, log: LogSource | None) -> None:
    fields = _summary(backup)
    if log is not None:
        from tikv_br.dataflow.merge import MergeSources

        first, last = MergeSources.open(backup.store.location, log).window()
        fields |= {"window_start": first, "window_end": last}
    out.result("backup", fields)
    out.pairs([(label(name), _text(name, value)) for name, value in fields.items()])


def _summary(backup: BackupSet) -> dict[str, object]:
    """Facts of the whole backup, without those that a Go backup does not record."""
    from tikv_br.backupset.rows import keyspaces_of

    sums = backup.totals
    fields: dict[str, object] = {
        "storage": backup.store.location.redacted(),
        "made_by": "Go TiKV-BR" if backup.key_mode is KeyMode.RAW else "TiDB BR",
        "cluster_id": backup.cluster_id,
        "cluster_version": backup.cluster_version,
        "dst_api_version": backup.api_version.label,
        "key_mode": backup.key_mode.value,
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
        **picked(description, "engine", "file_format", "compression"),
        "api_version": description.api_version.label,
        "parent": description.parent,
        "written_to": description.storage,
        "started_ms": description.started_ms,
        **picked(statistics, "finished_ms", "tasks", "dropped_ttls", "dropped_tombstones"),
        "expiring_kvs": sum(file.expiry.total_kvs for file in backup.files),
    }


def _text(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_ms"):
        return show_time(value)
    if isinstance(value, int) and name in {"window_start", "window_end", "backup_ts"} and value:
        return show_ts(value)
    if isinstance(value, int) and name in {"total_bytes", "backup_size"}:
        return f"{human_bytes(value)} ({value:,})"
    if isinstance(value, int) and name == "crc64xor":
        return f"{value:016x}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value) or "-"


def _show_ranges(out: Output, backup: BackupSet) -> None:
    rows = []
    for whole in backup.ranges:
        files = [file for file in backup.files if whole.contains(file.key_range)]
        kvs, size = sum(file.total_kvs for file in files), sum(file.size for file in files)
        fields = {"start": whole.start.hex(), "end": whole.end.hex(), "files": len(files)}
        out.result("range", {**fields, "total_kvs": kvs, "backup_size": size})
        rows.append((*_bounds(whole), f"{len(files):,}", f"{kvs:,}", human_bytes(size)))
    out.table(("start (hex)", "end (hex)", "files", "kvs", "size"), rows)


def _show_files(out: Output, backup: BackupSet) -> None:
    for file in backup.files:
        out.result("file", _file_fields(file))
    rows = [
        (file.name, f"{file.total_kvs:,}", human_bytes(file.size), *_bounds(file.key_range)) for file in backup.files
    ]
    out.table(("name", "kvs", "size", "start (hex)", "end (hex)"), rows, drop=("end (hex)", "start (hex)"))


def _file_fields(file: FileEntry) -> dict[str, object]:
    return {
        **picked(file, "name", "size", "crc64xor", "total_kvs", "total_bytes", "min_ts", "max_ts", "cf"),
        "start": file.start_key.hex(),
        "end": file.end_key.hex(),
        "sha256": file.sha256.hex(),
        "expiring_kvs": file.expiry.total_kvs,
    }


def _bounds(span: KeyRange) -> tuple[str, str]:
    return span.start.hex() or "-", span.end.hex() or "-"


class CatFlags(backup_flags.ChosenBackupFlags, key_flags.KeyAndValueFormatFlags):
    """Flags of ``cat``; a single argument is in `chosen`, even if it is the key."""

    chosen: str = backup_flags.chosen_backup("--storage")
    key: str | None = argument(None, "KEY", "User key, as --key-format says: text with \\xNN escapes, or hex:…")
    keyspace: int | None = flag(
        None, "Keyspace of the key, by id; required if the backup has several.", limits=(0, MAX_KEYSPACE), metavar="ID"
    )


@command("cat", example="s3://backups/monday user:1")
def cat(flags: CatFlags, context: typer.Context) -> None:
    """Print the value of a key in a backup. Exit code 13 if it has no such key."""
    chosen, text = ("", flags.chosen) if flags.key is None else (flags.chosen, flags.key)
    if not text:
        raise UsageError("KEY is missing", hint="See `tikv-br cat --help`.")
    key = read_key(text, flags.form, "KEY")
    from tikv_br.backupset.rows import find_value

    found = find_value(replace(flags, chosen=chosen).backup(context, rows=True), key, flags.keyspace)
    if found is None or found.stored.deleted:
        why = f" (deleted at {show_ts(found.ts)})" if found is not None else ""
        raise KeyNotFound(
            f"the backup has no key {quote(key, flags.form)}{why}", hint="Check the key and --key-format."
        )
    _write(flags.out, key, found, flags.value_form)


def _write(out: Output, key: bytes, found: FoundValue, form: KeyForm) -> None:
    value, expire_ts, _deleted = found.stored
    expired = not found.stored.is_live(int(time.time()))
    if expired:
        log.warning("the value expired at %s, by this machine's clock", show_time(expire_ts * 1000))
    if out.is_json:
        pair = {"key": key.hex(), "value": value.hex(), "expire_ts": expire_ts, "ts": found.ts}
        out.result("pair", {**pair, "expired": expired, "file": found.file})
    elif form is KeyForm.RAW:
        out.data(value)
    else:
        out.row({}, format_key(value, form.value))
