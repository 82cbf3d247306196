"""The steps of a restore of transactional data: files in pairs, one new timestamp for all rows, and no lock in the target."""

from __future__ import annotations

from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import LockResolver
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.timestamps import seconds_between, show_ts
from tikv_br.errors import (
    ApiVersionMismatch,
    BackupUnsupported,
    ChecksumMismatch,
    TargetNotEmpty,
    TimestampAheadOfTso,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.announce import notice_followers
from tikv_br.restore.comparison import SAME_COMMAND, compare_all
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.inspect import rows_differ
from tikv_br.restore.options import Restamp, RestoreOptions, Via
from tikv_br.restore.resume import forget_if_different, save_checkpoint
from tikv_br.restore.steps import FIRST_CHANGE, RestoreStep, first_steps, ingest_steps, runbook
from tikv_br.restore.target import check_target, comparison_of
from tikv_br.restore.transfer import split, while_locked
from tikv_br.steps import FunctionStep

_TICDC = "ticdc"


def txn_restore_steps(options: RestoreOptions) -> list[RestoreStep]:
    """The runbook of transactional data. A dry run ends before the first change."""
    checks = [
        *first_steps(
            options,
            FunctionStep("check that backup and cluster match", check_fit),
            FunctionStep("resolve locks", resolve_locks),
        ),
        FunctionStep("check pairs of files", check_pairs),
        FunctionStep("check timestamps", choose_timestamp),
        FunctionStep("check for followers", report_followers),
    ]
    changes = [
        FunctionStep(FIRST_CHANGE, while_locked(save_checkpoint)),
        FunctionStep("split and scatter", while_locked(split)),
        *ingest_steps(options),
    ]
    if options.checksum:
        changes.append(FunctionStep("compare checksums", compare))
    return runbook(options, checks, changes)


def check_fit(context: RestoreContext) -> None:
    """Refuse clusters without transactions, and those that cannot rewrite keys or many rows."""
    if context.info.api_version is ApiVersion.V1TTL:
        raise ApiVersionMismatch(
            "the cluster runs API v1ttl, which has no transactions", hint="Restore into a cluster of API v1 or v2."
        )
    options = context.options
    is_other_version = context.info.api_version is not context.backup.api_version
    context.cluster.require(versions.WRITES)
    if options.allow_overwrite:
        context.reporter(
            Notice(
                "--allow-overwrite: rows of the target that the backup does not have stay; with any such row the range is no snapshot, "
                "and programs such as JuiceFS may damage their data"
            )
        )
    is_moved = is_other_version or options.to_keyspace or options.rewrite_prefix != (b"", b"")
    if is_moved and context.via is not Via.UPLOAD:
        context.cluster.require(versions.TXN_REWRITE)
    if not options.checksum and options.restamp is Restamp.NEVER:
        raise UsageError(
            "--keep-timestamps cannot be combined with --no-checksum: deletes in the target can hide rows, which only the checksum shows",
            hint="Omit one of them.",
        )


def check_pairs(context: RestoreContext) -> None:
    """Refuse files that do not belong together: each row is in the file with its value, and its commit in the other one.

    Rows with a GC fence, which readers of the target would not see, are uploaded without it.
    """
    fenced = 0
    for part in context.todo:
        facts, expected = context.facts[part.file.name], part.totals.total_kvs
        if facts.rows != expected:
            raise rows_differ(part.file, facts.rows, expected)
        if facts.fences and context.options.via is Via.STORES:
            raise BackupUnsupported(
                f"{part.file.name} has {facts.fences} rows with a GC fence, which would not be visible after the restore",
                hint="Leave out --via stores: tikv-br then uploads the rows of this file without the fences.",
            )
        fenced += facts.fences
    if fenced:
        context.reporter(
            Notice(f"tikv-br uploads the files of {counted(fenced, 'row')} with a GC fence, and removes it")
        )


def resolve_locks(context: RestoreContext) -> None:
    """Resolve the locks of ended transactions in the target. Raises `TargetNotEmpty` for a transaction that is alive."""
    resolver, now = LockResolver(context.cluster), context.cluster.pd.tso()
    for each in context.wanted:
        report = resolver.resolve(each.target, now)
        if report.live:
            raise TargetNotEmpty(
                f"clients write to the target: there is {report.live[0]}",
                hint="Stop all clients of the target, then run the same command again.",
            )


def choose_timestamp(context: RestoreContext) -> None:
    """Choose the new timestamp of all rows, unless they keep their own or a resumed restore has chosen one."""
    if context.restamp_ts or not context.todo:
        return
    now = context.cluster.pd.tso()
    if context.options.restamp is not Restamp.NEVER:
        context.restamp_ts = now
        context.reporter(Notice(f"all rows get the new timestamp {show_ts(now)}"))
        check_target(context)  # rows that were written since it was checked would be hidden
    elif (ts := context.backup.backup_ts) > now:
        raise TimestampAheadOfTso(
            f"the backup has rows up to ts {ts}, {seconds_between(now, ts):.1f} s ahead of the target's TSO"
        )


def report_followers(context: RestoreContext) -> None:
    """Report replications of the cluster, which do not get the rows. Nothing announces an ingest of transactional data to them."""

    def find(cluster: Cluster) -> list[str]:
        now = cluster.pd.tso() >> 18
        services = gc_status(cluster.pd_http).services
        return [each.service for each in services if each.service.startswith(_TICDC) and each.expires * 1000 > now]

    notice_followers(context, find, "restored rows reach no change feed; TiCDC, with these safe points, gets none")


@forget_if_different
def compare(context: RestoreContext) -> None:
    """Compare the target with the backup. Deletes in the target may have hidden rows that keep their timestamps."""
    try:
        compare_all(context, comparison_of(context))
    except ChecksumMismatch as error:
        hint = f"{error.hint} {SAME_COMMAND}"
        if not context.restamp_ts:
            hint = (
                "If rows are missing, newer deletes in the target hide them. Delete the range physically (KvDeleteRange) and run the same "
                "command again, or run it without --keep-timestamps: either restores all rows again."
            )
        raise ChecksumMismatch(error.message, hint=hint) from None
