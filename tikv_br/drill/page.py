"""The page of a drill, and the index page of all drills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tikv_br.drill.history import REPORTS, PastDrill
from tikv_br.drill.report import DrillReport
from tikv_br.report import plot
from tikv_br.report.facts import (
    DrillVerdict,
)
from tikv_br.report.page import render, render_list
from tikv_br.storage.base import ObjectStore

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
RECOVERED = "The recovery worked."
NOT_RECOVERED = "The drill could not show that a recovery would work. Until this is fixed, do not rely on the backup."
SCENARIOS = {
    "lost-cluster": "The cluster is lost: the whole backup is restored into another one.",
    "deleted-range": "A range of keys was deleted: only this range is restored, into a cluster that has the rest.",
    "corrupt-backup": "A copy of the backup is damaged: verify and restore must detect it.",
    "stale-safe-point": "GC of the source has passed the backup: a sync from it must be refused.",
    "point-in-time": "Wrong rows were written: those of an earlier time are restored, from a backup and a log.",
}


def write_page(home: ObjectStore, report: DrillReport) -> None:
    home.put(f"{REPORTS}/{report.id}.html", render_report(report).encode())


def write_index(home: ObjectStore, drills: Sequence[PastDrill]) -> None:
    home.put(INDEX, render_index(drills).encode())


def render_report(report: DrillReport) -> str:
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
