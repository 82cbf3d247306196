"""Steps that check the target and the files before the first change."""

from __future__ import annotations

import time

from tikv_br.backupset.coverage import codec_of, describe_ranges, nothing_matched
from tikv_br.backupset.rows import has_rows
from tikv_br.cluster.cluster import Cluster, first_rpc_key
from tikv_br.cluster.txnkv import find_transactions, first_txn_key
from tikv_br.compare.files import BackupComparison, Comparison
from tikv_br.compare.txn import TxnComparison
from tikv_br.errors import (
    ChecksumMismatch,
    TargetNotEmpty,
)
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, subtract
from tikv_br.formats.keys.text import show_both
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.inspect import BackgroundInspection
from tikv_br.restore.resume import (
    may_hold_rows,
)


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
        raise TargetNotEmpty(
            f"the target is not empty in the range {where}: its first key there is {show_both(codec.user_key(first))}"
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
    context.inspection = BackgroundInspection(context.backup, files, options.file_check, options.concurrency)
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
    report_large_rows(context)
    if took_longer:
        check_target(context)


def report_large_rows(context: RestoreContext) -> None:
    """Report files with rows that the target's stores ingest, but would refuse to overwrite or delete. Whoever moves data needs these, too."""
    limits, found = context.cluster.row_limits(KeyCodec(context.codec.api_version)), []
    for part in context.todo:
        facts, grown = context.facts[part.file.name], len(part.rewrite.new) - len(part.rewrite.old)
        longest = facts.largest_key + grown if facts.largest_key else 0
        if longest > limits.key + len(KeyCodec(context.codec.api_version).prefix) or facts.largest_row > limits.row:
            found.append((part.file.name, longest, facts.largest_row))
    if found:
        name, longest, largest = max(found, key=lambda each: each[1:])
        context.reporter(
            Notice(
                f"{counted(len(found), 'file')} {'has' if len(found) == 1 else 'have'} rows that no client will be able to overwrite or "
                f"delete: {name} has keys of up to {longest:,} bytes and rows of up to {largest:,}. Raise storage.max-key-size and "
                "raftstore.raft-entry-max-size of the target's stores"
            )
        )


def look_for_rows(context: RestoreContext) -> None:
    """Refuse an explicit range, keyspace or prefix of which the backup has no row. Raises `NothingMatched`."""
    options, backup = context.options, context.backup
    explicit = options.span != EVERY_KEY or options.keyspace is not None or options.rewrite_prefix != (b"", b"")
    spans = [each.span for each in context.wanted]
    if explicit and not options.allow_empty and not has_rows(backup, spans):
        raise nothing_matched("the backup", backup.api_version, spans, backup.key_mode)
