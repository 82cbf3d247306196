"""A backup as a runbook: each step is one line of it, and takes back what it did when a later one fails.

Nothing of a failed backup stays: not in the storage, not in PD. A backup that is complete is never removed, also when
what follows its commit fails.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from formats.api_version import ApiVersion
from tikv_br.backup import finish, scope, work
from tikv_br.backup.backup_ts import choose_backup_ts, keep_safe
from tikv_br.backup.context import BackupContext
from tikv_br.backup.conversion import BACKUP_TS, CHECKSUM, CONVERSION, Loss, require_conversion, require_feature
from tikv_br.backup.convert import CONVERTED_TS, Conversion
from tikv_br.backup.engine import choose_engine
from tikv_br.backup.options import BackupOptions
from tikv_br.backupset import lock
from tikv_br.backupset.backup_set import BackupWriter
from tikv_br.cluster import safepoint
from tikv_br.cluster.shared import shared_cluster
from tikv_br.progress_events import Notice
from tikv_br.spark.session import check_java
from tikv_br.steps import Line, Step
from tikv_br.storage.open import open_store

log = logging.getLogger(__name__)


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The runbook. A dry run leaves out every step that writes anywhere."""
    checks = [
        Line("check the input", check_input),
        Line("connect", connect),
        Line("check the cluster", check_cluster),
        Line("check the storage", check_storage),
    ]
    plan = Line("plan", work.plan)
    if options.dry_run:
        return [*checks, plan]
    compare = [Line("compare checksums", finish.compare_checksums)] if options.checksum else []
    return [
        *checks,
        Line("take the path", take_path, give_path_back),
        Line("protect from GC", protect, unprotect),
        plan,
        Line("copy", work.copy),
        Line("prove coverage", finish.prove_coverage),
        *compare,
        Line("commit", finish.commit),
        Line("hand over the safe point", finish.settle_safe_point),
    ]


def check_input(context: BackupContext) -> None:
    """Refuse what no cluster could do, before anything is asked of anyone."""
    context.options.check()


def connect(context: BackupContext) -> None:
    """Reach PD and learn what the cluster is."""
    context.cluster = shared_cluster(context.options.cluster)
    context.info = context.cluster.info()


def check_cluster(context: BackupContext) -> None:
    """Refuse what this cluster cannot do, and settle keys and versions."""
    options, info = context.options, context.info
    target = info.api_version if options.dst_api_version is None else options.dst_api_version
    require_conversion(info.api_version, target, options.allow_loss)
    context.engine = choose_engine(options, info.api_version, target)
    _check_executor(context)
    if target is not info.api_version:
        require_feature(info.version, CONVERSION)
    if options.checksum:
        require_feature(info.version, CHECKSUM)
    if info.api_version is ApiVersion.V2:
        require_feature(info.version, BACKUP_TS)
    context.conversion = Conversion(
        info.api_version,
        target,
        CONVERTED_TS if target is ApiVersion.V2 else 0,
        drop_ttl=Loss.TTL in options.allow_loss,
    )
    context.source_ranges = scope.source_ranges(options, context.cluster, target)
    if context.with_ttl and context.engine.name == "scan":
        context.reporter(
            Notice("the TTL of every key is asked for; --assume-no-ttl saves that where keys do not expire")
        )


def check_storage(context: BackupContext) -> None:
    """Refuse a path that is in use."""
    context.store = open_store(context.options.storage)
    lock.check_path_free(context.store)


def take_path(context: BackupContext) -> None:
    """Make the path this run's own; also proves that it can be written."""
    context.writer = BackupWriter.create(context.store)
    context.owns_path = True


def give_path_back(context: BackupContext) -> None:
    """Remove all that this run wrote, unless it has become a backup."""
    if context.owns_path:
        context.writer.discard()


def protect(context: BackupContext) -> None:
    """Choose backup-ts and hold GC back from it, where the cluster has timestamps."""
    if context.info.api_version is not ApiVersion.V2:
        return
    options = context.options
    context.backup_ts = choose_backup_ts(context.cluster, options.safe_interval)
    context.conversion = replace(context.conversion, ts=context.backup_ts)
    context.keeper = keep_safe(context.cluster, context.run_id, context.backup_ts, options.gc_ttl)
    context.keeper.start()


def unprotect(context: BackupContext) -> None:
    """Let GC go on."""
    if context.keeper is not None:
        context.keeper.stop()
        safepoint.release(context.cluster.pd, context.keeper.service_id)


def _check_executor(context: BackupContext) -> None:
    """Refuse a Spark that could not start, where it would have to."""
    if context.engine.executor == "spark" and not context.options.dry_run:
        check_java()
