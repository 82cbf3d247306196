"""What the steps of a drill find out for one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.drill.cleaning import COPIES, Cleaner
from tikv_br.drill.goals import Measured
from tikv_br.drill.landing import Landing
from tikv_br.drill.ledger import Creation, Kind, Ledger
from tikv_br.drill.options import DrillOptions
from tikv_br.report.facts import Compared
from tikv_br.report.recorder import Recorder
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.drill.cut_over import Rehearsal

T = TypeVar("T")


@dataclass
class DrillContext:
    """Filled from step to step."""

    options: DrillOptions
    id: str
    home: ObjectStore
    recorder: Recorder
    ledger: Ledger
    cleaner: Cleaner
    check: Callable[[], None] = lambda: None
    """Raises `LeaseLost` once it is known that another drill has taken this one's home."""
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    made_backup: str = ""
    """Path, below the backups' folder, of the backup that this drill made; ``""`` = none."""
    entry: IndexEntry | None = None
    """Of the backup that is rehearsed."""
    location: StorageLocation | None = None
    """Of the backup, or the copy of it, that is restored."""
    lost_ms: int = 0
    """When the source is taken to have been lost, in unix milliseconds."""
    lost_by: str = ""
    """Whose clock `lost_ms` is of."""
    backup: BackupSet | None = None
    landing: Landing | None = None
    """Where in the target the rows go."""
    target_creation: Creation | None = None
    """The target, as it stands in the ledger."""
    restore_began: float = 0.0
    """By the recorder."""
    damaged: str = ""
    """Name of the object that was damaged on purpose."""
    rehearsal: Rehearsal | None = None
    """The tail, where one was asked for."""
    measured: Measured = field(default_factory=Measured)
    compared: list[Compared] = field(default_factory=list)

    @property
    def now_ms(self) -> int:
        """Unix milliseconds, by this machine."""
        return time.time_ns() // 1_000_000

    @property
    def chosen(self) -> IndexEntry:
        """The backup, after the step that chooses it."""
        return _there(self.entry)

    @property
    def place(self) -> StorageLocation:
        """Where it lies, after that step."""
        return _there(self.location)

    @property
    def backup_set(self) -> BackupSet:
        """What it holds, after that step."""
        return _there(self.backup)

    @property
    def target(self) -> Landing:
        """Where its rows go, after the step that makes the target."""
        return _there(self.landing)

    @property
    def under_way(self) -> Rehearsal:
        """The tail, after the step that looks whether there can be one."""
        return _there(self.rehearsal)

    @property
    def folder(self) -> str:
        """The folder of the home for what this drill writes down for itself; it stands in the ledger."""
        self.ledger.note(Creation(Kind.COPY, f"{COPIES}/{self.id}"))
        return f"{COPIES}/{self.id}"

    @property
    def restore_state(self) -> StorageLocation:
        """Where a restore writes down how far it came: what the next drill restores must not go on from there."""
        return self.options.home.child(f"{self.folder}/restore")


def _there(value: T | None) -> T:
    if value is None:
        raise ValueError("a step was left out")
    return value
