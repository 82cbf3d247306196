"""The report of a drill as a page, and the index of all drills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tikv_br.drill.history import REPORTS, Past
from tikv_br.drill.report import DrillReport
from tikv_br.report import plot
from tikv_br.report.facts import Verdict
from tikv_br.report.page import render, render_list
from tikv_br.storage.base import ObjectStore

PACKAGE = "tikv_br.drill"
INDEX = "index.html"
INTERRUPTED = "The drill was broken off, and says nothing about the backup."
OUTCOMES = {
    "corrupt-backup": (
        "The damage was found: verify named the file, and restore refused it before a store saw any.",
        "It was not proven that damage to a backup is found. Until this is mended, do not count on a copy that was only checked.",
    ),
    "stale-safe-point": (
        "A sync from a backup that GC has passed was refused, as it must be.",
        "It was not proven that a sync from a backup that GC has passed is refused.",
    ),
}
"""What it means that a drill has passed or failed, where that is not a recovery."""
NOTHING_THERE = "But the backup holds no key, so this proves little; with --min-keys such a drill misses its objective."
RECOVERED, NOT_RECOVERED = (
    "The recovery was rehearsed and worked.",
    "It was not proven that a recovery would work. Until this is mended, do not count on the backup.",
)
SCENARIOS = {
    "lost-cluster": "The cluster is lost: all of the backup is restored into another one.",
    "deleted-range": "A range of keys was deleted: it alone is restored, beside what is still there.",
    "corrupt-backup": "A copy of the backup is damaged: verify and restore must find it.",
    "stale-safe-point": "GC has passed the backup in the source: a sync from there must be refused.",
}


def write_page(home: ObjectStore, report: DrillReport) -> None:
    """Write the page of a drill, beside its JSON."""
    home.put(f"{REPORTS}/{report.id}.html", render_report(report).encode())


def write_index(home: ObjectStore, drills: Sequence[Past]) -> None:
    """Write the index anew; it links to the pages."""
    home.put(INDEX, render_index(drills).encode())


def render_report(report: DrillReport) -> str:
    """The page of one drill."""
    trend = [past for past in report.trend if past.scenario == report.scenario]
    return render(
        PACKAGE,
        "drill.html",
        report,
        remains=[
            f"Not removed: {each.kind.value} {each.place}; the next drill tries again." for each in report.remains
        ],
        sentence=_sentence(report),
        story=SCENARIOS.get(report.scenario, ""),
        trend=trend,
        trends=_trends(report, trend),
    )


def _sentence(report: DrillReport) -> str:
    """What the verdict means."""
    well, badly = OUTCOMES.get(report.scenario, (RECOVERED, NOT_RECOVERED))
    match report.verdict:
        case Verdict.PASSED:
            if report.value("keys") == 0:
                return f"{well} {NOTHING_THERE}"
            asked = [goal for goal in report.goals if goal.limit is not None]
            return f"{well} {'All that was asked of it was reached.' if asked else 'Nothing more was asked of it.'}"
        case Verdict.MISSED:
            missed = ", ".join(goal.name for goal in report.goals if not goal.met)
            return f"{well} But it missed what was asked of it: {missed}."
        case Verdict.INTERRUPTED:
            return INTERRUPTED
        case _:
            return badly


def render_index(drills: Sequence[Past]) -> str:
    """The page of all drills, the newest first."""
    newest_first = list(reversed(drills))
    passed = next((each for each in newest_first if each.verdict == Verdict.PASSED), None)
    return render_list(PACKAGE, "index.html", drills=newest_first, passed=passed)


def _trends(report: DrillReport, trend: Sequence[Past]) -> list[tuple[str, str, list[float | None], plot.Curve]]:
    """Name, unit, values and curve of each figure, a value for each drill of the trend."""
    limits = {goal.name: goal.limit for goal in report.goals}
    figures: tuple[tuple[str, str, float | None, Callable[[Past], float | None]], ...] = (
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
            found.append(
                (
                    name,
                    unit,
                    values,
                    plot.curve(places, values, limit, unit=unit, marks=places[:: len(places) - 1 or 1]),
                )
            )
    return found
