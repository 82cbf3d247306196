"""Objectives of a recovery, and what a drill measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits that a recovery must meet; None = no limit. Times in seconds."""

    rpo: float | None = None
    """Maximum loss of the last writes, in seconds."""
    rto: float | None = None
    """Maximum time until the data is restored and verified, in seconds."""
    max_age: float | None = None
    """Maximum age of the backup, in seconds."""
    min_keys: int | None = None
    """Minimum number of keys after the restore."""
    cut_over: float | None = None
    """Maximum time without writes while clients move to the target, in seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures that a drill measured. Times in seconds; None = not measured."""

    rpo: float | None = None
    rpo_method: str = ""
    rto: float | None = None
    rto_method: str = ""
    """Method of `rto`; ``""`` = `RTO_METHOD`."""
    age: float | None = None
    keys: int | None = None
    cut_over: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """One objective and the measured value. ``unit`` is ``s`` or ``keys``."""

    name: str
    unit: str
    limit: float | None
    """None = no limit; the value is only shown."""
    value: float | None
    """None = not measured, which misses a limit."""
    met: bool
    method: str
    """Method by which the value was measured."""


RTO_METHOD = (
    "By this machine's clock, from the first request of the restore until the target had been compared with the backup. "
    "The time to find people, machines and decisions is not included."
)
AGE_METHOD = (
    "From the end of the backup, as the backup records it, to the start of the drill, by the clocks of both machines."
)
KEYS_METHOD = "Counted by the target's stores after the restore, without expired keys."
CUT_OVER_METHOD = (
    "By this machine's clock, from the assumed end of writes until the target had all of them, had been compared with the "
    "source, and the sync had saved its last checkpoint. The source's clients were not stopped."
)


def judge(limits: Objectives, found: Measured) -> tuple[Goal, ...]:
    goals = [
        _maximum_goal("RPO", limits.rpo, found.rpo, found.rpo_method),
        _maximum_goal("RTO", limits.rto, found.rto, found.rto_method or RTO_METHOD),
        _maximum_goal("backup age", limits.max_age, found.age, AGE_METHOD),
    ]
    enough = limits.min_keys is None or (found.keys is not None and found.keys >= limits.min_keys)
    goals.append(Goal("keys", "keys", limits.min_keys, found.keys, enough, KEYS_METHOD))
    if (limits.cut_over, found.cut_over) != (None, None):
        goals.append(_maximum_goal("cut-over", limits.cut_over, found.cut_over, CUT_OVER_METHOD))
    return tuple(goals)


def _maximum_goal(name: str, limit: float | None, value: float | None, method: str) -> Goal:
    return Goal(name, "s", limit, value, limit is None or (value is not None and value <= limit), method)
