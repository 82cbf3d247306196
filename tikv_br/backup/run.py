"""Backs up a cluster: the list of steps, and those that only this operation has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tikv_br.backup import engines
from tikv_br.backup.compare import compare_checksums
from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.cluster import versions
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.cluster.safepoint import safe_point_keeper
from tikv_br.cluster.txnkv import notice_transactions
from tikv_br.dataflow import path, steps
from tikv_br.dataflow.context import BackupContext
from tikv_br.dataflow.convert import CONVERTED_TS, Conversion
from tikv_br.dataflow.engine import choose_engine
from tikv_br.dataflow.options import BackupOptions, Loss, require_conversion
from tikv_br.dataflow.plan import require_rows, source_ranges
from tikv_br.dataflow.run import BackupReport, run_backup
from tikv_br.errors import SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import hull
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.credentials import KEY_IN_CLEAR


def backup(options: BackupOptions, reporter: Reporter = silent) -> BackupReport:
    """Back up a cluster; returns when the backup is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(BackupContext(options, reporter), backup_steps(options))


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    copying = [FunctionStep("copy", engines.copy)]
    return runbook(options, check_cluster, steps.set_backup_ts, copying, compare_checksums)


def runbook(
    options: BackupOptions,
    check_cluster: Callable[[BackupContext], None],
    set_backup_ts: Callable[[BackupContext], None],
    copying: Sequence[Step[BackupContext]],
    compare: Callable[[BackupContext], None],
) -> list[Step[BackupContext]]:
    """The steps of a backup that begins with a plan; those of its kind of data are passed."""
    checks = [
        FunctionStep("check the input", steps.check_input),
        FunctionStep("connect", steps.connect),
        FunctionStep("check the cluster", check_cluster),
        FunctionStep("check the storage", path.check_storage),
        FunctionStep("look for rows", look_for_rows),
    ]
    find, plan = (
        FunctionStep("look for a resumable backup", path.find_resumable_backup),
        FunctionStep("plan", steps.make_plan),
    )
    if options.dry_run:
        return [*checks, find, plan]
    return [
        *checks,
        FunctionStep("acquire the backup lock", path.acquire_backup_lock, path.release_backup_lock),
        find,
        FunctionStep("choose backup-ts", set_backup_ts),
        FunctionStep("record the run", path.record_run),
        FunctionStep("protect from GC", protect_from_gc, steps.release_safe_point),
        plan,
        *copying,
        FunctionStep("verify coverage", steps.verify_coverage),
        *([FunctionStep("compare checksums", compare)] if options.checksum else []),
        FunctionStep("commit", steps.commit),
        FunctionStep("clean up", path.clean_up),
        FunctionStep("hand over the safe point", steps.hand_over_safe_point),
    ]


def check_cluster(context: BackupContext) -> None:
    """Check that the cluster supports the options; choose engine, conversion and key ranges."""
    options, info = context.options, context.info
    target = info.api_version if options.dst_api_version is None else options.dst_api_version
    require_conversion(info.api_version, target, options.allow_loss)
    context.engine = choose_engine(options, info.api_version, target)
    check_engine(context)
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
    notice_transactions(context.cluster, context.reporter, hull(context.source_ranges))
    with_ttl = info.api_version.has_ttl and not options.assume_no_ttl
    if with_ttl and context.engine.name == "scan":
        context.reporter(
            Notice("every key costs one extra request, for its TTL; if no key has a TTL, --assume-no-ttl avoids that")
        )


def check_engine(context: BackupContext) -> None:
    """Raise `SparkUnavailable` before work is lost; report that stores get the key of the files over connections in clear."""
    options = context.options
    if context.engine.executor == "spark" and not options.dry_run:
        from tikv_br.tasks.session import check_java  # late: most backups need no Spark

        check_java()
    if context.engine.name == "store" and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        context.reporter(Notice(KEY_IN_CLEAR))


def look_for_rows(context: BackupContext) -> None:
    """Refuse a selection without a row, and look up the names of its keyspaces. Raises `NothingMatched`."""
    require_rows(context.options, context.cluster, context.source_ranges, context.reporter)
    context.keyspace_names = keyspace_names(
        context.cluster, keyspaces_in(context.info.api_version, context.source_ranges)
    )


def protect_from_gc(context: BackupContext) -> None:
    """Register a service safe point at backup-ts - 1, if there is one. The run is recorded before: a resuming run finds its name there."""
    if not context.backup_ts:
        return
    context.keeper = safe_point_keeper(
        context.cluster, context.safe_point_name, context.backup_ts, context.options.gc_ttl
    )
    if context.manifest is not None:
        return
    try:
        context.keeper.start()
    except SafePointError as error:
        if context.resumed_run:
            error.hint = "The unfinished run cannot be resumed. Pass --no-resume to remove its files and start over."
        raise
