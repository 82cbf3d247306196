"""backup-ts: the timestamp from which a tail can follow a backup without a hole, and its protection from GC.

1. ``now`` = a timestamp from PD's TSO. 2. Every store gives up its cached timestamps, which lag behind by up to seconds.
3. backup-ts = now - safe interval, on the physical part. 4. A service safe point at backup-ts - 1 keeps GC away before
the scan starts, is renewed while it runs, and is left for a while after it for the tail to take over.
"""

from __future__ import annotations

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.timestamp import minus_seconds
from tikv_br.errors import UsageError

SHORTEST_TTL = 60
"""Seconds that the safe point stands unrenewed while a backup runs, at least: a missed renewal must not lose it."""


def choose_backup_ts(cluster: Cluster, safe_interval: float) -> int:
    """Fetch a timestamp, flush every store, and step back ``safe_interval`` seconds.

    All writes acknowledged by now have a smaller ts than the one fetched; all later writes a larger one than the result.
    Raises `ClusterError`; `UsageError` for an interval that reaches before the epoch.
    """
    now = cluster.pd.tso()
    cluster.flush_timestamps()
    backup_ts = minus_seconds(now, safe_interval)
    if not backup_ts:
        raise UsageError(f"--safe-interval of {safe_interval:g} s reaches back before the epoch")
    return backup_ts


def keep_safe(cluster: Cluster, run_id: str, backup_ts: int, gc_ttl: int) -> SafePointKeeper:
    """A keeper, not yet started, of all that is newer than the versions that ``backup_ts`` sees."""
    return SafePointKeeper(cluster.pd, service_id(run_id), backup_ts - 1, max(gc_ttl, SHORTEST_TTL))


def service_id(run_id: str) -> str:
    """The name under which PD holds the safe point of a run."""
    return f"tikv-br-backup-{run_id}"
