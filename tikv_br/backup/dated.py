"""``{time}`` in the URL of a backup: a folder for each run, so that the same command can run on a schedule.

The folder of the last run is noted beside the index. A run that did not complete is resumed in its folder, if it began recently;
later, a schedule wants a backup of the present.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from tikv_br.backupset import index, layout
from tikv_br.backupset.index import place_of
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import BackupSetError, StorageObjectMissing, UsageError
from tikv_br.progress_events import Notice, Reporter
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

TIME = "{time}"
"""Placeholder for the start time in the last part of a path."""
RESUMED_FOR = 12 * 3600
"""Seconds after its start for which an unfinished backup is resumed: a retry does, the next day's run does not."""


@dataclass(frozen=True, slots=True)
class LastRun:
    """The folder of the last run with a template."""

    name: str
    started_ms: int


def dated_location(template: StorageLocation, reporter: Reporter, *, dry_run: bool) -> StorageLocation:
    """The place of this run's backup: the path with the UTC time in it, or that of an unfinished run that is to be resumed.

    A path without ``{time}`` is returned as it is. Raises `UsageError`, `StorageError`.
    """
    place = place_of(template)
    if TIME not in template.path:
        return template
    if place is None or TIME in place.root.path:
        raise UsageError(f"{TIME} must be in the last part of the path of --storage, as in s3://bucket/backups/{TIME}")
    root, now_ms = open_store(place.root), time.time_ns() // 1_000_000
    note = f"{index.FOLDER}/dated/{hashlib.sha256(place.path.encode()).hexdigest()[:16]}.json"
    last = _last_run(root, note)
    if last is not None and exists(root, f"{last.name}/{layout.RUN}"):
        found = place.root.child(last.name)
        if now_ms - last.started_ms < RESUMED_FOR * 1000:
            reporter(Notice(f"{found} holds an unfinished backup of the last hours: it is continued"))
            return found
        reporter(Notice(f"{found} holds an unfinished backup, too old to continue; `tikv-br abort` removes it"))
    name = place.path.replace(TIME, f"{datetime.fromtimestamp(now_ms // 1000, UTC):%Y-%m-%dT%H%M%SZ}")
    if not dry_run:
        write_record(root, note, LastRun(name, now_ms))
    return place.root.child(name)


def _last_run(root: ObjectStore, note: str) -> LastRun | None:
    try:
        return read_record(root, LastRun, note)
    except (StorageObjectMissing, BackupSetError):  # a note of another key or version is replaced
        return None
