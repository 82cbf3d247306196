"""Conditions for GC of a cluster with transactions: no other program does GC, and no lock is below the safe point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import LockReport, LockResolver
from tikv_br.cluster.pd_http import GcStatus, gc_status
from tikv_br.cluster.timestamps import minus_seconds, show_ts
from tikv_br.cluster.txnkv import has_transactions
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, EtcdUnreachable
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY

if TYPE_CHECKING:
    from tikv_br.cluster.etcd import Etcd

LOCK_PATIENCE = 20.0
"""Seconds to wait for transactions that are alive: the TTL that client-go gives to locks that it keeps alive."""
OTHER_GC_SECONDS = 24 * 3600.0
"""Age from which a safe point of another program counts as one of the past."""
TIDB_SERVERS = ("/tidb/server/info/", "/keyspaces/tidb/")
"""Keys in PD's etcd under which TiDB servers register, the second for servers of keyspaces; they end with their leases."""


def check_has_versions(cluster: Cluster, *, with_transactions: bool) -> None:
    """Raise `ClusterUnfit` for a cluster whose rows have no versions: raw rows have none before V2, transactional ones always."""
    version = cluster.api_version
    if version is ApiVersion.V2:
        cluster.require(versions.API_V2)
    elif version is ApiVersion.V1TTL or not with_transactions:
        hint = "If it has transactional data, which TiDB does not use, pass --resolve-locks. TiDB does GC itself."
        raise ClusterUnfit(
            f"the cluster has API {version.label}, whose raw keys have no old versions to remove",
            hint=hint
            if version is ApiVersion.V1
            else "It cannot have transactional data either: nothing is to be done.",
        )


def check_round(cluster: Cluster, *, resolves: bool) -> None:
    """Raise `ClusterUnfit` if GC of this cluster must not go on, by a worker that `resolves` locks or does not."""
    check_no_tidb(cluster.pd_etcd)
    if resolves:
        check_no_other_gc(gc_status(cluster.pd_http), cluster.pd.tso())
    else:
        check_has_no_transactions(cluster)


def check_has_no_transactions(cluster: Cluster) -> None:
    """Raise `ClusterUnfit` for a cluster of API V2 that also has transactional rows or locks."""
    if has_transactions(cluster):
        raise ClusterUnfit(
            "the cluster also has transactional data, whose locks this worker does not resolve: GC could break transactions",
            hint="Pass --resolve-locks, unless another program does GC (TiDB, or JuiceFS). Its safe point applies to raw data, too.",
        )


def check_no_tidb(etcd: Etcd) -> None:
    """Raise `ClusterUnfit` if TiDB uses the cluster, whose PD has this etcd; `ClusterUnreachable` if that does not answer."""
    try:
        keys = [item.key for prefix in TIDB_SERVERS for item in etcd.range(prefix).items]
    except EtcdUnreachable as error:
        raise ClusterUnreachable(f"PD's etcd: {error.message}") from None
    server = next((key for key in keys if TIDB_SERVERS[0] in key), None)
    if server is not None:
        raise ClusterUnfit(
            f"TiDB uses the cluster: it registered {server} in PD's etcd",
            hint="TiDB does GC itself, also of raw data. The cluster must not have another GC worker.",
        )


def check_no_other_gc(status: GcStatus, now: int) -> None:
    """Raise `ClusterUnfit` if another program moves the GC safe point: this one never moves it past ``gc_worker``."""
    if status.worker < status.safe_point and status.safe_point > minus_seconds(now, OTHER_GC_SECONDS):
        raise ClusterUnfit(
            f"another program does GC: it moved the GC safe point to {show_ts(status.safe_point)}",
            hint="JuiceFS does, for example. Leave GC to it; or turn it off there (gc-interval=0 in JuiceFS), and start this worker a day later.",
        )


def resolve_locks(cluster: Cluster, safe_point: int, sleep: Callable[[float], object]) -> LockReport:
    """Resolve all locks up to a safe point, of all keyspaces. For `sleep`, and what is raised, see `LockResolver`."""
    span = KeyMode.TXN.keys if cluster.api_version is ApiVersion.V2 else EVERY_KEY
    return LockResolver(cluster, sleep=sleep).resolve(span, safe_point, patience=LOCK_PATIENCE)
