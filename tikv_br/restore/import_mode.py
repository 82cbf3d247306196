"""The steps that put the cluster into import mode, where that is asked for, and back: also after a kill.

Restores of one backup into one cluster, by different rewrites, may be at work at the same time. Each writes down that it wants
import mode, with all schedulers that any of them has paused; the last one puts everything back.
"""

from __future__ import annotations

from tikv_br.cluster.import_mode import ImportMode, running_movers
from tikv_br.errors import StorageDenied, StorageError, StorageReadOnly
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.record import Paused, RestoreRecord, paused_by, schedulers_of


def put_back(context: RestoreContext) -> None:
    """End the import mode that killed restores of this backup have left in this cluster, unless another one needs it."""
    record = context.record
    if record is None:
        return
    left = paused_by(record.store, context.info.cluster_id)
    if not left or _needed_by_others(record, left):
        return
    context.reporter(Notice("a killed restore has left import mode on, or schedulers paused: they are put back"))
    if ImportMode(context.cluster, schedulers_of(left)).leave():
        _forget(record, left, context.info.cluster_id)


def enter_import_mode(context: RestoreContext) -> None:
    """Write down what will be changed, then change it."""
    schedulers, record, cluster_id = set(running_movers(context.cluster)), context.record, context.info.cluster_id
    if record is not None:
        schedulers |= schedulers_of(paused_by(record.store, cluster_id))  # whoever ends last puts them back
        try:
            record.pause(cluster_id, Paused(tuple(sorted(schedulers))))
        except (StorageReadOnly, StorageDenied) as error:
            context.reporter(
                Notice(f"should this restore be killed, import mode ends by its own time only: {error.message}")
            )
    context.import_mode = ImportMode(context.cluster, schedulers)
    context.import_mode.enter()


def leave_import_mode(context: RestoreContext) -> None:
    """Put it back, unless another restore needs it; also when this one has failed."""
    mode, context.import_mode = context.import_mode, None
    if mode is None:
        return
    mode.stop()
    if not context.still_alone():
        return  # who restores now has ended it, and may have begun it again
    record, cluster_id = context.record, context.info.cluster_id
    if record is None:
        mode.leave()
        return
    try:
        left = _to_put_back(record, cluster_id)
    except StorageError:  # whoever else needs it renews it
        mode.leave()
        raise
    if left is not None and ImportMode(context.cluster, schedulers_of(left) | set(mode.schedulers)).leave():
        _forget(record, left, cluster_id)


def _to_put_back(record: RestoreRecord, cluster_id: int) -> dict[str, Paused] | None:
    """What restores have left, this one's too; None where another needs it, and this one has gone."""
    left = paused_by(record.store, cluster_id)
    if not _needed_by_others(record, left):
        return left
    record.resume(cluster_id)
    left = paused_by(record.store, cluster_id)  # of two that end at once the second to look finds nobody
    return None if _needed_by_others(record, left) else left


def _needed_by_others(record: RestoreRecord, left: dict[str, Paused]) -> bool:
    """Whether another restore that is at work wants import mode."""
    return any(RestoreRecord(record.store, each).is_at_work for each in left if each != record.id)


def _forget(record: RestoreRecord, left: dict[str, Paused], cluster_id: int) -> None:
    """What these restores have changed is put back."""
    for each in left:
        RestoreRecord(record.store, each).resume(cluster_id)
