"""The options of a drill."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tikv_br.archive.log import LogSource
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill.ledger import EntryKind, Remover
from tikv_br.drill.objectives import Objectives
from tikv_br.drill.targets import ClusterTarget, DrillTarget
from tikv_br.errors import UsageError
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.report.hooks import Hooks
from tikv_br.storage.url import StorageLocation


class Scenario(enum.StrEnum):
    """The incident that a drill rehearses."""

    LOST_CLUSTER = "lost-cluster"
    """The source is lost: the whole backup is restored, without the source."""
    DELETED_RANGE = "deleted-range"
    """A range of keys was deleted: it alone is restored, into a cluster that has the rest."""
    CORRUPT_BACKUP = "corrupt-backup"
    """A copy of the backup is damaged: the drill passes only if both `verify` and `restore` detect it."""
    STALE_SAFE_POINT = "stale-safe-point"
    """GC has passed the backup: the drill passes only if a sync from it is refused."""
    POINT_IN_TIME = "point-in-time"
    """Wrong rows were written: the rows of an earlier time are restored, from a backup and a log."""


@dataclass(frozen=True, slots=True)
class PointChoice:
    """The time that `Scenario.POINT_IN_TIME` restores."""

    log: LogSource
    ts: int | None = None
    """A timestamp, 0 = the last one possible; None = a random one."""
    seconds: float = 6 * 3600.0
    """A random time is at most so long before the last one possible."""
    compare_source: bool = False
    """Also compare the restored rows with the rows of the source."""


@dataclass(frozen=True, slots=True)
class TailOptions:
    """Options of replicating from the source after the restore. Times in seconds."""

    seconds: float
    """Duration before the cut-over."""
    lag: float = 10.0
    """The largest lag at which the cut-over starts."""
    patience: float = 300.0
    """Longest wait for that lag, and for each state of the cut-over."""
    scratch: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """A directory of this machine for what does not fit into memory; it is empty again at the end."""
    feed: FeedOptions = field(default_factory=FeedOptions)
    """Options of the change feed of a source of API V2."""
    interval: float = 5.0
    """Interval between the starts of comparing passes, with a source of API V1 or V1TTL."""


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """One drill."""

    backups: StorageLocation
    """The folder of the backups and their index."""
    home: StorageLocation
    """The folder for reports and the ledgers of what drills have made and not yet removed."""
    target: DrillTarget
    backup: BackupOptions | None = None
    """Options of a backup to make first; the drill sets its storage. None = an existing one is used."""
    existing: StorageLocation | None = None
    """The existing backup to use; None = the newest of the folder."""
    removers: Mapping[EntryKind, Remover] = field(default_factory=dict)
    """Removers of what drills to other kinds of targets left."""
    scenario: Scenario = Scenario.LOST_CLUSTER
    objectives: Objectives = field(default_factory=Objectives)
    span: KeyRange = EVERY_KEY
    """Range of user keys of `Scenario.DELETED_RANGE`."""
    seed: int | None = None
    """Selects the byte that `Scenario.CORRUPT_BACKUP` changes (None = 0), and the time of `Scenario.POINT_IN_TIME` (None = any)."""
    point: PointChoice | None = None
    """Log and choice of the time; only of `Scenario.POINT_IN_TIME`."""
    keep_last: int = 0
    """Number of drills to keep, with their reports and the backups they made; 0 = all."""
    source: ClusterConfig | None = None
    """The cluster that is, or was, backed up."""
    tail: TailOptions | None = None
    """None = the source is not followed."""
    hooks: Hooks = field(default_factory=Hooks)

    def check(self) -> None:
        """Raise `UsageError` for options that are invalid for any clusters."""
        if (self.span != EVERY_KEY) != (self.scenario is Scenario.DELETED_RANGE):
            raise UsageError("--scenario deleted-range needs --start or --end, and no other scenario takes them")
        limits = self.objectives
        recovers = self.scenario not in {Scenario.CORRUPT_BACKUP, Scenario.STALE_SAFE_POINT}
        if not recovers and (limits.rpo, limits.rto, limits.min_keys) != (None, None, None):
            raise UsageError(
                f"--scenario {self.scenario.value} restores nothing, so it cannot measure --rpo, --rto or --min-keys",
                hint="Use a config file of its own for drills of that scenario.",
            )
        if self.scenario is Scenario.STALE_SAFE_POINT and isinstance(self.target, ClusterTarget):
            raise UsageError(
                "--scenario stale-safe-point advances GC's safe point and runs on a playground only",
                hint="Omit --target-pd and --target-keyspace.",
            )
        self._check_point()
        self._check_tail()
        if self.existing is not None and self.backup is not None:
            raise UsageError("a drill uses an existing backup or makes one, not both")
        self.hooks.check()
        if self.keep_last < 0:
            raise UsageError("--keep-last cannot be negative")
        if self.backups.redacted() == self.home.redacted():
            raise UsageError("--reports and --storage must be different folders")

    def _check_point(self) -> None:
        if (self.scenario is Scenario.POINT_IN_TIME) != (self.point is not None):
            raise UsageError("--scenario point-in-time needs --log, and no other scenario takes it")
        if self.point is not None and self.backup is not None:
            raise UsageError(
                "--scenario point-in-time restores an existing backup: the log has no changes since one that is made now",
                hint="Pass --backup newest, or the URL of a backup.",
            )

    def _check_tail(self) -> None:
        if self.tail is None:
            if self.objectives.cut_over is not None:
                raise UsageError("--cut-over needs --tail, which measures it")
            return
        if self.source is None:
            raise UsageError("--tail needs --pd, the cluster to follow")
        if self.scenario is not Scenario.LOST_CLUSTER:
            raise UsageError("--tail needs --scenario lost-cluster")
