"""Start of a sync, so that it misses no change between the state of the target and the first change of the feed.

A start-ts is safe if (1) the target has all writes up to it, (2) no write acknowledged from now on gets a lower timestamp,
and (3) GC removes no version after it. A backup-ts meets (1) and (2), and the backup's safe point has held GC back since.
Other timestamps of PD do not meet (2): stores cache timestamps, for 3 s by default, so a later write may get a lower one.
The sync's own safe point is registered first, then renewed, so that the start is protected at all times.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import keyspace_codec
from tikv_br.backupset.lease import LeaseOwner
from tikv_br.cancellation import TaskCancelled
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import EtcdConfig
from tikv_br.cluster.ingests import Follower
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.safepoint import BACKUP_SERVICES, SafePointKeeper, choose_backup_ts
from tikv_br.cluster.timestamps import minus_seconds, physical_ms, show_ts
from tikv_br.cluster.versions import FEED
from tikv_br.errors import ClusterUnfit, SafePointError, SyncRunning, SyncStateMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.cluster.pd import PdClient

log = logging.getLogger(__name__)

GC_TTL = 24 * 3600
"""Default TTL of the safe point in seconds: how long a sync may be down."""
MIN_TTL = 60
RENEW_SECONDS = 60.0
"""Interval at which the safe point in PD is advanced to the checkpoint."""
RENEWAL_SEEN_SECONDS = RENEW_SECONDS + 15
"""Time within which a safe point of a sync that runs is seen to be renewed."""
PROBE_SECONDS = 2.0
"""Interval of checks of PD's availability."""
CACHE_SECONDS = 5.0
"""Stores use cached timestamps, up to 3 s old by default: a start-ts must be at least this much further back."""
CACHE_MARGIN = 2.0
"""Added to the age that the settings of stores allow: renewals may be late."""
CHANGEFEED_STATE = "a changefeed of captures"
"""Name of the place of state of all changefeeds, which is the etcd of their captures."""
SHORT_WINDOW = 2 * CACHE_SECONDS
"""Scan window at the start of a log, in seconds, that is not worth a warning."""
BACKUP_PREFIXES = (BACKUP_SERVICES, "br-")
"""Prefixes of the safe points that backups of tikv-br and of the Go TiKV-BR hold at backup-ts - 1."""


@dataclass(frozen=True, slots=True)
class FromBackup:
    """Start after the backup that the target was restored from."""

    storage: StorageLocation


@dataclass(frozen=True, slots=True)
class FromTs:
    """Start after a timestamp of PD: all writes acknowledged since PD issued it, and some of the seconds before."""

    ts: int


@dataclass(frozen=True, slots=True)
class FromNow:
    """All writes acknowledged from now on, and some of the `safe_interval` before."""

    safe_interval: float = CACHE_SECONDS
    """Distance to now, in seconds."""
    ts: int = 0
    """The start if it is chosen already (`at_once`)."""


Start = FromBackup | FromTs | FromNow


def source_codec(cluster: Cluster, keyspace: str | int) -> KeyCodec:
    """The codec of a keyspace, given by id or name (``""`` = the default keyspace). Raises `UsageError`, `ClusterError`."""
    return keyspace_codec(cluster.api_version, chosen_keyspace(cluster, keyspace), "--keyspace")


def check_has_feed(cluster: Cluster, *, writes_log: bool) -> None:
    """Raise `ClusterUnfit` for a source without timestamps, or too old for change feeds."""
    if cluster.api_version is not ApiVersion.V2:
        raise ClusterUnfit(
            f"a change feed requires API V2; the source has API {cluster.api_version.label}, which has no timestamps",
            hint="Make full backups on a schedule instead: `tikv-br backup raw` in a crontab."
            if writes_log
            else "Use `tikv-br sync --mode diff`, which compares ranges in passes.",
        )
    cluster.require(FEED)


