"""What a verification is asked to do, and what it finds."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field

from tikv_br.cluster.config import ClusterConfig
from tikv_br.spark.executor import DRIVER_THREADS
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.subset import Subset


class Level(enum.StrEnum):
    """How deep to look. `FILES` includes `META`, `DATA` includes `FILES`; `RESTORE` is `META` and the cluster."""

    META = "meta"
    """The backup's records, and a listing: every object is there in its size."""
    FILES = "files"
    """Every byte of the files: they are the ones that were written."""
    DATA = "data"
    """Every row: blocks, order, form, and sums as recorded."""
    RESTORE = "restore"
    """A live cluster holds what the backup holds."""


class Executor(enum.StrEnum):
    """Where tasks run."""

    AUTO = "auto"
    """On this machine's threads, or on Spark where there is enough to read."""
    DRIVER = "driver"
    SPARK = "spark"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    object: str
    """Name of an object of the backup, or a range of the cluster."""
    cause: str
    level: Level
    """The level that promises to find it."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """One verification."""

    storage: StorageLocation
    level: Level = Level.FILES
    cluster: ClusterConfig | None = None
    """Needed for `Level.RESTORE`."""
    subset: Subset = field(default_factory=Subset)
    """Of the files, at the levels above `Level.META`."""
    seed: int = 0
    """Which files a subset takes."""
    executor: Executor = Executor.AUTO
    spark_master: str = "local[*]"
    concurrency: int | None = None
    """Files under way at once; None = as many as fit."""

    @property
    def threads(self) -> int:
        """Files under way at once on this machine: each takes some tens of MiB."""
        return self.concurrency or min(DRIVER_THREADS, 2 * (os.cpu_count() or 1))
