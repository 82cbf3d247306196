"""Steps after the ingest: flush timestamps, compare the cluster with the backup, ingest hidden rows again."""

from __future__ import annotations

from functools import reduce

from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.timestamps import show_ts
from tikv_br.compare.files import BackupComparison, Comparison, FilePart
from tikv_br.errors import (
    ChecksumMismatch,
    ClusterUnreachable,
    RetryBudgetExhausted,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.announce import flush_timestamps, new_timestamp
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import Mode, Restamp
from tikv_br.restore.resume import forget_if_different, save_checkpoint
from tikv_br.restore.target import gaps_of, raw_comparison_of
from tikv_br.restore.transfer import ingest, lift_limit, limit_downloads, or_notice, while_locked

LEFT_TO_DO = (
    "All rows are in the target{compared}. Left to do: the stores must drop their cached timestamps, which needs PD. "
    "Run the same command again once PD answers; it restores nothing twice."
)


SAME_COMMAND = "The same command restores all rows again."


def flush_restored(context: RestoreContext) -> None:
    """Call `flush_timestamps` after the ingest. If PD does not answer, the error states that only this is missing."""
    try:
        flush_timestamps(context)
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        compared = ""
        if context.options.checksum:
            compare(context)
            compared = " and equal to the backup's"
        error.hint = LEFT_TO_DO.format(compared=compared)
        raise


@forget_if_different
def compare(context: RestoreContext) -> None:
    """Compare the cluster with the backup; rows that newer deletes hide are ingested again."""
    comparison = raw_comparison_of(context)
    try:
        compare_all(context, comparison)
    except ChecksumMismatch as error:
        if not ingest_hidden(context, comparison):
            raise ChecksumMismatch(error.message, hint=_hint(context, error)) from None
        try:
            compare_all(context, comparison)
        except ChecksumMismatch as again:
            hint = "Stop all clients that delete or write these keys in the target, then run the same command again."
            raise ChecksumMismatch(again.message, hint=hint) from None


def compare_all(context: RestoreContext, comparison: Comparison) -> None:
    """Find the checksum of all parts, and other rows. Parts that were found equal during the ingest are not compared again."""
    equal: dict[tuple[str, KeyRange], Checksum] = {}
    if context.comparing is not None:
        equal = context.comparing.finish()
        context.comparing = None
    left = [part for part in context.parts if (part.file.name, part.span) not in equal]
    found = comparison.require_all_equal(left, context.options.concurrency)
    context.found = reduce(Checksum.merge, equal.values(), found)
    if context.options.allow_overwrite:
        context.others.update({("", gap): comparison.count_rows(gap) for gap in gaps_of(context)})


def ingest_hidden(context: RestoreContext, comparison: BackupComparison) -> bool:
    """Ingest the parts again, with a newer timestamp, whose rows newer deletes hide; False if anything else differs.

    Raises `ChecksumMismatch` if rows are to keep their own timestamps.
    """
    options = context.options
    if options.mode is not Mode.INGEST or context.backup.api_version is not ApiVersion.V2:
        return False
    ts = new_timestamp(context) if options.restamp is not Restamp.NEVER else 0
    parts, rows = _hidden(context, comparison)
    if not parts:
        return False
    found = f"newer deletes of the same keys in the target hide {counted(rows, 'restored row')}"
    if not ts:
        raise ChecksumMismatch(
            f"{found}: with --restamp never, restored rows keep their older timestamps",
            hint="Run the same command again with --restamp auto: all rows are restored again with a new timestamp, and become visible.",
        )
    context.reporter(Notice(f"{found}: these rows are ingested again with the new timestamp {show_ts(ts)}"))
    context.restamp_ts = ts
    save_checkpoint(context)
    todo, done, context.todo = context.todo, context.done, parts
    limit_downloads(context)
    while_locked(ingest)(context)
    or_notice(lift_limit)(context)
    flush_timestamps(context)
    context.todo, context.done = todo, done
    return True


def _hidden(context: RestoreContext, comparison: BackupComparison) -> tuple[list[FilePart], int]:
    """The parts that differ, and how many of their rows newer deletes hide; none if anything else differs."""
    threads = context.options.concurrency
    answers = run_on_threads(comparison.compare, context.parts, threads, "compare")
    parts = [part for part, (_, difference) in zip(context.parts, answers, strict=True) if difference]
    rows = run_on_threads(comparison.hidden_rows, parts, threads, "compare")
    return (parts, sum(rows)) if all(rows) else ([], 0)


def _hint(context: RestoreContext, mismatch: ChecksumMismatch) -> str:
    hint = f"{mismatch.hint} {SAME_COMMAND}"
    if context.options.allow_overwrite and context.options.mode is Mode.INGEST and not context.restamp_ts:
        hint = f"{hint} If the backup's rows must replace newer rows of the target, pass --restamp always."
    return hint