def resolve(start: Start, cluster: Cluster, *spans: KeyRange, writes_log: bool = False) -> int:
    """The start-ts for ranges of RPC keys; the sync copies changes with a higher ts, to a log archive or a cluster.

    Raises `ClusterUnfit` for a source without timestamps, `UsageError` for a backup of another cluster or range or an
    invalid ts, `BackupSetError`, `StorageError`, `ClusterError`.
    """
    check_has_feed(cluster, writes_log=writes_log)
    match start:
        case FromBackup():
            backup = BackupSet.open(open_store(start.storage))
            # No margin is needed: the backup made the stores drop their cached timestamps.
            return _checked_ts(backup_ts(backup, cluster.cluster_id, spans), cluster)
        case FromTs():
            return _lower_by_cache_age(_checked_ts(start.ts, cluster), cluster)
        case FromNow():
            return start.ts or choose_backup_ts(cluster, start.safe_interval)


def at_once(start: Start, cluster: Cluster) -> Start:
    """Choose what "now" is. Waits for a sink, or for a sync that may run, come later: writes beside them are to be copied."""
    return replace(start, ts=resolve(start, cluster)) if isinstance(start, FromNow) else start


def backup_ts(backup: BackupSet, cluster_id: int, spans: Iterable[KeyRange]) -> int:
    """The backup-ts of a backup of this cluster that covers all of these ranges. Raises `UsageError` for any other backup."""
    place = backup.store.location.redacted()
    if backup.cluster_id != cluster_id:
        raise UsageError(
            f"the backup at {place} is of cluster {backup.cluster_id}, but the source is cluster {cluster_id}",
            hint="Pass --pd of the cluster that was backed up, or a backup of this one.",
        )
    manifest = backup.manifest
    if not backup.backup_ts and manifest is None:
        raise UsageError(
            f"the backup at {place} does not contain its backup-ts: another tool made it and only logged the backup-ts",
            hint="Pass --from-backup-ts with the timestamp in its log.",
        )
    if not backup.backup_ts:
        label = "" if manifest is None else manifest.description.api_version.label
        raise UsageError(
            f"the backup at {place} has no backup-ts: its source has API {label}", hint="Pass --mode diff."
        )
    covered = backup.ranges if manifest is None else manifest.description.source_ranges
    missing = [gap for span in spans for gap in gaps(span, covered)]
    if missing:
        raise UsageError(
            f"the backup at {place} does not contain {missing[0]}: the sync would miss writes there before its backup-ts",
            hint="Sync the range and the keyspace of the backup; `tikv-br show` prints them.",
        )
    return backup.backup_ts


def warn_of_scan_window(log_id: str, start_ts: int, now_ts: int) -> None:
    """Warn that a new log starts with a scan window, unless that is short, with advice to avoid it."""
    seconds = (physical_ms(now_ts) - physical_ms(start_ts)) / 1000
    if seconds > SHORT_WINDOW:
        log.warning(
            "log %s: no time of its first %.0f s, from %s until now, can be restored exactly (a scan window), since stores send only "
            "the newest version of what changed before a log starts. To avoid it, start the log with --start-ts now, and take the "
            "backup two minutes later; or back up with --safe-interval 0s, and start the log at once",
            log_id,
            seconds,
            show_ts(start_ts),
        )


def service_id(changefeed_id: str) -> str:
    return f"tikv-br-sync-{changefeed_id}"


def state_name(state: EtcdConfig | StorageLocation) -> str:
    """Name of a place of state. It differs for each place: the name of a directory includes its machine."""
    if isinstance(state, EtcdConfig):
        return f"etcd://{','.join(sorted(state.endpoints))}"
    return state.redacted() + (f" on {socket.gethostname()}" if state.scheme == "local" else "")


def unsaid(why: str) -> None:
    """No one wants to know what a sync waits for."""


