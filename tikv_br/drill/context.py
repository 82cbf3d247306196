"""State that the steps of a drill share."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import IndexEntry
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.drill.ledger import COPIES, Cleaner, Creation, EntryKind, Ledger
from tikv_br.drill.objectives import Measured
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.report import ChosenPoint, DrillReport
from tikv_br.drill.targets import Destination
from tikv_br.report.facts import Compared
from tikv_br.report.recorder import Recorder
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.dataflow.read import MergeSources
    from tikv_br.drill.tail import Tail


@dataclass
class DrillContext:
    """Filled from step to step. Attributes without a default do not exist before the step that sets them."""

    options: DrillOptions
    id: str
    home: ObjectStore
    recorder: Recorder
    ledger: Ledger
    cleaner: Cleaner
    clusters: ClusterPool
    check_lease: Callable[[], None] = lambda: None
    """Raises `LeaseLost` once it is known that another drill has taken over the home."""
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    made_backup: str = ""
    """Path, below the backups' folder, of the backup that this drill made; ``""`` = none."""
    entry: IndexEntry = field(init=False)
    """The index entry of the selected backup."""
    backup: BackupSet = field(init=False)
    location: StorageLocation = field(init=False)
    """Location of the backup, or of its copy, that is restored."""
    lost_ms: int = 0
    """Time at which the source counts as lost, in Unix milliseconds."""
    lost_clock: str = ""
    """The clock that `lost_ms` was read from."""
    destination: Destination = field(init=False)
    target_creation: Creation | None = None
    """The target in the ledger."""
    restore_start: float = 0.0
    """Start of the restore, on the recorder's clock."""
    sources: MergeSources = field(init=False)
    """Backups and log to merge; only of `Scenario.POINT_IN_TIME`."""
    point: ChosenPoint = field(init=False)
    """Time that is restored; only of `Scenario.POINT_IN_TIME`."""
    restored: float = 0.0
    """End of the restore to that time, on the recorder's clock."""
    damaged: str = ""
    """Name of the object that was damaged on purpose."""
    follower: Tail = field(init=False)
    """Follower of the source, from the step that starts it; only with a tail."""
    tail: ExitStack = field(default_factory=ExitStack)
    """Closing it stops the tail."""
    measured: Measured = field(default_factory=Measured)
    compared: list[Compared] = field(default_factory=list)
    report: DrillReport = field(init=False)
    """Set before the steps that write the report."""

    @property
    def folder(self) -> str:
        """The folder of the home for copies and states of this drill. It is added to the ledger."""
        self.ledger.add(Creation(EntryKind.COPY, f"{COPIES}/{self.id}"))
        return f"{COPIES}/{self.id}"

    @property
    def restore_state(self) -> StorageLocation:
        """Location of the restore's state: each drill has its own, so that none resumes another's restore."""
        return self.options.home.child(f"{self.folder}/restore")
