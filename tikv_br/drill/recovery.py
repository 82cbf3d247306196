"""The steps that prepare a target, restore a backup into it, verify the result, and measure how long that took."""

from __future__ import annotations

import logging
from dataclasses import replace

from msgspec import structs

from tikv_br.cluster import timestamps
from tikv_br.compare.files import BackupComparison
from tikv_br.drill.context import DrillContext
from tikv_br.drill.ledger import Creation, EntryKind
from tikv_br.drill.targets import mark_rows
from tikv_br.errors import ChecksumMismatch, EtcdError, UsageError
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, subtract
from tikv_br.formats.keys.text import format_key
from tikv_br.progress_events import Event, Notice, Reporter, StepStarted
from tikv_br.report.facts import Compared, counted
from tikv_br.restore.options import Restamp
from tikv_br.restore.plan import choose_parts
from tikv_br.restore.run import FIRST_CHANGE, RestoreSummary, restore
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

log = logging.getLogger(__name__)
THREADS = 8
TARGET_AND_BACKUP = "target and backup"
RPO_BY_TS = (
    "An upper bound, by {clock}: from backup-ts, up to which the backup has every write, until {moment}. It does not matter "
    "whether the source was written to in that time."
)
RPO_BY_START = (
    "An upper bound, by {clock}: from the start of the backup, up to which it has every write, until {moment}. The source "
    "has no timestamps: a write during the backup may be in it or not."
)


def prepare_target(context: DrillContext) -> None:
    """Start a playground, or check that the target cluster or keyspace is empty.

    A playground is added to the ledger before it is made. Rows are added when the restore is about to write the first
    one, see `ownership_reporter`.
    """
    target, _ = context.options.target, context.folder
    creation = context.target_creation = target.plan(context.id, context.backup, context.recorder)
    if creation.kind is not EntryKind.ROWS:
        context.ledger.add(creation)
    context.destination = target.make(creation, context.id, context.backup)


def restore_all(context: DrillContext) -> None:
    """Restore the whole backup, as after the loss of the cluster."""
    _start_recovery(context)
    _restore(context)


def restore_before(context: DrillContext) -> None:
    """Restore the whole backup as the state before the incident; not measured."""
    _restore(context)


def ownership_reporter(context: DrillContext) -> Reporter:
    """The reporter of a restore, which takes ownership of the target right before the restore's first change.

    Rows that others put there earlier, or after a restore that was refused, are never the drill's. Raises
    `TargetNotEmpty` if somebody has written since the target was prepared.
    """

    def report(event: Event) -> None:
        creation = context.target_creation
        if isinstance(event, StepStarted) and event.name == FIRST_CHANGE and creation not in context.ledger.creations:
            context.destination.check_empty()
            if creation is not None:
                context.ledger.add(creation)
                _mark(context, creation)
        context.recorder.nested(event)

    return report


def _mark(context: DrillContext, creation: Creation) -> None:
    """Leave the mark by which the next drill knows the rows as this one's. Without it, this drill can still remove them."""
    if creation.kind is not EntryKind.ROWS:
        return
    try:
        mark_rows(context.destination.cluster, context.id, creation)
    except EtcdError as error:
        context.recorder(
            Notice(
                f"if this drill is killed, the next one cannot remove its rows: no mark can be saved: {error.message}"
            )
        )


def restore_range(context: DrillContext) -> None:
    """Restore the deleted range into a cluster that has the rest. Raises `UsageError` if it has no key."""
    _start_recovery(context)
    span = context.options.span
    # A real incident happens in the cluster that was backed up, where rows get a new timestamp from the start.
    restored = _restore(context, span, Restamp.ALWAYS).total_kvs
    if not restored:
        raise UsageError(
            "the backup has no key between --start and --end: there was nothing to restore",
            hint="Pass a range with keys.",
        )
    start, end = format_key(span.start, "escaped") or "the first key", format_key(span.end, "escaped") or "the last"
    context.compared.append(
        Compared("deleted range and its restore", f"from {start} to {end}; by the restore", restored, 0)
    )


def verify_all(context: DrillContext) -> None:
    """Compare the target with the backup, which ends the recovery; then read the whole backup too."""
    found = (_compare_same_keys if context.destination.keyspace is None else _compare_renamed_keys)(context)
    context.measured = replace(
        context.measured, rto=round(context.recorder.now - context.restore_start, 3), keys=found.keys
    )
    context.compared.append(found)
    if not found.keys:
        log.warning("the backup of drill %s has no key, so its restore proves little", context.id)
    read = verify(VerifyOptions(context.location, Level.DATA, executor="driver"), context.recorder.nested)
    context.compared.append(
        Compared(
            "backup files and manifest",
            f"every byte of {counted(read.files_checked, 'file')} read again: SHA-256, block checksums, order and format of "
            "the rows, sums",
            read.rows_checked,
            read.bytes_read,
        )
    )


def _compare_same_keys(context: DrillContext) -> Compared:
    """Compare rows that have the keys of the backup. Raises `ChecksumMismatch`, `BackupDamaged`."""
    cluster = context.destination.cluster
    options = VerifyOptions(context.location, Level.RESTORE, cluster, by_name=False, executor="driver")
    found = verify(options, context.recorder.nested)
    how = (
        f"{counted(found.ranges_compared, 'range')} without gaps: keys, bytes and crc64 of all rows, counted by the target's "
        "stores, against what the backup recorded"
    )
    return Compared(TARGET_AND_BACKUP, how, found.rows_checked, 0)


def _compare_renamed_keys(context: DrillContext) -> Compared:
    """Compare rows that moved to another keyspace, which must hold nothing else. Raises as `_compare_same_keys`."""
    destination, backup = context.destination, context.backup
    parts = choose_parts(backup.pairs, destination.restore_ranges(backup))
    cluster = context.clusters.get(destination.cluster)
    prover = BackupComparison(cluster, backup.store, backup.api_version, expiry_recorded=backup.expiry_recorded)
    found = prover.require_all_equal(parts, THREADS)
    gaps = subtract(destination.ranges, [part.target for part in parts])
    for gap in gaps:
        if difference := prover.compare_empty(gap):
            raise ChecksumMismatch(difference)
    how = (
        f"{counted(len(parts) + len(gaps), 'range')} without gaps: keys, bytes and crc64 of all rows, counted by the target's "
        "stores, against the backup's files, read with the target's keys"
    )
    return Compared(TARGET_AND_BACKUP, how, found.total_kvs, sum(part.file.size for part in parts))


def _start_recovery(context: DrillContext) -> None:
    """Start the clock of the RTO, and compute the RPO if the source is lost."""
    context.restore_start = context.recorder.now
    entry = context.entry
    known = timestamps.physical_ms(entry.backup_ts) if entry.backup_ts else entry.started_ms
    if not known:  # a backup of the Go tool from a source without timestamps
        context.measured = replace(context.measured, rpo_method="The backup does not record when it was started.")
        return
    moment = "right after the backup was complete" if context.made_backup else "the start of the drill"
    text = (RPO_BY_TS if entry.backup_ts else RPO_BY_START).format(clock=context.lost_clock, moment=moment)
    context.measured = replace(context.measured, rpo=max(context.lost_ms - known, 0) / 1000, rpo_method=text)


def _restore(context: DrillContext, span: KeyRange = EVERY_KEY, restamp: Restamp = Restamp.AUTO) -> RestoreSummary:
    options = context.destination.restore_options(context.location, context.restore_state)
    return restore(structs.replace(options, span=span, restamp=restamp, allow_empty=True), ownership_reporter(context))
