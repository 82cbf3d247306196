"""From where a sync starts, so that nothing is missed between what the target has and what the feed tells.

A start-ts is good when (1) the target holds all writes up to it, (2) no write acknowledged from now on gets a smaller
one, and (3) GC removes no version after it. A backup's backup-ts has (1) and (2), and its safe point has held GC back since.
Our own safe point is registered before anything else is done, and then renewed: at no moment is the start unprotected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.api_version import ApiVersion
from tikv_br.backup.backup_ts import choose_backup_ts
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange, missing
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.safepoint import SafePointApi, SafePointKeeper
from tikv_br.cluster.timestamp import minus_seconds, physical_ms
from tikv_br.errors import ClusterUnfit, SafePointError, UsageError
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

GC_TTL = 24 * 3600
"""Seconds that the safe point stands after the last renewal, unless told otherwise: so long may a sync be down."""
SHORTEST_TTL = 60
RENEW_SECONDS = 60.0
"""How often PD learns of a newer checkpoint."""
CACHE_SECONDS = 5.0
"""Stores hand out timestamps up to 3 s old, as seen on running ones: a start-ts must lie further back than that."""


@dataclass(frozen=True, slots=True)
class FromBackup:
    """After a backup that the target was restored from."""

    storage: StorageLocation


@dataclass(frozen=True, slots=True)
class FromTs:
    """After a backup-ts that is known."""

    ts: int


@dataclass(frozen=True, slots=True)
class FromNow:
    """After all that has been acknowledged by now, give or take what a moment before comes twice."""

    safe_interval: float = CACHE_SECONDS
    """Seconds that the start lies behind."""


Start = FromBackup | FromTs | FromNow


def resolve(start: Start, cluster: Cluster, span: KeyRange) -> int:
    """The start-ts for a span of RPC keys; everything with a larger ts is to be fed.

    Raises `ClusterUnfit` for a source without timestamps, `UsageError` for a backup of something else or a ts that
    cannot serve, `BackupSetError`, `StorageError`, `ClusterError`.
    """
    if cluster.api_version is not ApiVersion.V2:
        raise ClusterUnfit(
            f"the source has API {cluster.api_version.label}, which keeps no timestamps: there is no change feed",
            hint="Say --mode diff, which compares ranges between passes.",
        )
    match start:
        case FromBackup():
            backup = BackupSet.open_any(open_store(start.storage))
            return _checked_ts(backup_ts(backup, cluster.cluster_id, span), cluster, 0)  # the backup made them catch up
        case FromTs():
            return _checked_ts(start.ts, cluster, CACHE_SECONDS)
        case FromNow():
            return choose_backup_ts(cluster, start.safe_interval)


def backup_ts(backup: BackupSet, cluster_id: int, span: KeyRange) -> int:
    """The backup-ts of a backup, once it is known to be of this cluster and of all of the span.

    Raises `UsageError` when it is not, or has none.
    """
    place = backup.store.location.redacted()
    if backup.cluster_id != cluster_id:
        raise UsageError(
            f"the backup at {place} is of cluster {backup.cluster_id}, the source is cluster {cluster_id}",
            hint="Give --pd of the cluster that was backed up, or the backup of this one.",
        )
    if not backup.backup_ts:
        raise UsageError(_why_no_ts(backup, place), hint=_instead_of_ts(backup))
    holes = missing(span, _source_ranges(backup))
    if holes:
        raise UsageError(
            f"the backup at {place} lacks {holes[0]}: what was written there before its backup-ts would be missed",
            hint="Sync the range and the keyspace of the backup: see `tikv-br show`.",
        )
    return backup.backup_ts


def service_id(changefeed_id: str) -> str:
    """The name under which PD holds the safe point of a sync."""
    return f"tikv-br-sync-{changefeed_id}"


def protect(pd: SafePointApi, changefeed_id: str, ts: int, gc_ttl: int = GC_TTL) -> SafePointKeeper:
    """Hold GC back from what follows a start-ts or a checkpoint-ts; the keeper is started.

    Raises `SafePointError` when GC has passed it: then deletions after `ts` may be gone for good.
    """
    keeper = SafePointKeeper(pd, service_id(changefeed_id), ts - 1, _ttl(gc_ttl), renew_every=RENEW_SECONDS)
    try:
        keeper.start()
    except SafePointError as error:
        raise SafePointError(
            f"cannot go on from {ts}: {error.message}",
            hint="Deletions since then may be forgotten. Take a new backup with a --gcttl that reaches until the sync "
            "starts, restore it, and start from that. Or, with another --id: start from now, end that at once, put the sink "
            "right with `tikv-br diff --repair --repair-delete`, and start it again.",
        ) from None
    return keeper


def leave(keeper: SafePointKeeper, gc_ttl: int) -> None:
    """Stop the keeper, and leave the safe point for whoever goes on. Raises `SafePointError` when it is lost, `ClusterError`."""
    keeper.leave_for(_ttl(gc_ttl))


def _ttl(gc_ttl: int) -> int:
    """To PD, a TTL of 0 is to forget the safe point."""
    return max(gc_ttl, SHORTEST_TTL)


def _checked_ts(ts: int, cluster: Cluster, margin: float) -> int:
    now = cluster.pd.tso()
    if not 0 < ts <= minus_seconds(now, margin):
        ahead = (physical_ms(ts) - physical_ms(now)) / 1000
        raise UsageError(
            f"start-ts {ts} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the cluster's time: writes to "
            f"come may have smaller timestamps, as stores hand them out up to 3 s late",
            hint=f"Take a ts at least {CACHE_SECONDS:g} s old, or --start-ts now, which makes the stores catch up.",
        )
    return ts


def _source_ranges(backup: BackupSet) -> Sequence[KeyRange]:
    return backup.ranges if backup.manifest is None else backup.manifest.description.source_ranges


def _why_no_ts(backup: BackupSet, place: str) -> str:
    if backup.manifest is None:
        return f"the backup at {place} does not tell its backup-ts: it is of another tool, which only logs it"
    return f"the backup at {place} has no backup-ts: its source has API {backup.manifest.description.api_version.label}"


def _instead_of_ts(backup: BackupSet) -> str:
    return "Say --from-backup-ts, with the ts of its log." if backup.manifest is None else "Say --mode diff."
