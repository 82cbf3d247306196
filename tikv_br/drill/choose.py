"""The steps that come to a backup: one that the drill makes, the newest of a folder, or one that was named."""

from __future__ import annotations

from dataclasses import replace

from tikv_br.backup.run import backup
from tikv_br.backupset import index_entry, layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, place_of
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.check.probe import Status
from tikv_br.check.run import check
from tikv_br.check.surroundings import CheckOptions
from tikv_br.cluster import timestamp
from tikv_br.cluster.shared import shared_cluster
from tikv_br.drill.context import DrillContext
from tikv_br.drill.ledger import Creation, Kind
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.errors import BackupNotFound, ProbesFailed, UsageError
from tikv_br.progress_events import Notice
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

THIS_MACHINE = "this machine's clock"
SOURCE_TSO = "the source's own timestamps"
PROBE_SECONDS = 30.0


def check_source(context: DrillContext) -> None:
    """Look whether cluster, storage and machine are fit. Raises `ProbesFailed`."""
    wanted = context.options.backup
    if wanted is not None:
        place = context.options.backups
        _check(CheckOptions(wanted.cluster, place, wanted.executor, wanted.spark_master, timeout=PROBE_SECONDS))


def check_target(context: DrillContext) -> None:
    """Look whether a cluster that the drill does not make is fit. Raises `ProbesFailed`."""
    target = context.options.target
    if isinstance(target, ClusterTarget):
        _check(CheckOptions(target.cluster, None, "driver", timeout=PROBE_SECONDS))


def make_backup(context: DrillContext) -> None:
    """Make a backup of its own below the backups' folder; it stays when it is complete, as any backup does."""
    wanted = context.options.backup
    if wanted is None:
        return
    path = path_of(context.id)
    place = context.options.backups.child(path)
    unfinished = Creation(Kind.BACKUP, place.redacted())
    context.ledger.note(unfinished)
    summary = backup(replace(wanted, storage=place), context.recorder.inside).summary
    context.ledger.change(unfinished, replace(unfinished, kind=Kind.MADE_BACKUP))
    context.made_backup = path
    _choose_from_index(context, path)
    source = shared_cluster(wanted.cluster)
    if summary.backup_ts:
        context.lost_ms, context.lost_by = timestamp.physical_ms(source.pd.tso()), SOURCE_TSO
    else:
        context.lost_ms, context.lost_by = context.now_ms, THIS_MACHINE


def choose_newest(context: DrillContext) -> None:
    """Take the newest backup of the folder's index. Raises `BackupNotFound`."""
    there = [each for each in _index(context).read() if not each.removing]
    if not there:
        raise BackupNotFound(f"the index at {context.options.backups} lists no backup")
    newest = there[0].entry
    if len({each.entry.scope for each in there}) > 1:
        context.recorder(Notice(f"the folder holds backups of several clusters or ranges: {newest.path} is the newest"))
    _choose_from_index(context, newest.path)
    context.lost_ms, context.lost_by = context.started_ms, THIS_MACHINE


def choose_named(context: DrillContext) -> None:
    """Take the backup that was named. Raises `BackupNotFound` and what else `BackupSet` does."""
    place = context.options.existing
    if place is None:
        return
    found = BackupSet.open_any(open_store(place))
    _choose(context, place, found, entry_at(place, found))
    context.lost_ms, context.lost_by = context.started_ms, THIS_MACHINE


def path_of(drill: str) -> str:
    """The folder, below that of the backups, that a drill's backup gets."""
    return f"drill-{drill}"


def entry_at(place: StorageLocation, found: BackupSet) -> IndexEntry:
    """What an index would say of the backup at a place."""
    name = place.path.rstrip("/").rpartition("/")[2] or place.bucket
    if found.manifest is not None:
        return index_entry.entry_of(name, found.manifest)
    written = next((info.modified_ms for info in found.store.list() if info.name == layout.META), 0)
    return index_entry.entry_of_foreign(name, found, found.store.get(layout.META), written)


def _check(options: CheckOptions) -> None:
    if failed := [f"{each.name}: {each.verdict.seen}" for each in check(options) if each.verdict.status is Status.FAIL]:
        raise ProbesFailed("; ".join(failed))


def _choose_from_index(context: DrillContext, path: str) -> None:
    index = _index(context)
    entry = next((each.entry for each in index.read() if each.entry.path == path), None)
    if entry is None:
        raise BackupNotFound(f"the index at {index.root.location} does not list the backup {path}")
    place = context.options.backups.child(path)
    _choose(context, place, BackupSet.open_any(open_store(place)), entry)


def _choose(context: DrillContext, place: StorageLocation, found: BackupSet, entry: IndexEntry) -> None:
    context.entry, context.location, context.backup = entry, place, found
    if entry.finished_ms:
        context.measured = replace(context.measured, age=max(context.started_ms - entry.finished_ms, 0) / 1000)


def _index(context: DrillContext) -> Index:
    if place_of(context.options.backups.child("x")) is None:
        raise UsageError("the backups need a folder of their own")
    return Index(open_store(context.options.backups))
