"""The steps of the scenario that lets GC pass a backup: whoever then wants to follow the source from it must be refused."""

from __future__ import annotations

from tikv_br.cluster import safepoint
from tikv_br.cluster.shared import shared_cluster
from tikv_br.drill.context import DrillContext
from tikv_br.errors import HandOverNotRefused, SafePointError, UsageError
from tikv_br.report.facts import Compared

GC_WORKER = "gc_worker"
"""The name under which GC itself keeps its safe point."""
FOREVER = (1 << 63) - 1
HOLD_SECONDS = 60


def require_ts(context: DrillContext) -> None:
    """Refuse a backup without a timestamp: no sync begins at it. Raises `UsageError`."""
    if not context.chosen.backup_ts:
        raise UsageError(
            "--scenario stale-safe-point: the backup has no backup-ts, for its source has no timestamps",
            hint="Rehearse it with a backup of an API V2 cluster.",
        )


def hand_over_in_time(context: DrillContext) -> None:
    """See that backup-ts can be protected while GC is behind it: else a refusal later would prove nothing."""
    pd, service, ts = shared_cluster(context.target.cluster).pd, f"tikv-br-drill-{context.id}", context.chosen.backup_ts
    safepoint.protect(pd, service, ts, HOLD_SECONDS)
    safepoint.release(pd, service)


def let_gc_pass(context: DrillContext) -> None:
    """Move GC's own safe point past backup-ts, in the cluster that this drill has made."""
    pd = shared_cluster(context.target.cluster).pd
    pd.update_service_safe_point(GC_WORKER, FOREVER, pd.tso())


def hand_over_is_refused(context: DrillContext) -> None:
    """Raise `HandOverNotRefused` unless backup-ts cannot be protected any more."""
    pd, service, ts = shared_cluster(context.target.cluster).pd, f"tikv-br-drill-{context.id}", context.chosen.backup_ts
    try:
        safepoint.protect(pd, service, ts, HOLD_SECONDS)
    except SafePointError as error:
        context.compared.append(Compared("the hand-over to a sync, after GC", f"refused: {error.message}", 0, 0))
        return
    raise HandOverNotRefused(f"GC has passed {ts}, and a sync from there would still begin")
