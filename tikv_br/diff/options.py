"""Options of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A keyspace of a cluster."""

    config: ClusterConfig
    keyspace: str | int = ""
    """Id or name; ``""`` = the default keyspace for A, that of A's name for B. A number is not looked up in PD."""


@dataclass(frozen=True, slots=True)
class BackupChoice:
    """A keyspace of a backup."""

    storage: StorageLocation
    keyspace: str = ""
    """Id or name; ``""`` = the backup's only keyspace."""


@dataclass(frozen=True, slots=True)
class DiffOptions(ExecutorOptions):
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

    @property
    def has_choice(self) -> bool:
        """Return whether a range or a keyspace was requested."""
        return bool(self.span != EVERY_KEY or self.a.keyspace != "" or self.b.keyspace != "")

    @property
    def where(self) -> ExecutorOptions:
        """Return the executor: this machine unless Spark was requested, because the stores do most of the work."""
        return self.choose("spark" if self.executor == "spark" else "driver", self.threads)