def check_runs_alone(
    cluster: Cluster,
    changefeed_id: str,
    state: str,
    stop: threading.Event,
    wait: Callable[[str], object] = unsaid,
    *,
    take_over: bool = False,
) -> bool:
    """Raise `SyncRunning` if a sync with this name runs: two would share one safe point, and one checkpoint or none.

    Returns False if `stop` was set. If the other sync was killed on another machine, this takes `RENEWAL_SEEN_SECONDS`. With
    `take_over` a sync with the same `state` does not matter: it ends at its next save. Changefeeds of captures share a state.
    """
    name = service_id(changefeed_id)
    other, first = cluster.ingests.follower(name), expiry(cluster, name)
    if other is None or other.is_gone or not first or (other.state == state and (take_over or other.owner is None)):
        return True
    process = "" if other.owner is None else f" ({other.owner})"
    running = SyncRunning(
        f"another sync with --id {changefeed_id} is running{process}, with its state at {other.state}: "
        f"two cannot share the safe point {name}",
        hint="Stop it first, or pass --take-over to end it and to continue from its checkpoint."
        if other.state == state
        else "Pass another --id, or stop the other sync first.",
    )
    if other.owner is not None and other.owner.is_alive and other.owner != LeaseOwner.this_process():
        raise running
    found = f"another sync with --id {changefeed_id} has its state at {other.state}{process}"
    try:
        if _runs(cluster, name, first, lambda: _stop(stop), found, wait):
            raise running
    except TaskCancelled:
        return False
    return True


def _stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise TaskCancelled


def _runs(
    cluster: Cluster, service: str, first: int, check: Callable[[], object], found: str, wait: Callable[[str], object]
) -> bool:
    """Whether its safe point, which expired at `first`, is renewed within `RENEWAL_SEEN_SECONDS`. `check` is called each second."""
    why = f"{found}: waiting up to {RENEWAL_SEEN_SECONDS:.0f} s to see whether it runs"
    log.warning("%s", why)
    wait(why)
    for _second in range(round(RENEWAL_SEEN_SECONDS)):
        check()
        time.sleep(1)
        if expiry(cluster, service) not in {0, first}:
            return True
    wait("")
    return False


def check_no_return(
    target: Cluster,
    source_id: int,
    ours: Follower,
    check: Callable[[], object],
    wait: Callable[[str], object] = unsaid,
) -> None:
    """Raise `SyncRunning` if a sync or changefeed copies the same rows back: each change would go round in a circle.

    Of one that may have been killed on another machine, this waits to see whether it runs; `check` may end that by an error.
    """
    if not ours.target:
        return
    for service, other in target.ingests.running().items():
        first = expiry(target, service)
        if not first or other.is_gone or not other.returns(ours, source_id):
            continue
        name = service.removeprefix(service_id(""))
        if other.owner is None or not other.owner.is_alive:
            found = f"the sync or changefeed {name} of the target copies the same rows back, or was killed"
            if not _runs(target, service, first, check, found, wait):
                continue
        raise SyncRunning(
            f"the sync or changefeed {name} copies the same rows from the target back to this source, so that both would copy each change in a circle",
            hint="Stop it first; only one direction may run. Or sync other ranges or keyspaces.",
        )


def check_none_returned(target: Cluster, source_id: int, changefeed_id: str, ours: Follower, *, resumes: bool) -> None:
    """Raise `SyncStateMismatch` if a sync has copied the same rows back since this one, which resumes, began; note that this one begins.

    Clients have used the target then, and this one would overwrite what they wrote by older rows. PD's etcd of the target orders
    both, so no clock counts.
    """
    if not ours.target:
        return
    service = service_id(changefeed_id)
    if resumes and (found := target.ingests.returned_since(service, source_id, ours)):
        other = found[0].removeprefix(service_id(""))
        raise SyncStateMismatch(
            f"cannot resume sync {changefeed_id}: since it last ran, {other} has copied rows from its target back to this source. "
            "Rows that clients have written to the target since would be overwritten by older ones",
            hint="Pass another --id and --start-ts now, once the target has no clients and `tikv-br diff` finds no difference.",
        )
    target.ingests.register_writer(service, source_id)


