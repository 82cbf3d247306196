"""What the driver needs to plan a backup of many regions, or a restore into them: seconds and memory, against a PD of its own process."""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness import Figure, Goal, Scale, Spread
from tests.integration.scale.planned import planned

BENCH = "planning"
_GOAL_REGIONS, _GOAL_SECONDS, _GOAL_MIB = 100_000, 10, 500


def figures(scale: Scale) -> Iterator[Figure]:
    """CPU seconds and peak MiB of the process that plans, interpreter and packages included."""
    yield from _figures(BENCH, "plan_once", scale)
    yield from _figures("restore planning", "plan_restore_once", scale)


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
