"""Backs up a cluster: the lists of steps for raw and for transactional data, and those that only these operations have.

A backup of transactional data is one snapshot: what transactions have committed up to backup-ts, in all regions. Stores refuse to read over the lock of
a transaction that may still commit below it, so locks are cleared first. They do not notice that GC has passed backup-ts, so PD is
asked for that until the last file is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from tikv_br.backup import copy
from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster import versions
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.safepoint import safe_point_keeper
from tikv_br.cluster.store import check_bounds
from tikv_br.cluster.txnkv import notice_transactions
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import CONVERTED_TS, Conversion
from tikv_br.dataflow.options import BackupOptions, Loss, require_conversion
from tikv_br.dataflow.plan import Interval, choose_engine, require_rows, source_ranges
from tikv_br.dataflow.run import BackupContext, BackupReport, run_backup
from tikv_br.dataflow.write import Snapshot
from tikv_br.errors import ChecksumMismatch, ClusterUnfit, ResumeRefused, SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import hull
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.credentials import KEY_IN_CLEAR


def backup(options: BackupOptions, reporter: Reporter = silent) -> BackupReport:
    """Back up a cluster; returns when the backup is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(BackupContext(options, reporter), backup_steps(options))


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    copying = [FunctionStep("copy", copy.copy)]
    return runbook(options, check_cluster, steps.set_backup_ts, copying, compare_checksums)


def compare_checksums(context: BackupContext) -> None:
    """Compare the copy with the cluster. Raises `ChecksumMismatch`."""
    from tikv_br.backup import comparison  # what reads files: only `--checksum` needs it

    comparison.compare_checksums(context)


def runbook(
    options: BackupOptions,
    check_cluster: Callable[[BackupContext], None],
    set_backup_ts: Callable[[BackupContext], None],
    copying: Sequence[Step[BackupContext]],
    compare: Callable[[BackupContext], None],
) -> list[Step[BackupContext]]:
    """The steps of a backup that begins with a plan; the steps for its kind of data are passed."""
    checks = [
        FunctionStep("check the input", steps.check_input),
        FunctionStep("connect", steps.connect),
        FunctionStep("check the cluster", check_cluster),
        FunctionStep("check the storage", steps.check_storage),
        FunctionStep("look for rows", look_for_rows),
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
        FunctionStep("choose backup-ts", set_backup_ts),
        FunctionStep("record the run", steps.record_run),
        FunctionStep("protect from GC", protect_from_gc, steps.release_safe_point),
        plan,
        *copying,
        FunctionStep("verify coverage", steps.verify_coverage),
        *([FunctionStep("compare checksums", compare)] if options.checksum else []),
        FunctionStep("commit", steps.commit),
        FunctionStep("clean up", steps.clean_up),
        FunctionStep("hand over the safe point", steps.hand_over_safe_point),
    ]


def check_cluster(context: BackupContext) -> None:
    """Check that the cluster supports the options; choose engine, conversion and key ranges."""
    options, info = context.options, context.info
    target = info.api_version if options.dst_api_version is None else options.dst_api_version
    require_conversion(info.api_version, target, options.allow_loss)
    context.engine = choose_engine(options, info.api_version, target, info.stores)
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
    """Register a service safe point at backup-ts - 1, if there is one, under the name in the record of the run, which a resuming run uses again."""
    if not context.backup_ts:
        return
    context.keeper = safe_point_keeper(
        context.cluster, context.safe_point_name, context.backup_ts, context.options.gc_ttl
    )
    if context.manifest is not None:  # resumed after the commit: nothing is read any more
        return
    try:
        context.keeper.start()
    except SafePointError as error:
        if context.resumed_run:
            error.hint = "The unfinished run cannot be resumed. Pass --no-resume to remove its files and start over."
        raise


LOCK_THREADS = 16
"""Intervals whose locks are looked for at the same time."""


def backup_txn(options: BackupOptions, reporter: Reporter = silent) -> BackupReport:
    """Back up transactional data; returns when the backup is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(BackupContext(options, reporter), txn_backup_steps(options))


def txn_backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    copying = [
        FunctionStep("resolve locks", resolve_locks),
        FunctionStep("copy", copy.copy),
        FunctionStep("check GC", check_gc),
    ]
    return runbook(options, check_txn_cluster, set_backup_ts, copying, compare_snapshot)


def check_txn_cluster(context: BackupContext) -> None:
    """Check that the cluster can have transactions, and only them in the ranges; choose executor and ranges."""
    options, cluster, api_version = context.options, context.cluster, context.info.api_version
    if api_version is ApiVersion.V1TTL:
        raise ClusterUnfit("a cluster of API v1ttl has no transactional data", hint="Use `tikv-br backup raw`.")
    cluster.require(versions.TXN_BACKUP)
    context.engine = choose_engine(options, api_version, api_version)
    check_engine(context)
    context.conversion = Conversion(api_version, api_version, mode=KeyMode.TXN)
    context.source_ranges = source_ranges(options, cluster, api_version)
    codec = KeyCodec(api_version, mode=KeyMode.TXN)
    for span in context.source_ranges:
        check_bounds(span, cluster.pd.each_region(codec.bound(span.start), codec.bound(span.end)))


def set_backup_ts(context: BackupContext) -> None:
    """Choose backup-ts, a timestamp of now; a resumed run keeps its own, whose files are of that snapshot."""
    now = context.cluster.pd.tso()
    if not context.has_earlier_work:
        context.set_backup_ts(now)
    elif context.backup_ts > now:  # stores of some versions abort at a timestamp that PD has not reached
        raise ResumeRefused(
            f"cannot resume the unfinished run at {context.store.location}: its backup-ts is ahead of PD's timestamps",
            hint="Check the clocks of PD's members, or pass --no-resume to remove its files and start over.",
        )
    context.scanned_ts = context.backup_ts


def resolve_locks(context: BackupContext) -> None:
    """Clear the locks that are in the way of a reader at backup-ts. Tasks clear those that appear later. Raises `LocksRemain`."""

    def clear(interval: Interval) -> set[int]:
        locks = SnapshotLocks(context.cluster, context.backup_ts, patience=context.options.lock_patience)
        locks.clear(interval.span)
        context.check_locks()
        return locks.resolved

    resolved = run_on_threads(clear, context.plan, LOCK_THREADS, "locks")
    context.snapshot = Snapshot(context.backup_ts, frozenset[int]().union(*resolved))


def check_gc(context: BackupContext) -> None:
    """Ask PD whether GC has passed backup-ts, so that rows may be missing without an error. Raises `SafePointError`."""
    if context.manifest is None and context.keeper is not None:
        with contextlib.suppress(SafePointError):  # the keeper keeps it, and `check_locks` raises it
            context.keeper.confirm()
        context.check_locks()


def compare_snapshot(context: BackupContext) -> None:
    """Compare as `compare_checksums`; raises `SafePointError` if GC may have removed what is compared."""
    try:
        compare_checksums(context)
    except ChecksumMismatch:
        check_gc(context)
        raise
    check_gc(context)
