"""What a recovery has to reach, what was measured, and how: pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is asked of a recovery; None = nothing. Times in seconds."""

    rpo: float | None = None
    """How much of the last writes may be lost."""
    rto: float | None = None
    """How long it may take to have proven data back."""
    max_age: float | None = None
    """How old the backup may be."""
    min_keys: int | None = None
    """How many keys there must be afterwards."""
    cut_over: float | None = None
    """How long nobody may write, when clients move over to the target."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a drill found. Times in seconds; None = the drill did not come so far, or it cannot be told."""

    rpo: float | None = None
    rpo_method: str = ""
    rto: float | None = None
    age: float | None = None
    keys: int | None = None
    cut_over: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """One objective beside what was measured. ``unit`` is ``s`` or ``keys``."""

    name: str
    unit: str
    limit: float | None
    """None = nothing was asked for; the figure is only shown."""
    value: float | None
    """None = it was not measured, which misses a limit."""
    met: bool
    method: str
    """How it was measured, for who has to believe it."""


RTO_METHOD = (
    "By this machine's clock, from the first request of the restore until the last comparison of the target with the "
    "backup had ended well. The time to find people, machines and decisions is not in it."
)
AGE_METHOD = (
    "Between the backup's own note of when it was finished and the begin of the drill, by the clocks of both machines."
)
KEYS_METHOD = "Counted by the target's own stores after the restore; keys that had expired by then do not count."

CUT_OVER_METHOD = (
    "By this machine's clock, from the moment when writes were taken to stop until the target had all of them, had been "
    "compared with the source, and the tail had ended with its last checkpoint. The source's clients were not stopped."
)


def judge(asked: Objectives, found: Measured) -> tuple[Goal, ...]:
    """Each objective beside its figure."""
    cut_over: tuple[Goal, ...] = ()
    if (asked.cut_over, found.cut_over) != (None, None):
        cut_over = (_goal("cut-over", "s", asked.cut_over, found.cut_over, _at_most, CUT_OVER_METHOD),)
    return (
        _goal("RPO", "s", asked.rpo, found.rpo, _at_most, found.rpo_method),
        _goal("RTO", "s", asked.rto, found.rto, _at_most, RTO_METHOD),
        _goal("age of the backup", "s", asked.max_age, found.age, _at_most, AGE_METHOD),
        _goal("keys", "keys", asked.min_keys, found.keys, _at_least, KEYS_METHOD),
        *cut_over,
    )


def _goal(
    name: str,
    unit: str,
    limit: float | None,
    value: float | None,
    fits: Callable[[float, float], bool],
    method: str,
) -> Goal:
    met = limit is None or (value is not None and fits(value, limit))
    return Goal(name, unit, limit, value, met, method)


def _at_most(value: float, limit: float) -> bool:
    return value <= limit


def _at_least(value: float, limit: float) -> bool:
    return value >= limit
