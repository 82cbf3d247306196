"""The report of a drill: ``reports/<drill>.json`` and ``.html`` of the drills' home, and its figures for the hooks that are notified of its end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tikv_br.cluster.timestamps import show_ts
from tikv_br.drill.history import REPORTS, PastDrill, sealed
from tikv_br.drill.ledger import Creation
from tikv_br.drill.objectives import Goal
from tikv_br.errors import ObjectivesMissed
from tikv_br.report.facts import BackupFacts, Cell, Compared, DrillVerdict, ReportedError, plain
from tikv_br.report.hooks import Hooks
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


METRIC = "tikv_br_drill"


def notify(hooks: Hooks, report: DrillReport, page: str) -> list[str]:
    """Run the hooks of a drill and return what failed. ``page`` is the URL of the report."""
    return hooks.run(
        asdict(summarize(report, page)),
        "TIKV_BR_DRILL_",
        lambda path: _write_metrics(path, report),
        succeeded=report.verdict is DrillVerdict.PASSED,
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a drill, for hooks and for ``drill run``. Times in seconds, sizes in bytes; None = not measured."""

    id: str
    verdict: str
    exit_code: int
    scenario: str
    started_ms: int
    seconds: float
    rpo: float | None
    rto: float | None
    cut_over: float | None
    keys: int | None
    """Counted after the restore."""
    restore_ts: int | None
    """The time that was restored; None = the drill's scenario has none, or it failed before."""
    data_bytes: int
    backup: str
    """URL of the backup; ``""`` = the drill failed before it had one."""
    missed: tuple[str, ...]
    """Names of the objectives that were missed."""
    message: str
    """Message of the failure; ``""`` = none."""
    page: str
    """URL of the report's page; the JSON is beside it. ``""`` = it could not be written."""


def summarize(report: DrillReport, page: str) -> Summary:
    """The figures of a report; ``page`` is the URL of its page."""
    backup, trouble, keys = report.backup, report.trouble, report.value("keys")
    return Summary(
        id=report.id,
        verdict=report.verdict.value,
        exit_code=_exit_code(report),
        scenario=report.scenario,
        started_ms=report.started_ms,
        seconds=report.seconds,
        rpo=report.value("RPO"),
        rto=report.value("RTO"),
        cut_over=report.value("cut-over"),
        keys=None if keys is None else int(keys),
        restore_ts=report.point.restore_ts if report.point else None,
        data_bytes=backup.data_bytes if backup else 0,
        backup=backup.place if backup else "",
        missed=tuple(goal.name for goal in report.goals if not goal.met),
        message=trouble.message if trouble else "",
        page=page,
    )


def _exit_code(report: DrillReport) -> int:
    if report.trouble is not None:
        return report.trouble.exit_code
    return ObjectivesMissed.exit_code if report.verdict is DrillVerdict.MISSED else 0


def _write_metrics(path: Path, report: DrillReport) -> None:
    from prometheus_client import CollectorRegistry, Gauge

    from tikv_br.web.metrics import write_textfile

    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"{METRIC}_{name}", text, ("scenario",), registry=registry).labels(report.scenario).set(value)

    gauge("success", "Whether the last drill passed.", float(report.verdict is DrillVerdict.PASSED))
    gauge("end_timestamp_seconds", "When the last drill ended.", report.started_ms / 1000 + report.seconds)
    gauge("duration_seconds", "How long the last drill took.", report.seconds)
    gauge("rpo_seconds", "Recovery point: how much of the last writes would have been lost.", report.value("RPO"))
    gauge("rto_seconds", "Recovery time: how long restore and verification took.", report.value("RTO"))
    gauge("cut_over_seconds", "How long clients could not have written during the cut-over.", report.value("cut-over"))
    gauge("keys", "Keys counted after the restore.", report.value("keys"))
    passed = [each for each in report.trend if each.verdict == DrillVerdict.PASSED and each.scenario == report.scenario]
    last_success = max((each.started_ms / 1000 + each.seconds for each in passed), default=None)
    gauge("last_success_timestamp_seconds", "When the last drill of the scenario that passed ended.", last_success)
    write_textfile(path, registry)
