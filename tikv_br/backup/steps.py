"""A backup as a runbook: each step is one line of it, and takes back what it did when a later one fails.

What tasks of a failed backup have done stays for the next run at the path, unless no run could go on with it; else nothing
stays, neither in the storage nor in PD. A backup that is complete is never removed, also when what follows its commit fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from formats.api_version import ApiVersion
from tikv_br.backup import finish, path, scope, work
from tikv_br.backup.backup_ts import choose_backup_ts, keep_safe
from tikv_br.backup.context import BackupContext
from tikv_br.backup.conversion import BACKUP_TS, CHECKSUM, CONVERSION, Loss, require_conversion, require_feature
from tikv_br.backup.convert import CONVERTED_TS, Conversion
from tikv_br.backup.engine import choose_engine
from tikv_br.backup.options import BackupOptions
from tikv_br.cluster import safepoint
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import SafePointError
from tikv_br.progress_events import Notice
from tikv_br.spark.session import check_java
from tikv_br.steps import Line, Step
from tikv_br.storage.backend import KEY_IN_CLEAR

log = logging.getLogger(__name__)


def backup_steps(options: BackupOptions) -> list[Step[BackupContext]]:
    """The runbook. A dry run leaves out every step that writes anywhere."""
    checks = [
        Line("check the input", check_input),
        Line("connect", connect),
        Line("check the cluster", check_cluster),
        Line("check the storage", path.check_storage),
    ]
    find, plan = Line("find earlier work", path.find_earlier_work), Line("plan", _unless_complete(work.plan))
    if options.dry_run:
        return [*checks, find, plan]
    compare = [Line("compare checksums", _unless_complete(finish.compare_checksums))] if options.checksum else []
    return [
        *checks,
        Line("take the path", path.take_path, path.give_path_back),
        find,
        Line("choose backup-ts", choose_ts),
        Line("record the run", path.record_run),
        Line("protect from GC", protect, unprotect),
        plan,
        Line("copy", _unless_complete(work.copy)),
        Line("prove coverage", _unless_complete(finish.prove_coverage)),
        *compare,
        Line("commit", finish.commit),
        Line("tidy up", path.tidy_up),
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
    if context.engine.name == "store" and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        context.reporter(Notice(KEY_IN_CLEAR))


def choose_ts(context: BackupContext) -> None:
    """Choose backup-ts, where the cluster has timestamps; also anew, where the run that this one goes on with has done nothing."""
    if context.info.api_version is ApiVersion.V2 and not context.has_earlier_work:
        context.set_backup_ts(choose_backup_ts(context.cluster, context.options.safe_interval))


def protect(context: BackupContext) -> None:
    """Hold GC back from backup-ts, where there is one; whoever goes on with the run knows the safe point's name by now."""
    if not context.backup_ts:
        return
    context.keeper = keep_safe(context.cluster, context.first_run, context.backup_ts, context.options.gc_ttl)
    if context.manifest is None:
        _hold(context, context.keeper)


def unprotect(context: BackupContext) -> None:
    """Let GC go on, or hold it back for a while where the next run can go on with the work."""
    keeper = context.keeper
    if keeper is None:
        return
    if context.lease is not None and not context.still_holds():
        keeper.stop()  # who has the path now goes on with our work, under the same safe point
    elif path.keeps_work(context) and keeper.lost is None:
        keeper.leave_for(context.options.gc_ttl)
    else:
        keeper.stop()
        safepoint.release(context.cluster.pd, keeper.service_id)


def _hold(context: BackupContext, keeper: SafePointKeeper) -> None:
    """Raises `SafePointError`, with a way out where it is an earlier run's backup-ts that GC has passed."""
    try:
        keeper.start()
    except SafePointError as error:
        if context.begun_by:
            error.hint = "A run from then cannot be gone on with: --no-resume removes what it left and starts anew."
        raise


def _unless_complete(action: Callable[[BackupContext], None]) -> Callable[[BackupContext], None]:
    """Leave out what an earlier run has done, where it was broken off after its commit."""

    def act(context: BackupContext) -> None:
        if context.manifest is None:
            action(context)

    return act


def _check_executor(context: BackupContext) -> None:
    """Refuse a Spark that could not start, where it would have to."""
    if context.engine.executor == "spark" and not context.options.dry_run:
        check_java()
