"""What a drill came to: one document, as JSON in ``reports/<drill>.json`` of the drills' home and as a page beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tikv_br.drill.goals import Goal
from tikv_br.drill.history import REPORTS, Past, sealed
from tikv_br.drill.ledger import Creation
from tikv_br.report.facts import BackupFacts, Cell, Compared, Trouble, Verdict, plain
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class DrillReport:
    """All that there is to say of a drill."""

    id: str
    verdict: Verdict
    scenario: str
    target: str
    started_ms: int
    seconds: float
    tool_version: str
    goals: tuple[Goal, ...]
    backup: BackupFacts | None
    trouble: Trouble | None
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...]
    keyspace_map: tuple[Cell, ...]
    compared: tuple[Compared, ...]
    notices: tuple[str, ...]
    remains: tuple[Creation, ...]
    """What the drill made and could not remove; the next one tries again."""
    trend: tuple[Past, ...]
    """Earlier drills and this one, the oldest first."""

    def value(self, goal: str) -> float | None:
        """The figure beside an objective."""
        return next((each.value for each in self.goals if each.name == goal), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; keys of what was made are hex."""
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self), default=plain))}


def page_url(home: StorageLocation, drill: str) -> str:
    """Where the page of a drill's report lies; the JSON is beside it."""
    return home.child(f"{REPORTS}/{drill}.html").redacted()


def write_json(home: ObjectStore, report: DrillReport) -> None:
    """Keep it."""
    home.put(f"{REPORTS}/{report.id}.json", (json.dumps(sealed(report.to_json()), indent=1) + "\n").encode())
