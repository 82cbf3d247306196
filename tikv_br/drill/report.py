"""The report of a drill: ``reports/<drill>.json`` and ``.html`` of the drills' home, and the index of all drills."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from tikv_br import __version__
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.drill import backups
from tikv_br.drill.context import ChosenPoint, DrillContext
from tikv_br.drill.history import REPORTS, PastDrill, backup_path, past_drill_of, sealed
from tikv_br.drill.ledger import Creation, EntryKind, Ledger
from tikv_br.drill.objectives import Goal, Measured, Objectives, judge
from tikv_br.drill.options import DrillOptions
from tikv_br.errors import BackupNotFound
from tikv_br.redaction import redact
from tikv_br.report import plot
from tikv_br.report.facts import (
    BackupFacts,
    Cell,
    Compared,
    DrillVerdict,
    ReportedError,
    cells,
    plain,
    reported_error,
    verdict_of,
)
from tikv_br.report.page import render, render_list
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

SCHEMA_VERSION = 1
UNKNOWN = "unknown"
KILLED = 128 + signal.SIGKILL
"""The exit status that a shell reports for a killed process."""
KILLED_MESSAGE = "the drill was killed; this report is what the next drill found of it"
KILLED_HINT = "If nobody killed it, check for a reboot or the kernel's out-of-memory killer at that time."


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
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...]
    keyspace_map: tuple[Cell, ...]
    compared: tuple[Compared, ...]
    notices: tuple[str, ...]
    remains: tuple[Creation, ...]
    """Creations that the drill could not remove; the next drill tries again."""
    trend: tuple[PastDrill, ...]
    """Earlier drills and this one, the oldest first."""
    point: ChosenPoint | None = None
    """The time that was restored; None for other scenarios, and if none was chosen."""
    source: str = ""
    """PD of the cluster that was backed up or followed; empty = none took part."""

    def value(self, goal: str) -> float | None:
        """The measured value of an objective."""
        return next((each.value for each in self.goals if each.name == goal), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; keys are hex."""
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self), default=plain))}


def page_url(home: StorageLocation, drill: str) -> str:
    """Return the URL of a drill's page; the JSON report is beside it."""
    return home.child(f"{REPORTS}/{drill}.html").redacted()


def write_json(home: ObjectStore, report: DrillReport) -> None:
    """Save the JSON of a report."""
    home.put(f"{REPORTS}/{report.id}.json", (json.dumps(sealed(report.to_json()), indent=1) + "\n").encode())


def make_report(
    context: DrillContext, failure: BaseException | None, step: str, earlier: Sequence[PastDrill]
) -> DrillReport:
    """The report of a drill that has ended; ``step`` is the one that failed, ``earlier`` has the oldest drill first."""
    goals, recorder = judge(context.options.objectives, _without_rpo_of_failed(context.measured)), context.recorder
    backup: BackupSet | None = getattr(context, "backup", None)  # None: the drill failed before it had one
    facts = None
    if backup is not None:
        facts = _facts_of(context.entry, backup.store.location, made_by_drill=bool(context.made_backup))
    report = DrillReport(
        id=context.id,
        verdict=_verdict(failure, goals),
        scenario=context.options.scenario.value,
        target=context.options.target.name,
        started_ms=context.started_ms,
        seconds=round(recorder.now, 3),
        tool_version=__version__,
        goals=goals,
        backup=facts,
        trouble=None if failure is None else reported_error(failure, step),
        phases=tuple(sorted(recorder.phases, key=lambda each: (each.begin, each.inside))),
        samples=tuple(recorder.samples),
        keyspace_map=() if backup is None else cells(backup),
        compared=tuple(context.compared),
        notices=tuple(map(redact, recorder.notices)),
        remains=tuple(each for each in context.ledger.creations if each.kind is not EntryKind.MADE_BACKUP),
        trend=(),
        point=getattr(context, "point", None),
        source=",".join(_source_pd(context.options)),
    )
    return replace(report, trend=(*earlier, past_drill_of(report.to_json())))


