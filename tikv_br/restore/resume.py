"""The steps by which a restore goes on where the same command ended before, however that came."""

from __future__ import annotations

import time
from dataclasses import replace

from tikv_br.backupset import layout
from tikv_br.backupset.coverage import KeyRange, intersection, subtract
from tikv_br.errors import BackupDamaged, StorageDenied, StorageReadOnly
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.plan import without
from tikv_br.restore.record import Begun, RestoreRecord
from tikv_br.storage.open import open_store


def find_unfinished(context: RestoreContext) -> None:
    """See what an unfinished restore has done, and leave it out of what is to do."""
    context.record = context.record or record_of(context)
    context.todo = context.parts
    if context.options.resume:
        _read(context, context.record)
    if context.begun is None:
        return
    context.restamp_ts = context.begun.restamp_ts
    context.todo = without(context.parts, context.resumed)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(context.begun.started_ms / 1000))
    context.reporter(
        Notice(
            f"going on with the restore that began {began}: "
            f"{context.resumed_files} of {len(context.parts)} files are in"
        )
    )


def may_hold_rows(context: RestoreContext) -> list[KeyRange]:
    """Where keys of the target may stem from the unfinished restore: it found nothing there, and brought files to it."""
    if context.begun is None:
        return []
    spans = (intersection(part.target, span) for part in context.parts for span in context.begun.empty)
    return [span for span in spans if not span.is_empty]


def begin(context: RestoreContext) -> None:
    """Write down, before the first change, what was found; without a place to write to, the restore cannot be resumed."""
    if context.record is None:
        return
    found = [] if context.options.allow_overwrite else [each.target for each in context.wanted]
    try:
        if context.begun is None:
            started = time.time_ns() // 1_000_000
            context.begun = Begun(context.info.cluster_id, tuple(found), started, context.restamp_ts)
            context.record.begin(context.begun)
            return
        more = subtract(found, context.begun.empty)
        begun = replace(context.begun, empty=(*context.begun.empty, *more), restamp_ts=context.restamp_ts)
        if begun != context.begun:
            context.begun = begun
            context.record.extend(begun)
    except (StorageReadOnly, StorageDenied) as error:
        context.record = None
        context.reporter(
            Notice(f"this restore cannot be resumed, unless --state names a place to write to: {error.message}")
        )


def finish(context: RestoreContext) -> None:
    """The restore is complete: remove what was written down."""
    if context.record is not None and context.begun is not None:
        context.record.complete(context.begun, [each.span for each in context.wanted])


def _read(context: RestoreContext, record: RestoreRecord) -> None:
    try:
        context.begun = record.begun()
        context.resumed = record.restored(context.begun) if context.begun is not None else []
    except BackupDamaged as error:  # of the record, not of the backup
        hint = "Say --no-resume: the target must then be empty, or --allow-overwrite."
        raise BackupDamaged(error.message, hint=hint) from None


def record_of(context: RestoreContext) -> RestoreRecord:
    """Where this restore is written down."""
    store = context.backup.store
    if context.options.state is not None:  # what is written there names keys of the backup
        store = open_store(replace(context.options.state, crypter=store.location.crypter))
    meta = context.backup.store.get(layout.META)
    rewrites = sorted({(each.rewrite.old, each.rewrite.new) for each in context.wanted if each.rewrite.changes})
    return RestoreRecord.of(store, context.info.cluster_id, meta, rewrites)
