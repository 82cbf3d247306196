"""One connection a process: tasks of one run that land in the same worker share it."""

from __future__ import annotations

import functools

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig


@functools.lru_cache(maxsize=4)
def shared_cluster(config: ClusterConfig) -> Cluster:
    """The process's connection to a cluster, made at its first use. Raises as `Cluster.connect`. Never close it."""
    return Cluster.connect(config)
