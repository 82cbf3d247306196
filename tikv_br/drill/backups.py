"""The backup that a drill rehearses with: one that it makes, the newest of a folder, or a named one."""

from __future__ import annotations

import time
from dataclasses import replace

from msgspec import structs

from tikv_br.backup.run import backup
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, IndexEntry, entry_of_backup, place_of
from tikv_br.check.probe import CheckOptions, Status
from tikv_br.check.run import check
from tikv_br.cluster import timestamps
from tikv_br.drill.context import DrillContext
from tikv_br.drill.history import backup_path
from tikv_br.drill.ledger import Creation, EntryKind
from tikv_br.drill.targets import ClusterTarget
from tikv_br.errors import BackupNotFound, ProbesFailed, UsageError
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.progress_events import Notice
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

MACHINE_CLOCK = "this machine's clock"
SOURCE_TSO = "the source's timestamps"
PROBE_SECONDS = 30.0


def check_source(context: DrillContext) -> None:
    """Run the probes of `check` on cluster, storage and machine. Raises `ProbesFailed`."""
    options = context.options.backup
    if options is not None:
        _check(CheckOptions(options.cluster, context.options.backups, options, timeout=PROBE_SECONDS))


def check_target(context: DrillContext) -> None:
    """Run the probes of `check` on a target cluster. Raises `ProbesFailed`."""
    target = context.options.target
    if isinstance(target, ClusterTarget):
        _check(CheckOptions(target.cluster, None, ExecutorOptions(executor="driver"), timeout=PROBE_SECONDS))


def make_backup(context: DrillContext) -> None:
    """Make a backup below the backups' folder. A complete one stays after the drill."""
    options = context.options.backup
    if options is None:
        return
    path = backup_path(context.id)
    place = context.options.backups.child(path)
    unfinished = Creation(EntryKind.BACKUP, place.redacted())
    context.ledger.add(unfinished)
    summary = backup(structs.replace(options, storage=place), context.recorder.nested).summary
    context.ledger.change(unfinished, structs.replace(unfinished, kind=EntryKind.MADE_BACKUP))
    context.made_backup = path
    _select_from_index(context, path)
    source = context.clusters.get(options.cluster)
    if summary.backup_ts:
        context.lost_ms, context.lost_clock = timestamps.physical_ms(source.pd.tso()), SOURCE_TSO
    else:
        context.lost_ms, context.lost_clock = time.time_ns() // 1_000_000, MACHINE_CLOCK


def select_newest(context: DrillContext) -> None:
    """Select the newest backup of the folder's index. Raises `BackupNotFound`."""
    _select_from_index(context, newest_of_scope(context)[0].path)
    context.lost_ms, context.lost_clock = context.started_ms, MACHINE_CLOCK


def newest_of_scope(context: DrillContext) -> list[IndexEntry]:
    """The newest backup of RawKV in the folder's index and those that it replaces, the newest first. Raises `BackupNotFound`."""
    listed = _index(context).read()
    entries = [each.entry for each in listed if not each.removing and each.entry.key_mode is KeyMode.RAW]
    if not entries:
        raise BackupNotFound(f"the index at {context.options.backups} lists no backup of RawKV data")
    newest = entries[0]
    if len({each.scope for each in entries}) > 1:
        context.recorder(Notice(f"the folder has backups of several clusters or ranges; the newest is {newest.path}"))
    return [each for each in entries if each.scope == newest.scope]


def select_named(context: DrillContext) -> None:
    """Select the backup that was named. Raises `BackupNotFound`, and as `BackupSet.open`."""
    place = context.options.existing
    if place is None:
        return
    found = BackupSet.open(open_store(place))
    select(context, place, found, entry_at(place, found))
    context.lost_ms, context.lost_clock = context.started_ms, MACHINE_CLOCK


def entry_at(place: StorageLocation, found: BackupSet) -> IndexEntry:
    """The index entry of the backup at a location, made from the backup itself."""
    name = place.path.rstrip("/").rpartition("/")[2] or place.bucket
    return entry_of_backup(name, found, found.store.stat(layout.META).modified_ms)


def _check(options: CheckOptions) -> None:
    if failed := [f"{each.name}: {each.outcome.seen}" for each in check(options) if each.outcome.status is Status.FAIL]:
        raise ProbesFailed("; ".join(failed))


def _select_from_index(context: DrillContext, path: str) -> None:
    index = _index(context)
    entry = next((each.entry for each in index.read() if each.entry.path == path), None)
    if entry is None:
        raise BackupNotFound(f"the index at {index.root.location} does not list the backup {path}")
    place = context.options.backups.child(path)
    select(context, place, BackupSet.open(open_store(place)), entry)


def select(context: DrillContext, place: StorageLocation, found: BackupSet, entry: IndexEntry) -> None:
    """Have the drill use a backup."""
    context.entry, context.location, context.backup = entry, place, found
    if entry.finished_ms:
        context.measured = replace(context.measured, age=max(context.started_ms - entry.finished_ms, 0) / 1000)


def _index(context: DrillContext) -> Index:
    if place_of(context.options.backups.child("x")) is None:
        raise UsageError("--storage of a drill must be a folder: its backups go to folders in it")
    return Index(open_store(context.options.backups))
