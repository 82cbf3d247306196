"""What a comparison is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tikv_br.cluster.config import ClusterConfig
from tikv_br.spark.executor import DRIVER_THREADS, ExecutorKind, ExecutorOptions
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A keyspace of a cluster."""

    config: ClusterConfig
    keyspace: str = ""
    """Id or name; ``""`` = A: the default one; B: the one with A's id."""
    below: bytes = b""
    """A prefix of all its keys, which is not compared."""


@dataclass(frozen=True, slots=True)
class BackupChoice:
    """A keyspace of a backup."""

    storage: StorageLocation
    keyspace: str = ""
    """Id; ``""`` = the only one."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """One comparison of A, what should be, with B."""

    a: ClusterChoice | BackupChoice
    b: ClusterChoice
    start: bytes = b""
    """User keys [start, end), where an empty end is no end."""
    end: bytes = b""
    keys: int = 20
    """How many keys to name; all are counted."""
    exact: bool = False
    """Compare all rows: checksums do not show the same change in an even number of rows."""
    executor: str = "auto"
    """``auto`` (here), ``driver`` or ``spark``."""
    spark_master: str = "local[*]"
    concurrency: int | None = None
    """Tasks under way at once; None = as many as fit."""

    @property
    def where(self) -> ExecutorOptions:
        """Where tasks run: they steer stores, and read little; so here, unless Spark was asked for."""
        if self.executor == "spark":
            return ExecutorOptions("spark", self.spark_master, self.concurrency)
        kind: ExecutorKind = "driver"
        return ExecutorOptions(kind, concurrency=self.concurrency or min(DRIVER_THREADS, 2 * (os.cpu_count() or 1)))