def expiry(cluster: Cluster, service: str) -> int:
    """When a safe point expires, in seconds since the epoch; 0 = it does not exist. Raises `ClusterError`."""
    found = (each.expires for each in gc_status(cluster.pd_http).services if each.service == service)
    return next((each for each in found if each > cluster.clock.now()), 0)


def protect(pd: PdClient, changefeed_id: str, ts: int, gc_ttl: int = GC_TTL) -> SafePointKeeper:
    """Keep GC from removing changes after a start-ts or checkpoint-ts; returns a started keeper.

    Raises `SafePointError` if GC has passed `ts`: then deletions after it may be lost.
    """
    keeper = SafePointKeeper(
        pd, service_id(changefeed_id), ts - 1, _ttl(gc_ttl), renew_every=RENEW_SECONDS, probe_every=PROBE_SECONDS
    )
    try:
        keeper.start()
    except SafePointError as error:
        raise SafePointError(
            f"cannot start or resume from {ts}: {error.message}",
            hint="GC may have removed deletions since then. Take a new backup with a --gc-ttl that lasts until the sync "
            "starts, restore it, and start from it. Or, with another --id: start from now, stop at once, repair the sink "
            "with `tikv-br diff --repair --repair-delete`, and start again.",
        ) from None
    return keeper


def leave(keeper: SafePointKeeper, gc_ttl: int) -> None:
    """Stop the keeper but keep the safe point for `gc_ttl`. Raises `SafePointError` if it is lost, `ClusterError`."""
    keeper.stop_with_ttl(_ttl(gc_ttl))


def _ttl(gc_ttl: int) -> int:
    return max(gc_ttl, MIN_TTL)  # PD removes a safe point with TTL 0


def _checked_ts(ts: int, cluster: Cluster) -> int:
    now = cluster.pd.tso()
    if not 0 < ts <= now:
        ahead = (physical_ms(ts) - physical_ms(now)) / 1000
        raise UsageError(
            f"start-ts {ts} is {ahead:.1f} s ahead of the cluster's time"
            if ts > now
            else f"start-ts {ts} is not a valid timestamp",
            hint="Pass a timestamp that this cluster's PD has issued, or --start-ts now.",
        )
    return ts


def _lower_by_cache_age(ts: int, cluster: Cluster) -> int:
    """A timestamp so much lower that no write acknowledged since has a lower one; earlier rows may come again.

    A store that has lost PD uses older ones all the same, so all stores drop what they have cached: no later write is below.

    If GC has passed that, a backup-ts is returned unchanged: the backup made the stores drop their cached timestamps, and PD
    still has its safe point. Raises `SafePointError` for any other timestamp then.
    """
    age = cluster.timestamp_age
    margin = max(CACHE_SECONDS, age + CACHE_MARGIN)
    lowered = max(minus_seconds(ts, margin), 1)
    gc, now = gc_status(cluster.pd_http), cluster.clock.now()
    passed = gc.refuses_below(now)
    if passed <= lowered - 1:
        cluster.flush_timestamps()
        return lowered
    backups = [each for each in gc.services if each.service.startswith(BACKUP_PREFIXES) and each.expires > now]
    if any(each.safe_point == ts - 1 for each in backups):
        return ts
    raise SafePointError(
        f"cannot start at --from-backup-ts {ts}: the GC safe point is {passed}, beyond {lowered}, which is {margin:g} s "
        f"before it. Stores use timestamps up to {age:g} s old, so a sync must start that much earlier, except at a backup-ts, and "
        f"no backup has a safe point at {ts - 1} in PD",
        hint="Pass --from-backup URL if the timestamp is the backup-ts of a backup of tikv-br. Otherwise take a new backup with a "
        "--gc-ttl that lasts until the sync starts, restore it, and start from it.",
    )
