"""What the driver needs to plan a backup of many regions, or a restore into them: seconds and memory, against a PD of its own process.

"planning and commit" is all that the driver does in a backup, with tasks that another process ends at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from bench.harness import Figure, Goal, Scale, Spread
from tests.integration.scale.planned import planned

BENCH = "planning"
_GOAL_REGIONS, _GOAL_SECONDS, _GOAL_MIB = 100_000, 10, 500
_MOST_REGIONS = 1_000_000
"""In a full run, for plan and commit."""
_COMMIT_GOALS = {100_000: (10, 300), _MOST_REGIONS: (90, 1536)}
"""Seconds and MiB."""


def figures(scale: Scale) -> Iterator[Figure]:
    """CPU seconds and peak MiB of the process that plans, interpreter and packages included."""
    yield from _figures(BENCH, "plan_once", scale)
    yield from _figures("restore planning", "plan_restore_once", scale)
    yield from _commit_figures(scale)


def _figures(bench: str, program: str, scale: Scale) -> Iterator[Figure]:
    for regions in scale.regions:
        runs = [planned(regions, program) for _ in range(scale.process_rounds)]
        case, goal = f"{regions:,} regions", regions == _GOAL_REGIONS
        for subject, unit, name, most in (
            ("time", "CPU s", "cpu_seconds", _GOAL_SECONDS),
            ("peak memory", "MiB", "peak_mib", _GOAL_MIB),
        ):
            spread = Spread.of([float(run[name]) for run in runs])
            yield Figure(
                bench, case, subject, unit, spread, len(runs), goal=Goal("value", at_most=most) if goal else None
            )


def _commit_figures(scale: Scale) -> Iterator[Figure]:
    for regions in (scale.regions[-1], *((_MOST_REGIONS,) if scale.name == "full" else ())):
        with tempfile.TemporaryDirectory() as folder:
            run = planned(regions, "back_up_once", folder)
        goals = _COMMIT_GOALS.get(regions, (None, None))
        for subject, unit, name, most in (
            ("time", "CPU s", "cpu_seconds", goals[0]),
            ("peak memory", "MiB", "peak_mib", goals[1]),
        ):
            goal = None if most is None else Goal("value", at_most=most)
            yield Figure(
                "planning and commit",
                f"{regions:,} regions",
                subject,
                unit,
                Spread.of([float(run[name])]),
                1,
                goal=goal,
            )
