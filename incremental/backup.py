"""Incremental backups: the changes since another backup, by one pass over the change feed that ends at the new backup-ts.

A backup as any other (`tikv_br.backup`), but for where its rows come from. Like a full one it is no snapshot: of each key that
has changed it has the newest version at the time of the scan, tombstones included. The feed has no older ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.cluster.safepoint import safe_point_keeper
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine
from tikv_br.dataflow.run import BackupContext, BackupReport, Lineage, run_backup
from tikv_br.dataflow.write import TaskResult, try_task, write_interval
from tikv_br.errors import ClusterUnfit, SafePointError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.feed.events import Resolved, Rows
from tikv_br.incremental.feed.feed import Feed
from tikv_br.incremental.handover import backup_ts
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

POLL_SECONDS = 0.5
BATCH_ROWS = 1 << 16


@dataclass
class IncrementContext(BackupContext):
    """State of an incremental backup."""

    base_location: StorageLocation = field(kw_only=True)
    base: BackupSet = field(init=False)  # check the base


def back_up_changes(options: BackupOptions, base: StorageLocation, reporter: Reporter = silent) -> BackupReport:
    """Back up the changes since a backup, full or incremental; returns when it is complete or, in a dry run, planned.

    The ranges are the base's. Raises `SafePointError` if GC has passed its backup-ts, and as `tikv_br.backup.run.backup`.
    """
    return run_backup(IncrementContext(options, reporter, base_location=base), increment_steps(options))


def increment_steps(options: BackupOptions) -> list[Step[IncrementContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    checks: list[Step[IncrementContext]] = [
        FunctionStep("check the input", steps.check_input),
        FunctionStep("connect", steps.connect),
        FunctionStep("check the base", check_base),
        FunctionStep("check the storage", steps.check_storage),
    ]
    find, plan = (
        FunctionStep("look for a resumable backup", steps.find_resumable_backup),
        FunctionStep("plan", steps.make_plan),
    )
    if options.dry_run:
        return [*checks, find, plan]
    return [
        *checks,
        FunctionStep("acquire the backup lock", steps.acquire_backup_lock, steps.release_backup_lock),
        find,
        FunctionStep("choose backup-ts", steps.set_backup_ts),
        FunctionStep("record the run", steps.record_run),
        FunctionStep("protect from GC", protect_from_gc, steps.release_safe_point),
        FunctionStep("look for ingests since the base", check_ingests),
        plan,
        FunctionStep("copy", copy_changes),
        FunctionStep("look for ingests during the backup", check_ingests),
        FunctionStep("verify coverage", steps.verify_coverage),
        FunctionStep("commit", steps.commit),
        # Before the run's record is removed: the safe point is still the base's, and a killed run must be able to move it.
        FunctionStep("hand over the safe point", hand_over_safe_point),
        FunctionStep("clean up", steps.clean_up),
    ]


def check_base(context: IncrementContext) -> None:
    """Open the base, and check that its changes can be read from this cluster.

    Raises `ClusterUnfit` before API V2, `UsageError` for a base of another cluster or without backup-ts or other ranges.
    """
    options, info = context.options, context.info
    if info.api_version is not ApiVersion.V2:
        raise ClusterUnfit(
            f"incremental backups need API V2; the cluster has API {info.api_version.label}, which has no timestamps",
            hint="Make full backups on a schedule instead: `tikv-br backup raw` in a crontab.",
        )
    store = open_store(context.base_location)
    base = context.base = BackupSet.open(store)
    if base.manifest is None or base.api_version is not ApiVersion.V2:
        raise UsageError(f"--base {store.location} cannot be continued: tikv-br must have made it, with API V2")
    since_ts = backup_ts(base, info.cluster_id, base.ranges)
    if options.ranges or options.keyspaces:
        raise UsageError(
            "--base: an incremental backup has the ranges and keyspaces of its base", hint="Leave them out."
        )
    if options.rate_limit:
        context.reporter(Notice("--ratelimit has no effect with --base: stores send a change feed at their own speed"))
    context.engine = Engine.of_tasks("changes", "changes since --base", options)
    context.conversion = Conversion(ApiVersion.V2, ApiVersion.V2)
    context.source_ranges = base.ranges
    context.keyspace_names = keyspace_names(context.cluster, base.manifest.description.keyspaces)
    sha256 = hashlib.sha256(store.get(layout.META)).digest()
    context.lineage = Lineage(context.base_location.redacted(), since_ts, sha256)


def protect_from_gc(context: IncrementContext) -> None:
    """Register a service safe point at the base's backup-ts: until the copy has ended, GC must not remove what came after."""
    since_ts, cluster, options = context.lineage.since_ts, context.cluster, context.options
    if context.manifest is not None:  # only the hand-over is left
        context.keeper = safe_point_keeper(cluster, context.safe_point_name, context.backup_ts, options.gc_ttl)
        return
    if context.backup_ts <= since_ts:
        raise UsageError(
            "nothing to back up yet: the new backup-ts would be before the backup-ts of --base",
            hint="Wait a minute (--safe-interval), then run the same command again.",
        )
    context.keeper = safe_point_keeper(cluster, context.safe_point_name, since_ts, options.gc_ttl)
    try:
        context.keeper.start()
    except SafePointError as error:
        raise SafePointError(
            f"cannot continue {context.base_location}: {error.message}",
            hint="Make a full backup. Its --gc-ttl must last until the next incremental one.",
        ) from None


