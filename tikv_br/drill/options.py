"""What a drill is asked to do."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tikv_br.backup.options import BackupOptions
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.cleaning import Remover
from tikv_br.drill.goals import Objectives
from tikv_br.drill.hooks import Hooks
from tikv_br.drill.ledger import Kind
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.drill.tail import TailOptions
from tikv_br.drill.target import Target
from tikv_br.errors import UsageError
from tikv_br.storage.url import StorageLocation, parse


class Scenario(enum.StrEnum):
    """What is taken to have happened."""

    LOST_CLUSTER = "lost-cluster"
    """The source is gone: all of the backup is restored, and the source is asked nothing any more."""
    DELETED_RANGE = "deleted-range"
    """A range of keys was deleted: it alone is restored, into a cluster that has all the rest."""
    CORRUPT_BACKUP = "corrupt-backup"
    """A copy of the backup is damaged: the drill passes only if both `verify` and `restore` find that."""
    STALE_SAFE_POINT = "stale-safe-point"
    """GC has passed the backup: the drill passes only if a sync from it is refused."""


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """One drill. Keys are user keys; an empty end is no end."""

    backups: StorageLocation
    """The folder that the backups lie in, with an index."""
    home: StorageLocation
    """Where drills keep their reports, and what they have made and not yet removed."""
    target: Target
    backup: BackupOptions | None = None
    """How to back up first: its storage is set by the drill. None = one that is there is rehearsed."""
    existing: StorageLocation | None = None
    """Which one; None = the newest of the folder."""
    locate: Callable[[str], StorageLocation] = parse
    """From the URL of a backup, without credentials, to its place."""
    removers: Mapping[Kind, Remover] = field(default_factory=dict)
    """How to remove what drills to any target have left."""
    scenario: Scenario = Scenario.LOST_CLUSTER
    objectives: Objectives = field(default_factory=Objectives)
    start: bytes = b""
    end: bytes = b""
    """The range of `Scenario.DELETED_RANGE`."""
    seed: int = 0
    """Which byte of which file `Scenario.CORRUPT_BACKUP` damages."""
    keep_last: int = 0
    """Drills whose reports, and the backups that they made, stay; 0 = all."""

    source: ClusterConfig | None = None
    """The cluster that is backed up, or was: what earlier drills have left there is removed, and a tail follows it."""
    tail: TailOptions | None = None
    """How the source is followed after the restore; None = it is not."""
    hooks: Hooks = field(default_factory=Hooks)

    def check(self) -> None:
        """Raise `UsageError` for what is wrong whatever the clusters are."""
        has_range = bool(self.start or self.end)
        if has_range != (self.scenario is Scenario.DELETED_RANGE):
            raise UsageError("--start and --end are the range of --scenario deleted-range, which needs one of them")
        asked = self.objectives
        recovers = self.scenario not in {Scenario.CORRUPT_BACKUP, Scenario.STALE_SAFE_POINT}
        if not recovers and (asked.rpo, asked.rto, asked.min_keys) != (None, None, None):
            raise UsageError(
                f"--rpo, --rto and --min-keys are measured by a restore: --scenario {self.scenario.value} has none",
                hint="Give the drills of that scenario a config file of their own.",
            )
        if self.scenario is Scenario.STALE_SAFE_POINT and isinstance(self.target, ClusterTarget):
            raise UsageError(
                "--scenario stale-safe-point moves GC's safe point, and is for the playground only",
                hint="Leave out --target-pd, --target-keyspace and --target-prefix.",
            )
        self._check_tail()
        if self.existing is not None and self.backup is not None:
            raise UsageError("a backup that is there is rehearsed, or one is made: not both")
        self.hooks.check()
        if self.keep_last < 0:
            raise UsageError("--keep-last cannot be negative")
        if self.backups.redacted() == self.home.redacted():
            raise UsageError("--reports must be another folder than that of the backups")

    def _check_tail(self) -> None:
        if self.tail is None:
            if self.objectives.cut_over is not None:
                raise UsageError("--cut-over is measured at the end of a --tail, and there is none")
            return
        if self.source is None:
            raise UsageError("--tail follows the cluster of --pd, and none is named")
        if self.scenario is not Scenario.LOST_CLUSTER:
            raise UsageError("--tail follows the source into a restored cluster: it belongs to --scenario lost-cluster")
