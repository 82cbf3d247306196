"""Steps of a restore before its first change: they check the target and the files, choose the timestamp of ingested rows, and announce the ingest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tikv_br import run_id
from tikv_br.backupset.coverage import codec_of, describe_ranges, nothing_matched
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import has_rows
from tikv_br.cluster.cluster import Cluster, first_rpc_key, refuse_beyond
from tikv_br.cluster.ingest_announcer import Announcer, foreign_followers, own_followers, unfinished
from tikv_br.cluster.timestamps import seconds_between, show_ts
from tikv_br.cluster.txnkv import find_transactions, first_txn_key
from tikv_br.compare.files import BackupComparison, Comparison, TxnComparison
from tikv_br.errors import (
    ChecksumMismatch,
    ClusterFollowed,
    ClusterUnreachable,
    EtcdUnreachable,
    RetryBudgetExhausted,
    TargetNotEmpty,
    TikvBrError,
    TimestampAheadOfTso,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection, subtract
from tikv_br.formats.keys.text import show_both
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.inspect import BackgroundInspection, FileCheck, RowCheck
from tikv_br.restore.options import Restamp
from tikv_br.restore.resume import may_hold_rows

if TYPE_CHECKING:
    import pyarrow as pa


def comparison_of(context: RestoreContext) -> Comparison:
    """Return the comparison of the backup with the target."""
    backup, others = context.backup, context.others if context.options.allow_overwrite else None
    if backup.key_mode is KeyMode.TXN:
        return TxnComparison(context.cluster, backup.store, backup.api_version, others)
    return raw_comparison_of(context)


def raw_comparison_of(context: RestoreContext) -> BackupComparison:
    """Return the comparison of a backup of RawKV data with the target."""
    cuts = {name: facts.cuts for name, facts in context.facts.items()}
    backup = context.backup
    return BackupComparison(
        context.cluster,
        backup.store,
        backup.api_version,
        cuts,
        expiry_recorded=backup.expiry_recorded,
        others=context.others if context.options.allow_overwrite else None,
    )


def check_target(context: RestoreContext) -> None:
    """Refuse a target with rows, except with `allow_overwrite`, from an unfinished restore, or if it already holds the backup.

    Raw rows may in no case come into a target of transactional data.
    """
    if context.already_restored:
        return
    for span in subtract((each.target for each in context.wanted), may_hold_rows(context)):
        if context.codec.mode is KeyMode.RAW and find_transactions(context.cluster, span):
            raise TargetNotEmpty(
                "the target has transactional data, as of JuiceFS or SurrealDB, whose clients raw rows in the same cluster would break",
                hint="Restore into a cluster of raw data.",
            )
        if context.options.allow_overwrite:
            continue
        codec = codec_of(context.codec.api_version, span, context.codec.mode)
        first = _first_key(context.cluster, codec, span)
        if first is None:
            continue
        if context.checkpoint is None and _holds_backup(context):
            context.already_restored, context.todo = True, []
            context.reporter(Notice("The target already holds this backup; nothing to do."))
            return
        where = describe_ranges(codec.api_version, [span], codec.mode)
        hint = None
        if codec.mode is KeyMode.TXN:
            hint = (
                "Restore into an empty range. With --allow-overwrite, rows that the backup does not have stay: the range is then no "
                "snapshot, which can break the programs that use it."
            )
        raise TargetNotEmpty(
            f"the target is not empty in the range {where}: its first key there is {show_both(codec.user_key(first))}",
            hint=hint,
        )


def _first_key(cluster: Cluster, codec: KeyCodec, span: KeyRange) -> bytes | None:
    """The first RPC key of a row in a range, or None."""
    if codec.mode is KeyMode.TXN:
        return first_txn_key(cluster, span, cluster.pd.tso())
    return first_rpc_key(cluster, codec.keyspace_id, span)


def check_target_beside_files(context: RestoreContext) -> None:
    """Check the target while the files are inspected in the background: neither needs the other."""
    options = context.options
    files = list({file.name: file for part in context.todo for file in part.files}.values())
    context.inspection = BackgroundInspection(
        context.backup, files, options.file_check, options.concurrency, _row_check(context)
    )
    check_target(context)
    context.overlap_seconds["check every file"] = context.inspection.seconds_until(time.monotonic())


def _holds_backup(context: RestoreContext) -> bool:
    """Return whether the target holds exactly the requested rows, as after a restore killed after its last change.

    The comparison ends at the first file that differs.
    """
    if not context.options.checksum:
        return False
    comparison = comparison_of(context)
    if any(comparison.compare_empty(gap) for gap in gaps_of(context)):
        return False
    try:
        context.found = comparison.require_all_equal(context.parts, context.options.concurrency, exact=True)
    except ChecksumMismatch:
        return False
    return True


def gaps_of(context: RestoreContext) -> list[KeyRange]:
    """The ranges of the target of which the backup has no file."""
    return subtract((each.target for each in context.wanted), [part.target for part in context.parts])


def check_files(context: RestoreContext) -> None:
    """Wait until every file is inspected: no store sees one before.

    If that took longer than the check of the target, the target is checked again: it may have received rows in between.
    """
    if context.inspection is None or context.already_restored:
        return
    took_longer = not context.inspection.is_done
    context.facts = context.inspection.result()
    if took_longer:
        check_target(context)


def _row_check(context: RestoreContext) -> RowCheck | None:
    """If all files are read, what refuses wanted rows that the target's stores ingest, but would refuse to overwrite or delete."""
    if context.options.file_check is not FileCheck.CONTENT or context.codec.mode is not KeyMode.RAW:
        return None
    limits = limits_of_ranges(context)

    def check(file: FileEntry, rows: pa.RecordBatch) -> None:
        for span, limit in limits:
            if not intersection(span, file.key_range).is_empty:
                refuse_beyond(limit, rows, codec_of(context.backup.api_version, span), span)

    return check