def check_ingests(context: IncrementContext) -> None:
    """Refuse a cluster that got rows since the base that the change feed does not deliver: by ingests that keep older timestamps.

    Rows with new timestamps are delivered, as all subscriptions begin after this; above backup-ts they belong to the next increment.
    """
    if context.manifest is not None:
        return
    since_ts = context.lineage.since_ts
    for each in context.cluster.ingests.read():
        if not any(each.concerns(span, since_ts) for span in context.source_ranges):
            continue
        if not each.can_be_followed(since_ts):
            raise ClusterUnfit(
                f"cannot continue {context.base_location}: since then {each} has ingested rows with older timestamps, which no change feed delivers",
                hint="Make a full backup.",
            )
        if not each.finished_ts and (each.lowest_ts or 0) <= context.backup_ts:
            raise ClusterUnfit(
                f"cannot continue {context.base_location}: {each} is unfinished, so rows may still come that belong to this backup",
                hint="Run it again to complete it, then run this command again.",
            )


def copy_changes(context: IncrementContext) -> None:
    """Copy the changes of all intervals of the plan. Raises the first error of a task."""
    job = ChangesJob(context.safe_point_name, context.options, context.lineage.since_ts, context.backup_ts)
    steps.run_backup_tasks(context, context.plan, partial(run_changes_task, job))


def hand_over_safe_point(context: IncrementContext) -> None:
    """Keep the changes after the new backup-ts for ``gc_ttl`` seconds, for the next increment."""
    if context.keeper is not None:
        context.keeper.advance(context.backup_ts - 1)
    steps.hand_over_safe_point(context)


@dataclass(frozen=True, slots=True)
class ChangesJob:
    """Parameters that all tasks of a run share. Picklable."""

    run: str
    options: BackupOptions
    since_ts: int
    backup_ts: int


def run_changes_task(job: ChangesJob, interval: KeyRange, context: TaskContext) -> TaskResult:
    """Copy the changes of one interval, with retries. Raises the `TikvBrError` of the last attempt."""
    return try_task(context, lambda: _copy_interval(job, interval, context))


def _copy_interval(job: ChangesJob, interval: KeyRange, context: TaskContext) -> TaskResult:
    from tikv_br.formats.order import newest_versions

    began = time.perf_counter()
    converter = Conversion(ApiVersion.V2, ApiVersion.V2).of(interval)
    rows = newest_versions(_changes(job, interval, context), MAX_TS)
    scanned = time.perf_counter() - began
    batches = (rows.slice(first, BATCH_ROWS) for first in range(0, rows.num_rows, BATCH_ROWS))
    result = write_interval(job.options, job.run, interval, converter, map(converter.convert, batches))
    result.seconds.scan = scanned
    return result


def _changes(job: ChangesJob, interval: KeyRange, context: TaskContext) -> Iterator[pa.RecordBatch]:
    """The newest changes of an interval: all with a ts up to the backup-ts, and some later ones instead of older ones."""
    cluster = context.shared(ClusterPool).get(job.options.cluster)
    with Feed(cluster, codec_of(ApiVersion.V2, interval), interval, job.since_ts) as feed:
        while True:
            event = feed.poll(POLL_SECONDS)
            context.report()
            match event:
                case Rows(batch):
                    context.report(data_bytes=batch.nbytes, keys=batch.num_rows)
                    yield batch
                case Resolved(ts) if ts >= job.backup_ts:
                    return
