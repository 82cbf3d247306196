"""Steps that resume an interrupted restore, clean up after it, and switch import mode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from tikv_br.backupset import layout
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.import_mode import DownloadLimit, ImportMode, active_balance_schedulers
from tikv_br.cluster.marks import Mark, Marks, new_secret
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import (
    BackupDamaged,
    ChecksumMismatch,
    ClusterError,
    EtcdError,
    EtcdRefused,
    ResumeRefused,
    StorageDenied,
    StorageError,
    StorageReadOnly,
)
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange, intersection, subtract
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.plan import remaining_parts
from tikv_br.restore.record import (
    ImportModeRecord,
    RestoreCheckpoint,
    RestoreRecord,
    import_mode_records,
    schedulers_of,
)
from tikv_br.resume_options import chosen, chosen_differences
from tikv_br.storage.open import open_store

log = logging.getLogger(__name__)
_START_OVER = "Pass --no-resume to start over; the target must be empty then, unless you also pass --allow-overwrite."


def find_resumable_restore(context: RestoreContext) -> None:
    """Look for an unfinished restore, and leave out what it has restored."""
    context.record = context.record or record_of(context)
    context.todo = context.parts
    if context.options.resume:
        _read_record(context, context.record)
    if context.checkpoint is None:
        return
    context.restamp_ts = context.checkpoint.restamp_ts
    context.todo = remaining_parts(context.parts, context.resumed)
    differences = chosen_differences(context.checkpoint.options, chosen(context.options))
    if differences and context.todo:
        raise ResumeRefused(
            f"cannot resume the unfinished restore of {context.backup.store.location}: "
            f"it was started with other options: {'; '.join(differences)}",
            hint=f"Pass the same options. {_START_OVER}",
        )
    began = show_time(context.checkpoint.started_ms)
    context.reporter(
        Notice(
            f"resuming the restore that began {began}: "
            f"{context.resumed_files} of {context.file_count} files are restored"
        )
    )


def may_hold_rows(context: RestoreContext) -> list[KeyRange]:
    """Ranges of the target whose rows may come from the unfinished restore: it found them empty."""
    if context.checkpoint is None:
        return []
    spans = (intersection(part.target, span) for part in context.parts for span in context.checkpoint.empty)
    return [span for span in spans if not span.is_empty]


def save_checkpoint(context: RestoreContext) -> None:
    """Save the checkpoint, before the first change of the target. On a read-only storage the restore cannot be resumed."""
    if context.record is None:
        return
    found = [] if context.options.allow_overwrite else [each.target for each in context.wanted]
    try:
        if context.checkpoint is None:
            started = time.time_ns() // 1_000_000
            context.checkpoint = RestoreCheckpoint(
                context.info.cluster_id,
                tuple(found),
                started,
                context.restamp_ts,
                options=chosen(context.options),
                secret=new_secret(),
            )
            context.record.create_checkpoint(context.checkpoint)
            _save_mark(context, context.record.id, context.checkpoint)
            return
        more = subtract(found, context.checkpoint.empty)
        checkpoint = structs.replace(
            context.checkpoint, empty=(*context.checkpoint.empty, *more), restamp_ts=context.restamp_ts
        )
        if checkpoint != context.checkpoint:
            context.checkpoint = checkpoint
            context.record.update_checkpoint(checkpoint)
            _save_mark(context, context.record.id, checkpoint)
    except (StorageReadOnly, StorageDenied) as error:
        context.record = None
        context.reporter(
            Notice(
                f"this restore cannot be resumed, because its state cannot be saved; pass a writable --state: {error.message}"
            )
        )


def forget_if_different(compare: Callable[[RestoreContext], None]) -> Callable[[RestoreContext], None]:
    """Wrap a comparison: if it fails, the next run restores all rows again. Otherwise it would find nothing to do, and fail the same way.

    Raw rows keep a timestamp that was chosen: newer writes of clients stay visible, and `ingest_hidden` deals with newer deletes.
    """

    def act(context: RestoreContext) -> None:
        try:
            compare(context)
        except ChecksumMismatch:
            if context.record is not None and context.checkpoint is not None:
                ts = context.checkpoint.restamp_ts if context.options.key_mode is KeyMode.RAW else 0
                context.checkpoint = structs.replace(context.checkpoint, restamp_ts=ts)
                try:
                    context.record.forget_parts(context.checkpoint)
                    _save_mark(context, context.record.id, context.checkpoint)
                except StorageError as error:
                    log.warning(
                        "cannot reset the restore's state, so that only --no-resume restores again: %s", error.message
                    )
            raise

    return act


def delete_checkpoint(context: RestoreContext) -> None:
    """Remove the checkpoint of a complete restore, then its mark in the target: without the mark it could not be resumed."""
    if context.record is None:
        return
    if context.checkpoint is not None:
        context.record.complete(context.checkpoint, [each.span for each in context.wanted])
    try:
        marks_of(context.cluster).remove(context.record.id)
    except EtcdError as error:  # it does nothing without the checkpoint
        log.warning("cannot remove the mark of the restore from etcd: %s", error.message)


def _read_record(context: RestoreContext, record: RestoreRecord) -> None:
    try:
        checkpoint = record.read_checkpoint()
        mark = None if checkpoint is None else _read_mark(context, record.id, checkpoint)
        if checkpoint is None or mark is None:
            return
        context.resumed = record.restored_ranges(checkpoint)
    except BackupDamaged as error:  # the record is damaged, not the backup
        raise BackupDamaged(error.message, hint=_START_OVER) from None
    empty = (intersection(mine, theirs) for mine in checkpoint.empty for theirs in mark.ranges)
    context.checkpoint = structs.replace(
        checkpoint, empty=tuple(span for span in empty if not span.is_empty), restamp_ts=mark.restamp_ts
    )


def marks_of(cluster: Cluster) -> Marks:
    """The marks of unfinished restores in a cluster."""
    return Marks(cluster.pd_etcd, cluster.cluster_id, "restore")


def _read_mark(context: RestoreContext, restore_id: str, checkpoint: RestoreCheckpoint) -> Mark | None:
    """The mark that the checkpoint's restore left in the target; None, with a notice, if there is none.

    Raises `EtcdUnreachable`: then it is unknown.
    """
    reason = "the cluster does not have its mark, so that anybody may have written the checkpoint"
    try:
        mark = marks_of(context.cluster).read(restore_id)
        if mark is not None and mark.matches(checkpoint.secret):
            return mark
    except EtcdRefused as error:
        reason = f"its mark cannot be read: {error.message}"
    again = (
        ""
        if context.options.allow_overwrite
        else "; pass --allow-overwrite if the target's rows are those of that restore"
    )
    context.reporter(
        Notice(f"the unfinished restore of {context.backup.store.location} is not resumed: {reason}{again}")
    )
    return None


def _save_mark(context: RestoreContext, restore_id: str, checkpoint: RestoreCheckpoint) -> None:
    """Leave the mark of the checkpoint in the target; a restore without one works, but is not resumed."""
    try:
        marks_of(context.cluster).save(restore_id, Mark(checkpoint.secret, checkpoint.empty, checkpoint.restamp_ts))
    except EtcdError as error:
        context.reporter(
            Notice(f"this restore cannot be resumed, because its mark in the cluster cannot be saved: {error.message}")
        )


def record_of(context: RestoreContext) -> RestoreRecord:
    """The record of this restore."""
    store = context.backup.store
    if context.options.state is not None:  # its objects contain keys of the backup
        store = open_store(replace(context.options.state, crypter=store.location.crypter))
    meta = context.backup.store.get(layout.META)
    rewrites = sorted({(each.rewrite.old, each.rewrite.new) for each in context.wanted if each.rewrite.changes})
    return RestoreRecord.of(store, context.info.cluster_id, meta, rewrites)


def clean_up_interrupted(context: RestoreContext) -> None:
    """End the import mode that interrupted restores of this backup have left on, unless a running one needs it.

    Also lifts a download limit that the unfinished restore may have left.
    """
    if context.checkpoint is not None:
        DownloadLimit(context.cluster, 0, "").start()
    record = context.record
    if record is None:
        return
    left = import_mode_records(record.store, context.info.cluster_id)
    if not left or _needed_by_others(record, left):
        return
    context.reporter(Notice("an interrupted restore has left import mode on or schedulers paused; they are reset"))
    try:
        ImportMode(context.cluster, schedulers_of(left)).leave()
    except ClusterError as error:
        context.reporter(Notice(error.message))
        return
    _remove_records(record, left, context.info.cluster_id)


def enter_import_mode(context: RestoreContext) -> None:
    """Record the changes to the cluster, then make them."""
    schedulers, record, cluster_id = (
        set(active_balance_schedulers(context.cluster)),
        context.record,
        context.info.cluster_id,
    )
    if record is not None:
        schedulers |= schedulers_of(
            import_mode_records(record.store, cluster_id)
        )  # the last restore to end resumes them
        try:
            record.add_import_mode(cluster_id, ImportModeRecord(tuple(sorted(schedulers))))
        except (StorageReadOnly, StorageDenied) as error:
            context.reporter(
                Notice(f"if this restore is killed, import mode only ends by its own timeout: {error.message}")
            )
    context.import_mode = ImportMode(context.cluster, schedulers)
    context.import_mode.enter()


def leave_import_mode(context: RestoreContext) -> bool:
    """Leave import mode, unless another restore needs it; also after a failure. Returns whether it was on."""
    mode, context.import_mode = context.import_mode, None
    if mode is None:
        return False
    mode.stop()
    if context.lease is not None and not context.lease.still_holds():
        return False  # the restore that has taken over decides on import mode
    record, cluster_id = context.record, context.info.cluster_id
    if record is None:
        mode.leave()
        return True
    try:
        left = _changes_to_undo(record, cluster_id)
    except StorageError:  # other restores renew it if they need it
        mode.leave()
        raise
    if left is None:
        return False
    ImportMode(context.cluster, schedulers_of(left) | set(mode.schedulers)).leave()
    _remove_records(record, left, cluster_id)
    return True


def _changes_to_undo(record: RestoreRecord, cluster_id: int) -> dict[str, ImportModeRecord] | None:
    """The changes to undo, of this and interrupted restores; None if another restore still needs them."""
    left = import_mode_records(record.store, cluster_id)
    if not _needed_by_others(record, left):
        return left
    record.remove_import_mode(cluster_id)
    left = import_mode_records(record.store, cluster_id)  # if two end at once, the second check finds no other
    return None if _needed_by_others(record, left) else left


def _needed_by_others(record: RestoreRecord, left: dict[str, ImportModeRecord]) -> bool:
    return any(RestoreRecord(record.store, each).is_running for each in left if each != record.id)


def _remove_records(record: RestoreRecord, left: dict[str, ImportModeRecord], cluster_id: int) -> None:
    for each in left:
        RestoreRecord(record.store, each).remove_import_mode(cluster_id)