def limits_of_ranges(context: RestoreContext) -> list[tuple[KeyRange, RowLimits]]:
    """The wanted ranges of the backup, in RPC keys, and the limits that the target's stores have for their rows: keys may grow."""
    limits = context.cluster.row_limits(KeyCodec(context.codec.api_version))
    return [(each.span, limits.less(len(each.rewrite.new) - len(each.rewrite.old))) for each in context.wanted]


def look_for_rows(context: RestoreContext) -> None:
    """Refuse an explicit range, keyspace or prefix of which the backup has no row. Raises `NothingMatched`."""
    options, backup = context.options, context.backup
    explicit = options.span != EVERY_KEY or options.keyspace is not None or options.rewrite_prefix != (b"", b"")
    spans = [each.span for each in context.wanted]
    if explicit and not options.allow_empty and not has_rows(backup, spans):
        raise nothing_matched("the backup", backup.api_version, spans, backup.key_mode)


log = logging.getLogger(__name__)


def check_timestamps(context: RestoreContext) -> None:
    """Find out whether rows need a new timestamp: deletes in the target may be newer, or they are newer than its TSO (API V2)."""
    if context.backup.api_version is not ApiVersion.V2 or not context.todo:
        return
    if context.restamp_ts:  # a resumed restore keeps the timestamp that it has chosen
        context.restamp_reason = "as before the interruption"
        return
    newest = max((facts.max_ts for facts in context.facts.values()), default=0)
    now = context.cluster.pd.tso() if newest else 0
    ahead = f"the backup's newest row has ts {newest}, {seconds_between(now, newest):.1f} s ahead of the target's TSO"
    match context.options.restamp:
        case Restamp.ALWAYS:
            context.restamp_reason = "--restamp always"
        case Restamp.AUTO if context.backup.cluster_id == context.info.cluster_id:
            context.restamp_reason = (
                "the backup is of this cluster, and deletes since then would hide rows with their own timestamps"
                if context.options.command != "load raw"
                else "deletes of the same keys in the target may be newer than the loaded files, and would hide rows"
            )
        case Restamp.AUTO if newest > now:
            context.restamp_reason = ahead
        case Restamp.NEVER if newest > now:
            raise TimestampAheadOfTso(ahead)
        case _:
            return
    if context.options.dry_run:
        _choose_timestamp(context)


