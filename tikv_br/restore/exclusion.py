"""One restore of a backup into a cluster by a rewrite at a time: a lease beside what is written down of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tikv_br.backupset import lease
from tikv_br.errors import LeaseHeld, StorageDenied, StorageError, StorageReadOnly
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.resume import record_of

log = logging.getLogger(__name__)
HELD = "Wait until the other restore has ended, or say --lock-wait; one that was killed on another machine counts for up to 40 s."


def exclude_others(context: RestoreContext) -> None:
    """Take the lease. Raises `LeaseHeld`; a storage that cannot be written is none to go on from, and no obstacle."""
    context.record = record_of(context)
    try:
        context.lease = lease.acquire(
            context.record.lease_store(),
            "restore",
            wait=context.options.lock_wait,
            on_wait=lambda holder: context.reporter(Notice(f"waiting for another restore of this backup: {holder}")),
        )
    except LeaseHeld as error:
        error.hint = HELD
        raise
    except (StorageReadOnly, StorageDenied):
        return  # that is told where the restore cannot write down its beginning
    except StorageError as error:
        context.reporter(
            Notice(f"another restore of this backup into this cluster would not be noticed: {error.message}")
        )


def let_others_in(context: RestoreContext) -> None:
    """Give the lease back; also when the restore has failed. What stays of it is an untidiness, not a failure: it runs out."""
    held, context.lease = context.lease, None
    if held is None:
        return
    try:
        if held.give_back() and context.record is not None and held.lost is None:
            context.record.sweep_lease()
    except StorageError as error:
        log.warning("an empty folder stays where the restore's lease was: %s", error.message)


def while_held(action: Callable[[RestoreContext], None]) -> Callable[[RestoreContext], None]:
    """Ask for the lease before what only its holder may do. Raises `LeaseLost`, `StorageError`."""

    def act(context: RestoreContext) -> None:
        if context.lease is not None:
            context.lease.confirm()
        action(context)

    return act
