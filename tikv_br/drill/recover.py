"""The steps that make a target, bring a backup into it, prove the result, and measure how long that took."""

from __future__ import annotations

import logging
from dataclasses import replace

from formats.checksum import Checksum
from formats.keytext import format_key
from tikv_br.cluster import timestamp
from tikv_br.drill import compare
from tikv_br.drill.context import DrillContext
from tikv_br.drill.landing import Landing, first_key
from tikv_br.drill.ledger import Kind
from tikv_br.errors import TargetNotEmpty, UsageError
from tikv_br.progress_events import Event, Reporter, StepStarted
from tikv_br.report.facts import Compared
from tikv_br.report.figures import counted
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.restore.steps import FIRST_CHANGE
from tikv_br.verify.options import Executor, Level, VerifyOptions
from tikv_br.verify.run import verify

log = logging.getLogger(__name__)
BY_TS = (
    "An upper bound, by {clock}: from backup-ts, up to which every write is in the backup, until {moment}. Whether the "
    "source was written to in that time does not matter: it might have been."
)
BY_START = (
    "An upper bound, by {clock}: from the begin of the backup, before which every write is in it, until {moment}. The "
    "source has no timestamps, so what was written while the backup ran is in it or not."
)


def make_target(context: DrillContext) -> None:
    """Write down what is about to be made, then make it; rows in a cluster of others are the restore's to claim."""
    target, _ = context.options.target, context.folder
    context.target_creation = target.plan(context.id, context.backup_set)
    if context.target_creation.kind is not Kind.KEYS:
        context.ledger.note(context.target_creation)
    context.landing = target.make(context.target_creation, context.id, context.backup_set)


def restore_all(context: DrillContext) -> None:
    """Restore all of the backup, as after the loss of the cluster."""
    _begin_recovery(context)
    _restore(context)


def restore_before(context: DrillContext) -> None:
    """Bring the target to the state before the accident."""
    _restore(context)


def claiming(context: DrillContext) -> Reporter:
    """For a restore: has the target written down as the drill's right before its first change, and not before.

    A restore that is refused, for the backup's or the target's sake, has put no row there: what lies there then is
    somebody else's, be it the same rows of the same backup, by which nobody could tell. Raises `TargetNotEmpty` where
    somebody has come since the restore looked.
    """

    def listen(event: Event) -> None:
        creation = context.target_creation
        if isinstance(event, StepStarted) and event.name == FIRST_CHANGE and creation not in context.ledger.creations:
            _check_empty(context.target)
            if creation is not None:
                context.ledger.note(creation)
        context.recorder.inside(event)

    return listen


def _check_empty(landing: Landing) -> None:
    found = first_key(landing.cluster, landing.api_version, landing.claims)
    if found is not None:
        raise TargetNotEmpty(f"the drill's target holds data that no drill has made: its first key is {found.hex()}")


def delete_range(context: DrillContext) -> None:
    """The accident: delete the range in the target, in each keyspace of the backup.

    In a cluster that is not the drill's, only once all there is the backup's: what others have put there stays. Raises
    `ChecksumMismatch`.
    """
    if context.target_creation is not None and context.target_creation.kind is Kind.KEYS:
        _compare(context)
    context.target.delete(context.options.start, context.options.end)


def restore_range(context: DrillContext) -> None:
    """Restore the range alone, into a cluster that has the rest. Raises `UsageError` for one without a key."""
    _begin_recovery(context)
    start, end = context.options.start, context.options.end
    restored = _restore(context, start=start, end=end).total_kvs
    if not restored:
        raise UsageError(
            "the backup has no key between --start and --end: there was nothing to restore",
            hint="Name a range with keys.",
        )
    span = f"from {format_key(start, 'escaped') or 'the first key'} to {format_key(end, 'escaped') or 'the last'}"
    context.compared.append(
        Compared("the range that was deleted, and restored alone", f"{span}; by the restore itself", restored, 0)
    )


def verify_all(context: DrillContext) -> None:
    """Compare the target with the backup, which ends the recovery; then read the whole backup as well."""
    inside = context.recorder.inside
    proven, sums = _compare(context)
    context.measured = replace(
        context.measured, rto=round(context.recorder.now - context.restore_began, 3), keys=proven.keys
    )
    context.compared.append(proven)
    if not proven.keys:
        log.warning("the backup of drill %s holds no key: that it comes back proves little", context.id)
    compare.seal(context, sums)
    read = verify(VerifyOptions(context.place, Level.DATA, executor=Executor.DRIVER), inside)
    context.compared.append(
        Compared(
            "the backup's files with its records",
            f"every byte of {counted(read.files_checked, 'file')} read again: sha256, block checksums, order and form of the rows, sums",
            read.rows_checked,
            read.bytes_read,
        )
    )


def _compare(context: DrillContext) -> tuple[Compared, Checksum]:
    """The target with the backup, all of it."""
    return (compare.renamed if context.target.renames else compare.as_is)(context)


def _begin_recovery(context: DrillContext) -> None:
    """Start the clock, and say how much is lost if the source is gone."""
    context.restore_began = context.recorder.now
    entry = context.chosen
    known = timestamp.physical_ms(entry.backup_ts) if entry.backup_ts else entry.started_ms
    if not known:  # a backup of the Go tool of a source without timestamps
        context.measured = replace(context.measured, rpo_method="The backup does not say when it was begun.")
        return
    moment = "just after the backup was done" if context.made_backup else "the begin of the drill"
    text = (BY_TS if entry.backup_ts else BY_START).format(clock=context.lost_by, moment=moment)
    context.measured = replace(context.measured, rpo=max(context.lost_ms - known, 0) / 1000, rpo_method=text)


def _restore(context: DrillContext, start: bytes = b"", end: bytes = b"") -> RestoreSummary:
    asked = replace(context.target.restore(context.place, context.restore_state), start=start, end=end)
    return restore(asked, claiming(context))
