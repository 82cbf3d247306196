"""Options of a comparison."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import DRIVER_THREADS, ExecutorChoice, ExecutorOptions
from tikv_br.tasks.settings import NO_SETTINGS, SparkSettings


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A keyspace of a cluster."""

    config: ClusterConfig
    keyspace: str = ""
    """Id or name; ``""`` = the default keyspace for A, the keyspace with A's id for B."""


@dataclass(frozen=True, slots=True)
class BackupChoice:
    """A keyspace of a backup."""

    storage: StorageLocation
    keyspace: str = ""
    """Id; ``""`` = the backup's only keyspace."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """Options of one comparison of A, the reference, with B."""

    a: ClusterChoice | BackupChoice
    b: ClusterChoice
    span: KeyRange = EVERY_KEY
    """Range of user keys."""
    keys: int = 20
    """Maximum number of different keys to list; all are counted."""
    allow_empty: bool = False
    """Accept that an explicit range or keyspace has no row on either side."""
    exact: bool = False
    """Compare all rows. Checksums miss identical changes in an even number of rows."""
    executor: ExecutorChoice = "auto"
    """``auto`` (here), ``driver`` or ``spark``."""
    spark_master: str = "local[*]"
    spark_settings: SparkSettings = NO_SETTINGS
    concurrency: int | None = None
    """Number of concurrent tasks; None = the executor's default."""

    @property
    def has_choice(self) -> bool:
        """Return whether a range or a keyspace was requested."""
        return bool(self.span != EVERY_KEY or self.a.keyspace or self.b.keyspace)

    @property
    def where(self) -> ExecutorOptions:
        """Return the executor: this machine unless Spark was requested, because the stores do most of the work."""
        if self.executor == "spark":
            return ExecutorOptions("spark", self.spark_master, self.concurrency, self.spark_settings)
        return ExecutorOptions("driver", concurrency=self.concurrency or min(DRIVER_THREADS, 2 * (os.cpu_count() or 1)))
