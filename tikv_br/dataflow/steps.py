"""The steps that several operations which make backups have. If one fails, the earlier ones are undone.

The finished tasks of a failed backup are kept for the next run at the path, if it can resume them; otherwise everything is
removed, from the storage and from PD. A complete backup is never removed, even if a step after its commit fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tikv_br.backupset import coverage, index, layout, ledger
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.cluster import safepoint
from tikv_br.cluster.safepoint import choose_backup_ts
from tikv_br.dataflow.context import BackupContext
from tikv_br.dataflow.path import describe, keeps_work
from tikv_br.dataflow.plan import Interval, plan_by_regions
from tikv_br.dataflow.task import TaskResult
from tikv_br.errors import ClusterError, ClusterUnreachable, RetryBudgetExhausted, SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.progress_events import Notice
from tikv_br.tasks.executor import run_tasks
from tikv_br.tasks.task import TaskContext


def verify_coverage(context: BackupContext) -> None:
    """Check the ledger in the storage against the range. Raises `CoverageError` for a gap, an overlap or a lost entry."""
    if context.manifest is not None:  # an earlier run has committed
        return
    recorded = {info.name for info in context.store.list(layout.LEDGER)}
    for finished in context.finished:
        if finished.name not in recorded:
            raise ledger.missing_entry(finished)
    coverage.require_coverage(context.source_ranges, (each.interval for each in context.finished))


def commit(context: BackupContext, entries: Iterable[LedgerEntry] | None = None) -> None:
    """Write `backupmeta` and the manifest, and add the backup to the index of its parent folder.

    ``entries``: those of a backup without a ledger, one for each interval, in the order of keys.
    """
    context.check_locks()
    if context.manifest is None:
        if context.backup_ts and not context.scanned_ts:
            context.scanned_ts = _last_timestamp(context)
        done = ledger.read_ordered(context.store, context.finished) if entries is None else entries
        context.manifest = context.writer.commit(describe(context), done, context.confirm_locks)
    else:
        context.confirm_locks()
        context.writer.clean_up(context.manifest)
    if context.listed and (before := index.add_to_index(context.options.storage, context.manifest)):
        rows = context.manifest.statistics.total_kvs
        context.reporter(
            Notice(
                f"this backup has {rows:,} rows, less than half of the {before:,} of the backup of the same cluster and ranges before "
                "it: check that nothing is missing",
                warning=True,
            )
        )


def _last_timestamp(context: BackupContext) -> int:
    """Return a timestamp above all rows read. If PD does not answer, the error states that only this is missing."""
    try:
        return context.cluster.pd.tso()
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        compared = " and compared" if context.options.checksum else ""
        error.hint = (
            f"All rows are copied{compared}; only the backup's description is missing, which needs a timestamp of PD."
        )
        raise


def hand_over_safe_point(context: BackupContext) -> None:
    """Keep the service safe point for ``gc_ttl`` seconds, for a sync that follows. The backup is complete even if this fails."""
    if context.keeper is None:
        return
    try:
        context.keeper.stop_with_ttl(context.options.gc_ttl)
    except ClusterError as error:
        raise SafePointError(
            f"the backup is complete, but its service safe point could not be renewed: {error.message}",
            hint="The backup can be restored. A sync can follow it only if GC has not passed its backup-ts by then.",
        ) from None


def check_input(context: BackupContext) -> None:
    """Check the options before any request."""
    context.options.check()


def connect(context: BackupContext) -> None:
    """Connect to PD and read the cluster's id, version and API version."""
    context.cluster = context.clusters.get(context.options.cluster)
    context.info = context.cluster.info(context.reporter)


def set_backup_ts(context: BackupContext) -> None:
    """Choose backup-ts if the cluster has timestamps; also for a resumed run that has finished no interval."""
    if context.info.api_version is ApiVersion.V2 and not context.has_earlier_work:
        context.set_backup_ts(choose_backup_ts(context.cluster, context.options.safe_interval))


def release_safe_point(context: BackupContext) -> bool:
    """Remove the service safe point, or keep it for ``gc_ttl`` seconds if the next run can resume the work. Returns False if there is none."""
    keeper = context.keeper
    if keeper is None:
        return False
    keeper.stop()
    if context.lease is not None and not context.lease.still_holds():
        return False  # the new holder of the lock resumes the work, with the same safe point
    try:
        if keeps_work(context) and keeper.lost is None:
            keeper.stop_with_ttl(context.options.gc_ttl)
        else:
            safepoint.release(context.cluster.pd, keeper.service_id)
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        left = f"the safe point {keeper.service_id} stays in PD for up to {keeper.seconds_left:.0f} s"
        raise type(error)(f"{left}: {error.message}", hint=error.hint) from None
    return True


def make_plan(context: BackupContext) -> None:
    """Divide the remaining ranges into tasks of about equal size, by PD's estimates; none if an earlier run has committed."""
    if context.manifest is not None:
        return
    codec = KeyCodec(context.conversion.source, mode=context.conversion.mode)
    done = [each.interval for each in context.finished]
    remaining = [(whole, gaps(whole, done)) for whole in context.source_ranges]
    context.plan = plan_by_regions(context.cluster, codec, remaining, context.engine.slots)
    if context.plan:
        context.engine = context.engine.settle_executor(context.options, context.plan)


def run_backup_tasks(
    context: BackupContext, plan: Sequence[Interval], function: Callable[[KeyRange, TaskContext], TaskResult]
) -> None:
    """Run a task for each interval, and add the results to the context. Raises the first error of a task."""
    if not plan:
        return
    context.confirm_locks()
    context.session_seconds += run_tasks(
        [interval.span for interval in plan],
        function,
        options=context.options.choose(context.engine.executor, context.engine.slots),
        on_result=context.add_result,
        name_of=str,
        reporter=context.report,
        shared=[context.clusters],
        planned_bytes=[interval.size for interval in plan],
    )
