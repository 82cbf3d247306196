"""``{time}``, ``{date}`` and ``{keyspace}`` in the URL of a backup: a folder for each run, so that the same command can run on a schedule.

The folder of the last run is noted beside the index. A run that did not complete is resumed in its folder, if it began recently;
later, a schedule wants a backup of the present.
"""

from __future__ import annotations

import hashlib
import re
import time
from datetime import UTC, datetime

from msgspec import Struct

from tikv_br.backupset import index, layout
from tikv_br.backupset.index import place_of
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import BackupSetError, StorageObjectMissing, UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Notice, Reporter
from tikv_br.records import Milliseconds
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

TIME_FORMAT, DATE_FORMAT = "%Y-%m-%dT%H%M%SZ", "%Y-%m-%d"
PLACEHOLDERS = "{time}, {time:%Y-%m-%d_%H%M} with any format of strftime, {date}, {keyspace}"
"""What the last part of a path may contain. Times are the run's start, in UTC."""
_PLACEHOLDER = re.compile(r"\{([a-z]*)(?::([^{}]*))?\}")
_BARE_FORMAT = re.compile(r"%[YmHMS]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")
RESUMED_FOR = 12 * 3600
"""Seconds after its start for which an unfinished backup is resumed: a retry does, the next day's run does not."""


class LastRun(Struct, frozen=True):
    """The folder of the last run with a template."""

    name: str
    started_ms: Milliseconds


class Subject(Struct, frozen=True):
    """What distinguishes backups that are made with the same path."""

    cluster: tuple[str, ...] = ()
    """Addresses of PD."""
    kind: str = ""
    """``txn``, ``incremental``; ``""`` = a full backup of raw data."""
    keyspaces: tuple[str, ...] = ()
    ranges: tuple[KeyRange, ...] = ()

    @property
    def keyspace(self) -> str:
        """What ``{keyspace}`` stands for."""
        return _UNSAFE.sub("_", "+".join(map(str, self.keyspaces)))[:60] or "default"

    def suffix(self, *, with_keyspace: bool) -> str:
        """The end of a folder's name, so that schedules with one path do not meet in a folder."""
        ranges = hashlib.sha256(repr(self.ranges).encode()).hexdigest()[:8] if self.ranges else ""
        keyspace = self.keyspace if with_keyspace and self.keyspaces else ""
        return "".join(f"-{part}" for part in (keyspace, self.kind, ranges) if part)


def placeholders(template: StorageLocation) -> set[str]:
    """The names of the placeholders in a path. Raises `UsageError` for others, and where they may not be."""
    fields = {match[1] for match in _PLACEHOLDER.finditer(template.path)}
    if unknown := fields - {"time", "date", "keyspace"}:
        raise UsageError(f"--storage contains {{{min(unknown)}}}, which is no placeholder", hint=f"Use {PLACEHOLDERS}.")
    if _BARE_FORMAT.search(_PLACEHOLDER.sub("", template.path)):
        raise UsageError(
            f"--storage {template} contains a time format outside of braces",
            hint="Write {time:%Y-%m-%d}, with \\% for each % in a crontab.",
        )
    place = place_of(template)
    if fields and (place is None or "{" in place.root.path):
        raise UsageError(
            "placeholders of --storage must be in the last part of its path, as in s3://bucket/backups/{time}"
        )
    return fields


def dated_location(
    template: StorageLocation, reporter: Reporter, *, dry_run: bool, subject: Subject = Subject()
) -> StorageLocation:
    """The place of this run's backup: the path with the UTC time in it, or the path of an unfinished run that is to be resumed.

    A path without placeholders is returned as it is. Raises `UsageError`, `StorageError`.
    """
    fields, place = placeholders(template), place_of(template)
    if not fields or place is None:
        return template
    if not fields & {"time", "date"}:
        return place.root.child(_filled(place.path, subject, 0))
    root, now_ms = open_store(place.root), time.time_ns() // 1_000_000
    key = "\n".join([place.path, *sorted(subject.cluster), subject.suffix(with_keyspace=True)])
    note = f"{index.FOLDER}/dated/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    last = _last_run(root, note)
    if last is not None and exists(root, f"{last.name}/{layout.RUN}"):
        found = place.root.child(last.name)
        if now_ms - last.started_ms < RESUMED_FOR * 1000:
            reporter(Notice(f"{found} holds an unfinished backup of the last hours: it is continued"))
            return found
        reporter(Notice(f"{found} holds an unfinished backup, too old to continue; `tikv-br backup abort` removes it"))
    name = _filled(place.path, subject, now_ms)
    if not dry_run:
        write_record(root, note, LastRun(name, now_ms))
    return place.root.child(name)


def _filled(path: str, subject: Subject, now_ms: int) -> str:
    """The path without placeholders. Raises `UsageError` for a format that yields no name of one folder."""
    now = datetime.fromtimestamp(now_ms // 1000, UTC)

    def fill(match: re.Match[str]) -> str:
        if match[1] == "keyspace":
            return subject.keyspace
        return now.strftime(match[2] or (TIME_FORMAT if match[1] == "time" else DATE_FORMAT))

    name = _PLACEHOLDER.sub(fill, path) + subject.suffix(with_keyspace="{keyspace}" not in path)
    if "/" in name or not name.isprintable():
        raise UsageError(f"--storage {path!r} gives the name {name!r}, which is no name of one folder")
    return name


def _last_run(root: ObjectStore, note: str) -> LastRun | None:
    try:
        return read_record(root, LastRun, note)
    except (StorageObjectMissing, BackupSetError):  # a note of another key or version is replaced
        return None