def check_followers(context: RestoreContext) -> None:
    """Refuse a target with followers that would not learn of the rows. Raises `ClusterFollowed`.

    Those that read announcements do; but if rows keep their timestamps, all that they can do is end.
    """
    if not _is_announced(context):
        return
    if not context.restamp_reason and (ended := own_followers(context.cluster)):
        context.reporter(
            Notice(
                "rows keep their timestamps, so that no change feed delivers them, and these followers of the cluster will end degraded "
                f"(exit code 76): {', '.join(ended)}. With --restamp always they get the rows"
            )
        )
    if context.options.allow_followers:
        return
    if found := foreign_followers(context.cluster):
        raise ClusterFollowed(
            f"rows that stores ingest reach no change feed, and these followers of the cluster would not notice: {', '.join(found)}"
        )


def report_followers(context: RestoreContext) -> None:
    """Report that followers, because of which an ingest would be refused, get rows that are put."""
    if _is_announced(context):
        notice_followers(context, foreign_followers, "followers of the cluster get these rows, as they are put")


def notice_followers(context: RestoreContext, find: Callable[[Cluster], Iterable[str]], text: str) -> None:
    """Report the followers that `find` finds. It is only a notice: if the cluster cannot tell them, nothing fails."""
    try:
        found = list(find(context.cluster))
    except TikvBrError as error:
        log.debug("cannot look for followers: %s", error.message)
        return
    if found:
        context.reporter(Notice(f"{text}: {', '.join(found)}"))


def _is_announced(context: RestoreContext) -> bool:
    """Return whether followers can exist: only API V2 has change feeds."""
    return context.backup.api_version is ApiVersion.V2 and bool(context.todo)


def announce(context: RestoreContext) -> None:
    """Announce the ingest to followers of the cluster, then choose the new timestamp: see `tikv_br.cluster.ingests`.

    Then the stores drop their cached timestamps: whatever clients write from now on is newer than all rows to restore. A check of the target after
    that sees every row that a new timestamp could hide.
    """
    if not _is_announced(context):
        return
    restore_id = context.record.id if context.record is not None else run_id.current_or_new()
    spans = [each.target for each in context.wanted]
    context.announcer = Announcer.start(context.cluster, context.options.command, restore_id, spans)
    is_chosen_now = bool(context.restamp_reason) and not (context.restamp_ts and context.announcer.found_unfinished)
    if is_chosen_now:
        _choose_timestamp(context)
    context.cluster.flush_timestamps()
    if is_chosen_now:
        check_target(context)


def _choose_timestamp(context: RestoreContext) -> None:
    context.restamp_ts = context.cluster.pd.tso()
    context.reporter(Notice(f"all rows get the new timestamp {show_ts(context.restamp_ts)}: {context.restamp_reason}"))


def finish_announcement(context: RestoreContext) -> None:
    """Announce that all rows are in; also for an earlier run that was killed before it could."""
    if context.announcer is not None:
        try:
            context.announcer.finish()
        except (ClusterUnreachable, RetryBudgetExhausted, EtcdUnreachable) as error:
            error.hint = "All rows are in the target. Left to do: followers of the cluster wait for the announcement of its end. Run the same command again once PD answers; it restores nothing twice."
            raise
    elif context.backup.api_version is ApiVersion.V2 and context.record is not None:
        found = context.cluster.ingests.read()
        if unfinished(found, context.record.id) is not None:
            Announcer.start(context.cluster, context.options.command, context.record.id, ()).finish()


def abandon_announcement(context: RestoreContext) -> None:
    """Withdraw the announcement after a failure, unless files may have been ingested."""
    announcer, context.announcer = context.announcer, None
    if announcer is not None:
        announcer.abandon()
