"""The steps of a backup. If one fails, the earlier ones are undone.

The finished tasks of a failed backup are kept for the next run at the path, if it can resume them; otherwise everything is
removed, from the storage and from PD. A complete backup is never removed, even if a step after its commit fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tikv_br.backup import path, run_tasks
from tikv_br.backup.compare import compare_checksums
from tikv_br.backup.context import BackupContext, choose_engine
from tikv_br.backup.convert import CONVERTED_TS, Conversion
from tikv_br.backup.options import BackupOptions, Loss, require_conversion
from tikv_br.backup.path import describe
from tikv_br.backup.plan import require_rows, source_ranges
from tikv_br.backupset import coverage, index, layout, ledger
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.cluster import safepoint, versions
from tikv_br.cluster.safepoint import SafePointKeeper, choose_backup_ts, safe_point_keeper
from tikv_br.errors import ClusterError, ClusterUnreachable, RetryBudgetExhausted, SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Notice
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.credentials import KEY_IN_CLEAR
from tikv_br.tasks.session import check_java


def verify_coverage(context: BackupContext) -> None:
    """Check the ledger in the storage against the range. Raises `CoverageError` for a gap, an overlap or a lost entry."""
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
        context.manifest = context.writer.commit_ordered(describe(context), done, context.confirm_locks)
    else:
        context.confirm_locks()
        context.writer.clean_up(context.manifest)
    if context.listed:
        index.add_to_index(context.options.storage, context.manifest)


def _last_timestamp(context: BackupContext) -> int:
    """A timestamp above all that was read. If PD is gone, the error says that only this is missing."""
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


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    checks = [
        FunctionStep("check the input", check_input),
        FunctionStep("connect", connect),
        FunctionStep("check the cluster", check_cluster),
        FunctionStep("check the storage", path.check_storage),
        FunctionStep("look for rows", look_for_rows),
    ]
    find, plan = (
        FunctionStep("look for a resumable backup", path.find_resumable_backup),
        FunctionStep("plan", _unless_complete(run_tasks.make_plan)),
    )
    if options.dry_run:
        return [*checks, find, plan]
    compare = [FunctionStep("compare checksums", _unless_complete(compare_checksums))] if options.checksum else []
    return [
        *checks,
        FunctionStep("acquire the backup lock", path.acquire_backup_lock, path.release_backup_lock),
        find,
        FunctionStep("choose backup-ts", set_backup_ts),
        FunctionStep("record the run", path.record_run),
        FunctionStep("protect from GC", protect_from_gc, release_safe_point),
        plan,
        FunctionStep("copy", _unless_complete(run_tasks.copy)),
        FunctionStep("verify coverage", _unless_complete(verify_coverage)),
        *compare,
        FunctionStep("commit", commit),
        FunctionStep("clean up", path.clean_up),
        FunctionStep("hand over the safe point", hand_over_safe_point),
    ]


def check_input(context: BackupContext) -> None:
    """Check the options before any request."""
    context.options.check()


def connect(context: BackupContext) -> None:
    """Connect to PD and read the cluster's id, version and API version."""
    context.cluster = context.clusters.get(context.options.cluster)
    context.info = context.cluster.info(context.reporter)


def check_cluster(context: BackupContext) -> None:
    """Check that the cluster supports the options; choose engine, conversion and key ranges."""
    options, info = context.options, context.info
    target = info.api_version if options.dst_api_version is None else options.dst_api_version
    require_conversion(info.api_version, target, options.allow_loss)
    context.engine = choose_engine(options, info.api_version, target)
    _check_executor(context)
    if target is not info.api_version:
        context.cluster.require(versions.CONVERSION)
    if options.checksum:
        context.cluster.require(versions.CHECKSUMS)
    if context.engine.name == "store":
        context.cluster.require(versions.STORE_BACKUP)
    context.conversion = Conversion(
        info.api_version,
        target,
        CONVERTED_TS if target is ApiVersion.V2 else 0,
        drop_ttl=Loss.TTL in options.allow_loss,
    )
    context.source_ranges = source_ranges(options, context.cluster, target)
    with_ttl = info.api_version.has_ttl and not options.assume_no_ttl
    if with_ttl and context.engine.name == "scan":
        context.reporter(
            Notice("every key costs one extra request, for its TTL; if no key has a TTL, --assume-no-ttl avoids that")
        )
    if context.engine.name == "store" and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        context.reporter(Notice(KEY_IN_CLEAR))


def look_for_rows(context: BackupContext) -> None:
    """Refuse explicit ranges and keyspaces without a row. Raises `NothingMatched`."""
    require_rows(context.options, context.cluster, context.source_ranges, context.reporter)


def set_backup_ts(context: BackupContext) -> None:
    """Choose backup-ts if the cluster has timestamps; also for a resumed run that has finished no interval."""
    if context.info.api_version is ApiVersion.V2 and not context.has_earlier_work:
        context.set_backup_ts(choose_backup_ts(context.cluster, context.options.safe_interval))


def protect_from_gc(context: BackupContext) -> None:
    """Register a service safe point at backup-ts - 1, if there is one. The run is recorded before: a resuming run finds its name there."""
    if not context.backup_ts:
        return
    context.keeper = safe_point_keeper(context.cluster, context.first_run, context.backup_ts, context.options.gc_ttl)
    if context.manifest is None:
        _start_keeper(context, context.keeper)


def release_safe_point(context: BackupContext) -> bool:
    """Remove the service safe point, or keep it for ``gc_ttl`` seconds if the next run can resume the work. Returns False if there is none."""
    keeper = context.keeper
    if keeper is None:
        return False
    keeper.stop()
    if context.lease is not None and not context.holds_lock():
        return False  # the new holder of the lock resumes the work, with the same safe point
    try:
        if path.keeps_work(context) and keeper.lost is None:
            keeper.stop_with_ttl(context.options.gc_ttl)
        else:
            safepoint.release(context.cluster.pd, keeper.service_id)
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        left = f"the safe point {keeper.service_id} stays in PD for up to {keeper.seconds_left:.0f} s"
        raise type(error)(f"{left}: {error.message}", hint=error.hint) from None
    return True


def _start_keeper(context: BackupContext, keeper: SafePointKeeper) -> None:
    """Start the keeper. Raises `SafePointError`, with a hint if GC has passed the backup-ts of a resumed run."""
    try:
        keeper.start()
    except SafePointError as error:
        if context.resumed_run:
            error.hint = "The unfinished run cannot be resumed. Pass --no-resume to remove its files and start over."
        raise


def _unless_complete(action: Callable[[BackupContext], None]) -> Callable[[BackupContext], None]:
    """Skip the action if an earlier run was interrupted after its commit."""

    def act(context: BackupContext) -> None:
        if context.manifest is None:
            action(context)

    return act


def _check_executor(context: BackupContext) -> None:
    """Raise `SparkUnavailable` if Spark is needed and cannot start."""
    if context.engine.executor == "spark" and not context.options.dry_run:
        check_java()
