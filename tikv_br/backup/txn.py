"""Backs up transactional data: the list of steps, and those that only this operation has.

The backup is one snapshot: what transactions have committed up to backup-ts, in all regions. Stores refuse to read over the lock of
a transaction that may still commit below it, so locks are cleared first. They do not notice that GC has passed backup-ts, so PD is
asked for that until the last file is written.
"""

from __future__ import annotations

import contextlib

from tikv_br.backup import engines
from tikv_br.backup.compare import compare_checksums
from tikv_br.backup.run import check_engine, runbook
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster import versions
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.request_guards import check_bounds
from tikv_br.dataflow.context import BackupContext
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.engine import choose_engine
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Interval, source_ranges
from tikv_br.dataflow.run import BackupReport, run_backup
from tikv_br.dataflow.task import Snapshot
from tikv_br.errors import ChecksumMismatch, ClusterUnfit, ResumeRefused, SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.progress_events import Reporter, silent
from tikv_br.steps import FunctionStep, Step

LOCK_THREADS = 16
"""Intervals whose locks are looked for at the same time."""


def backup_txn(options: BackupOptions, reporter: Reporter = silent) -> BackupReport:
    """Back up transactional data; returns when the backup is complete or, in a dry run, planned. Raises `TikvBrError`."""
    return run_backup(BackupContext(options, reporter), backup_steps(options))


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The steps, in order. A dry run leaves out every step that writes."""
    copying = [
        FunctionStep("resolve locks", resolve_locks),
        FunctionStep("copy", engines.copy),
        FunctionStep("check GC", check_gc),
    ]
    return runbook(options, check_cluster, set_backup_ts, copying, compare_snapshot)


def check_cluster(context: BackupContext) -> None:
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
        with contextlib.suppress(SafePointError):  # the next call raises it, too
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
