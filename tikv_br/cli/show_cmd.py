"""``tikv-br show``, ``tikv-br cat`` and ``tikv-br backup find``."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import typer

from tikv_br.cli import backup_flags, key_flags
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.key_flags import LogSourceFlags
from tikv_br.cli.output import KeyForm, Output, human_bytes, label, picked, quote, read_key
from tikv_br.cluster.timestamps import show_time, show_ts
from tikv_br.errors import BackupDamaged, KeyNotFound, TikvBrError, UsageError
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.text import format_key

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.files import FileEntry
    from tikv_br.backupset.index import IndexEntry, ListedBackup
    from tikv_br.backupset.rows import FoundValue
    from tikv_br.formats.keys.ranges import KeyRange


log = logging.getLogger(__name__)
FIND_COLUMNS = ("id", "finished", "state", "size", "sha256", "path")
FIND_READERS = 8
"""Backups read at once."""


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
        from tikv_br.dataflow.read import MergeSources

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
        "keyspace_names": [] if backup.manifest is None else list(backup.manifest.description.keyspace_names),
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
    keyspace: str | None = flag(
        None, "Keyspace of the key, by id or name; required if the backup has several.", metavar="ID|NAME"
    )


@command("cat", example="s3://backups/monday user:1")
def cat(flags: CatFlags, context: typer.Context) -> None:
    """Print the value of a key in a backup. Exit code 13 if it has no such key."""
    chosen, text = ("", flags.chosen) if flags.key is None else (flags.chosen, flags.key)
    if not text:
        raise UsageError("KEY is missing", hint="See `tikv-br cat --help`.")
    key = read_key(text, flags.form, "KEY")
    from tikv_br.backupset.rows import find_value

    found = find_value(flags.replaced(chosen=chosen).backup(context, rows=True), key, flags.keyspace)
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


class FindFlags(backup_flags.IndexFlags, key_flags.KeyFormatFlags):
    key: str = argument(REQUIRED, "KEY", "User key, as --key-format says: text with \\xNN escapes, or hex:…")
    keyspace: str | None = flag(
        None, "Keyspace of the key, by id or name; backups with several are skipped without it.", metavar="ID|NAME"
    )


@command("backup find", former="find", example="user:7 --storage s3://backups")
def find(flags: FindFlags) -> None:
    """Show which backups have a key, newest first, with the size and the hash of its value. Exit code 13 if none has it."""
    key, index = read_key(flags.key, flags.form, "KEY"), flags.index
    listed = [each for each in index.read() if not each.removing]
    versions = _find_versions(flags, listed, key)
    for version in versions:
        flags.out.result("version", asdict(version))
    flags.out.table(FIND_COLUMNS, [_version_row(version) for version in versions], prose=("state",), drop=("path",))
    if failed := [version for version in versions if version.state == "unreadable"]:
        names = ", ".join(version.path for version in failed)
        raise BackupDamaged(
            f"the key was not looked up in {names}: {failed[0].message}",
            hint="Run `tikv-br verify` for each. If a backup has another encryption key, pass that as a further --crypter.key-file.",
        )
    if not any(version.has_value for version in versions):
        raise KeyNotFound(
            f"none of {len(versions)} backups has the key {quote(key, flags.form)}",
            hint="Check the key, --key-format and --keyspace; `tikv-br list --rebuild` finds backups that are not in the index.",
        )


@dataclass(frozen=True, slots=True)
class _Version:
    """What a backup has of a key."""

    id: str
    path: str
    finished_ms: int
    state: Literal["found", "expired", "deleted", "absent", "not covered", "unreadable"]
    """``expired``: at the end of the backup."""
    message: str = ""
    size: int | None = None
    """Bytes of the value."""
    sha256: str = ""
    expire_ts: int = 0
    ts: int = 0

    @property
    def has_value(self) -> bool:
        return self.state in {"found", "expired"}


def _find_versions(flags: FindFlags, listed: Sequence[ListedBackup], key: bytes) -> list[_Version]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(FIND_READERS, thread_name_prefix="find") as pool:
        return list(pool.map(lambda each: _find_version(flags, each.entry, key), listed))


def _find_version(flags: FindFlags, entry: IndexEntry, key: bytes) -> _Version:
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.backupset.rows import find_value
    from tikv_br.storage.open import open_store

    version = partial(_Version, entry.id, entry.path, entry.finished_ms)
    try:
        backup = BackupSet.open(open_store(flags.location.child(entry.path)), key_mode=None)
        found = find_value(backup, key, flags.keyspace)
    except UsageError as error:  # outside of its ranges, or several keyspaces
        advice = "" if error.hint == UsageError.default_hint else f". {error.hint}"
        return version("not covered", error.message + advice)
    except TikvBrError as error:
        return version("unreadable", error.message)
    if found is None:
        return version("absent")
    value, expire_ts, deleted = found.stored
    if deleted:
        return version("deleted", ts=found.ts)
    live = found.stored.is_live(entry.finished_ms // 1000)
    digest = hashlib.sha256(value).hexdigest()
    return version("found" if live else "expired", "", len(value), digest, expire_ts, found.ts)


def _version_row(version: _Version) -> tuple[str, ...]:
    return (
        version.id,
        show_time(version.finished_ms),
        f"{version.state}: {version.message}" if version.message else version.state,
        "-" if version.size is None else str(version.size),
        version.sha256[:16] or "-",
        version.path,
    )