def _source_pd(options: DrillOptions) -> tuple[str, ...]:
    source = options.source or (options.backup.cluster if options.backup is not None else None)
    return () if source is None else source.pd


def make_report_of_killed(context: DrillContext, killed: Ledger) -> DrillReport | None:
    """The report of a drill that was killed before it wrote one; None if it has one.

    Its complete backup is added to the index, so that retention removes it like any other.
    """
    if exists(context.home, f"{REPORTS}/{killed.drill}.json"):
        return None
    report = DrillReport(
        id=killed.drill,
        verdict=DrillVerdict.INTERRUPTED,
        scenario=UNKNOWN,
        target=UNKNOWN,
        started_ms=_started_ms(killed.drill),
        seconds=0.0,
        tool_version=__version__,
        goals=judge(Objectives(), Measured()),
        backup=_backup_of_killed(context, killed),
        trouble=ReportedError("Killed", KILLED, KILLED_MESSAGE, KILLED_HINT, ""),
        phases=(),
        samples=(),
        keyspace_map=(),
        compared=(),
        notices=(),
        remains=(),
        trend=(),
    )
    return replace(report, trend=(past_drill_of(report.to_json()),))


def _without_rpo_of_failed(found: Measured) -> Measured:
    """The RPO counts only if the rest was verified to be restored."""
    return found if found.rto is not None else replace(found, rpo=None, rpo_method="")


def _facts_of(entry: IndexEntry, place: StorageLocation, *, made_by_drill: bool) -> BackupFacts:
    return BackupFacts(
        id=entry.id,
        place=place.redacted(),
        made_by_drill=made_by_drill,
        cluster_id=entry.cluster_id,
        engine=entry.engine,
        api_version=entry.dst_api_version.label,
        backup_ts=entry.backup_ts,
        finished_ms=entry.finished_ms,
        keys=entry.total_kvs,
        data_bytes=entry.total_bytes,
        stored_bytes=entry.backup_size,
        files=entry.files,
    )


def _verdict(failure: BaseException | None, goals: tuple[Goal, ...]) -> DrillVerdict:
    verdict = verdict_of(failure)
    return DrillVerdict.MISSED if verdict is DrillVerdict.PASSED and not all(goal.met for goal in goals) else verdict


def _backup_of_killed(context: DrillContext, killed: Ledger) -> BackupFacts | None:
    """The backup that it completed."""
    place = context.options.backups.child(backup_path(killed.drill))
    made = {(each.kind, each.place) for each in killed.creations}
    if not made & {(EntryKind.BACKUP, place.redacted()), (EntryKind.MADE_BACKUP, place.redacted())}:
        return None
    try:
        found = BackupSet.open_any(open_store(place))
    except BackupNotFound:
        return None
    entry = backups.entry_at(place, found)
    index = Index(open_store(context.options.backups))
    if all(each.entry.id != entry.id for each in index.read()):
        index.add(entry)
    return _facts_of(entry, place, made_by_drill=True)


