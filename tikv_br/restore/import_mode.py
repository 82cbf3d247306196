"""The steps that put the cluster into import mode, where that is asked for, and back: also after a kill."""

from __future__ import annotations

from tikv_br.cluster.import_mode import ImportMode, running_movers
from tikv_br.errors import StorageDenied, StorageReadOnly
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.record import Paused


def put_back(context: RestoreContext) -> None:
    """End the import mode that a killed restore of this backup has left in this cluster."""
    left = context.record.paused(context.info.cluster_id) if context.record is not None else None
    if left is None:
        return
    context.reporter(Notice("a killed restore has left import mode on, or schedulers paused: they are put back"))
    _leave(context, ImportMode(context.cluster, left.schedulers))


def enter_import_mode(context: RestoreContext) -> None:
    """Write down what will be changed, then change it."""
    schedulers = running_movers(context.cluster)
    context.import_mode = ImportMode(context.cluster, schedulers)
    if context.record is not None:
        try:
            context.record.pause(context.info.cluster_id, Paused(tuple(schedulers)))
        except (StorageReadOnly, StorageDenied) as error:
            context.reporter(
                Notice(f"should this restore be killed, import mode ends by its own time only: {error.message}")
            )
    context.import_mode.enter()


def leave_import_mode(context: RestoreContext) -> None:
    """Put it back; also when the restore has failed."""
    mode, context.import_mode = context.import_mode, None
    if mode is not None:
        _leave(context, mode)


def _leave(context: RestoreContext, mode: ImportMode) -> None:
    if mode.leave() and context.record is not None:
        context.record.resume(context.info.cluster_id)
