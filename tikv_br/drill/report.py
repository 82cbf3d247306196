"""The report of a drill: ``reports/<drill>.json`` and ``.html`` of the drills' home, and the index of all drills."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tikv_br.cluster.timestamps import show_ts
from tikv_br.drill.history import REPORTS, PastDrill, sealed
from tikv_br.drill.ledger import Creation
from tikv_br.drill.objectives import Goal
from tikv_br.report.facts import (
    BackupFacts,
    Cell,
    Compared,
    DrillVerdict,
    ReportedError,
    plain,
)
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ChosenPoint:
    """The time that a drill restores, for its report. Times are PD timestamps."""

    log: str
    """URL and id of the log."""
    restore_ts: int
    seed: int | None
    """Seed that chose the time; None = it was requested."""
    first_ts: int
    last_ts: int
    """The period that it was chosen from. The second is the last time that can be restored."""

    def __str__(self) -> str:
        period = f"{show_ts(self.first_ts, age=False)} to {show_ts(self.last_ts, age=False)}"
        how = "requested" if self.seed is None else f"chosen by seed {self.seed}"
        return (
            f"restores {show_ts(self.restore_ts, age=False)}, {how} from {period}, with the log {self.log}; to repeat it: --until "
            f"{self.restore_ts}"
        )


EMULATOR = "an embedded playground"
"""Beginning of `target` for a playground."""


def against(target: str) -> str:
    """What a title adds for a playground: such a drill proves nothing about real stores."""
    return " against an emulator" if target.startswith(EMULATOR) else ""


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The outcome of a drill."""

    id: str
    verdict: DrillVerdict
    scenario: str
    target: str
    started_ms: int
    seconds: float
    tool_version: str
    goals: tuple[Goal, ...]
    backup: BackupFacts | None
    trouble: ReportedError | None
    phases: tuple[Phase, ...] = ()
    samples: tuple[Sample, ...] = ()
    keyspace_map: tuple[Cell, ...] = ()
    compared: tuple[Compared, ...] = ()
    notices: tuple[str, ...] = ()
    remains: tuple[Creation, ...] = ()
    """Creations that the drill could not remove; the next drill tries again."""
    trend: tuple[PastDrill, ...] = ()
    """Earlier drills and this one, the oldest first."""
    point: ChosenPoint | None = None
    """The time that was restored; None for other scenarios, and if none was chosen."""
    source: str = ""
    """PD of the cluster that was backed up or followed; empty = none took part."""

    @property
    def headline(self) -> str:
        """What the verdict is about, for titles."""
        return f"Recovery drill{against(self.target)}"

    def value(self, goal: str) -> float | None:
        return next((each.value for each in self.goals if each.name == goal), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; keys are hex."""
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self), default=plain))}


def page_url(home: StorageLocation, drill: str) -> str:
    """Return the URL of a drill's page; the JSON report is beside it."""
    return home.child(f"{REPORTS}/{drill}.html").redacted()


def write_json(home: ObjectStore, report: DrillReport) -> None:
    home.put(f"{REPORTS}/{report.id}.json", (json.dumps(sealed(report.to_json()), indent=1) + "\n").encode())