def _started_ms(drill: str) -> int:
    """Return the start according to the drill's id, in Unix milliseconds; 0 if the id has no time."""
    try:
        start = datetime.strptime(drill.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return int(start.timestamp() * 1000)


# -- pages ------------------------------------------------------------------------------------------------------

PACKAGE = "tikv_br.drill"
INDEX = "index.html"
INTERRUPTED = "The drill was interrupted. It says nothing about the backup."
OUTCOMES = {
    "corrupt-backup": (
        "The damage was detected: verify named the file, and restore refused it before it wrote to any store.",
        "The drill could not show that damage to a backup is detected. Until this is fixed, do not rely on checks of copies.",
    ),
    "stale-safe-point": (
        "A sync from a backup that GC has passed was refused, as required.",
        "The drill could not show that a sync from a backup that GC has passed is refused.",
    ),
}
"""Meaning of a pass and of a failure, by scenario without a recovery."""
EMPTY_BACKUP = "But the backup has no keys, so this proves little. With --min-keys such a drill misses its objective."
RECOVERED, NOT_RECOVERED = (
    "The recovery worked.",
    "The drill could not show that a recovery would work. Until this is fixed, do not rely on the backup.",
)
SCENARIOS = {
    "lost-cluster": "The cluster is lost: the whole backup is restored into another one.",
    "deleted-range": "A range of keys was deleted: only this range is restored, into a cluster that has the rest.",
    "corrupt-backup": "A copy of the backup is damaged: verify and restore must detect it.",
    "stale-safe-point": "GC of the source has passed the backup: a sync from it must be refused.",
    "point-in-time": "Wrong rows were written: those of an earlier time are restored, from a backup and a log.",
}


def write_page(home: ObjectStore, report: DrillReport) -> None:
    """Save the page of a drill, beside its JSON."""
    home.put(f"{REPORTS}/{report.id}.html", render_report(report).encode())


def write_index(home: ObjectStore, drills: Sequence[PastDrill]) -> None:
    """Save the index page, with links to the pages of all drills."""
    home.put(INDEX, render_index(drills).encode())


def render_report(report: DrillReport) -> str:
    """The page of one drill."""
    trend = [past for past in report.trend if past.scenario == report.scenario]
    return render(
        PACKAGE,
        "drill.html",
        report,
        remains=[
            f"Not removed: {each.kind.value} at {each.place}. The next drill tries again." for each in report.remains
        ],
        sentence=_sentence(report),
        story=SCENARIOS.get(report.scenario, ""),
        trend=trend,
        trends=_trends(report, trend),
    )


def _sentence(report: DrillReport) -> str:
    """Return the meaning of the verdict."""
    success, failure = OUTCOMES.get(report.scenario, (RECOVERED, NOT_RECOVERED))
    match report.verdict:
        case DrillVerdict.PASSED:
            if report.value("keys") == 0:
                return f"{success} {EMPTY_BACKUP}"
            limits = [goal for goal in report.goals if goal.limit is not None]
            return f"{success} {'All objectives were met.' if limits else 'No objectives were set.'}"
        case DrillVerdict.MISSED:
            missed = ", ".join(goal.name for goal in report.goals if not goal.met)
            return f"{success} But it missed objectives: {missed}."
        case DrillVerdict.INTERRUPTED:
            return INTERRUPTED
        case _:
            return failure


def render_index(drills: Sequence[PastDrill]) -> str:
    """The page of all drills, the newest first."""
    newest_first = list(reversed(drills))
    passed = next((each for each in newest_first if each.verdict == DrillVerdict.PASSED), None)
    return render_list(PACKAGE, "index.html", drills=newest_first, passed=passed)


def _trends(report: DrillReport, trend: Sequence[PastDrill]) -> list[tuple[str, str, list[float | None], plot.Curve]]:
    """Name, unit, values and curve of each figure, with one value per drill."""
    limits = {goal.name: goal.limit for goal in report.goals}
    figures: tuple[tuple[str, str, float | None, Callable[[PastDrill], float | None]], ...] = (
        ("RTO", "s", limits.get("RTO"), lambda past: past.rto),
        ("RPO", "s", limits.get("RPO"), lambda past: past.rpo),
        ("size", "B", None, lambda past: past.data_bytes or None),
        ("speed", "B/s", None, lambda past: past.speed),
    )
    places = [float(place) for place in range(len(trend))]
    found = []
    for name, unit, limit, value_of in figures:
        values = [value_of(past) for past in trend]
        if any(value is not None for value in values):
            curve = plot.curve(places, values, limit, unit=unit, marks=places[:: len(places) - 1 or 1])
            found.append((name, unit, values, curve))
    return found
