"""Measures subjects side by side: in every round each runs once, in an order that turns, so that a machine's moods hit all.

Rates count user bytes (keys and values before any encoding) and seconds of processor time, all threads of the process
together: on a busy machine they say what wall time cannot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from bench.dataset import Data

T = TypeVar("T")
Work = Callable[[], float]
"""One run; returns what it took: seconds, or whatever else is measured."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of work to measure."""

    name: str
    rounds: int
    process_rounds: int
    """Rounds of benches in processes of their own, which take a second to start."""
    data_bytes: int
    """User bytes of one run, about."""
    regions: tuple[int, ...]
    """Numbers of regions of the planned clusters."""
    store_rows: int
    """Rows that stores back up and take back."""
    store_regions: int
    """Regions of 96 MiB, as far as stores and PD are concerned."""
    store_haste: int
    """Speed of the stores of `orchestration` relative to real ones."""
    spark_tasks: int
    lag_seconds: float
    """For which a sync's lag is measured."""
    hold_backs: tuple[float, ...]
    """Hold-backs of these syncs, in seconds."""
    backlog: int
    """Rows for which a sync is held up, to see how fast it catches up; 0 = it is not."""
    rate_shares: tuple[float, ...]
    """Parts of the target's ceiling at which `sync_growth` drives a sync."""
    data: Data = "half"
    """Kind of values in scans and SSTs."""


TINY = Scale("tiny", 1, 1, 200_000, (100,), 1_000, 8, 100, 20, 3.0, (0.0, 3.0), 1_000, (0.05,))
QUICK = Scale("quick", 3, 1, 8_000_000, (1_000, 10_000), 10_000, 107, 60, 20, 2.0, (0.0,), 0, (0.25, 0.5, 0.75))
FULL = Scale(
    "full",
    7,
    3,
    64_000_000,
    (1_000, 10_000, 100_000),
    1_000_000,
    107,
    1,
    1_000,
    60.0,
    (0.0, 3.0),
    200_000,
    (0.25, 0.5, 0.75, 1.0),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the median of a figure's runs (``value``) or of its ratios (``ratio``)."""

    of: Literal["value", "ratio"]
    at_least: float | None = None
    at_most: float | None = None

    def reached(self, median: float) -> bool:
        """Whether a median keeps within the bound."""
        low_enough = self.at_most is None or median <= self.at_most
        return low_enough and (self.at_least is None or median >= self.at_least)

    def __str__(self) -> str:
        unit = "x" if self.of == "ratio" else ""
        return f"≥ {self.at_least:g}{unit}" if self.at_least is not None else f"≤ {self.at_most:g}{unit}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of several runs. A ratio's are those of the rounds' ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of one subject in one case of a bench."""

    bench: str
    case: str
    subject: str
    unit: str
    value: Spread
    runs: int
    compared_with: str = ""
    """The subject, or in `bench.growth` the case, whose ratio to this one is `ratio`; ``""`` = none."""
    ratio: Spread | None = None
    """Speed of the other subject, divided by that of this one."""
    goal: Goal | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or no ratio for it."""
        spread = self.value if self.goal is None or self.goal.of == "value" else self.ratio
        return None if self.goal is None or spread is None else self.goal.reached(spread.median)

    def to_json(self) -> dict[str, Any]:
        """As docs/benchmarks.md describes it."""
        return asdict(self) | {"reached": self.reached}


Goals = Mapping[str, Goal]
"""By the subject they are for (a value) or against (a ratio)."""


def cpu_seconds(action: Callable[[], object]) -> Work:
    """A run of `action`, in seconds of this process's processor time, of all its threads."""

    def run() -> float:
        began = time.process_time()
        action()
        return time.process_time() - began

    return run


def paired(subjects: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measurements of each subject, by round. Each runs once before, uncounted; every other round is in reverse order."""
    taken: dict[str, list[T]] = {name: [] for name in subjects}
    for work in subjects.values():
        work()
    for number in range(rounds):
        for name in list(subjects)[:: -1 if number % 2 else 1]:
            taken[name].append(subjects[name]())
    return taken


def rates(
    bench: str,
    case: str,
    amount: float,
    unit: str,
    subjects: Mapping[str, Work],
    rounds: int,
    goals: Goals | None = None,
) -> Iterator[Figure]:
    """Compare the first subject with all others: a figure for each with its rate, amount a second; ratio = first / other.

    The runs return seconds. A goal for the first subject is one for its rate; for another, for the ratio.
    """
    goals = goals or {}
    taken = {name: [max(each, 1e-9) for each in took] for name, took in paired(subjects, rounds).items()}
    first, *others = taken
    yield Figure(bench, case, first, unit, _rate(amount, taken[first]), rounds, goal=goals.get(first))
    for other in others:
        ratios = [theirs / ours for ours, theirs in zip(taken[first], taken[other], strict=True)]
        yield Figure(
            bench, case, other, unit, _rate(amount, taken[other]), rounds, first, Spread.of(ratios), goals.get(other)
        )


def _rate(amount: float, seconds: list[float]) -> Spread:
    return Spread.of([amount / each for each in seconds])
