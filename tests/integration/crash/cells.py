"""Cells of the matrix: where an operation is broken, and how."""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.integration.backup.data import when
from tests.support.live_cluster import LiveCluster
from tikv_br.cancellation import CLEAN_UP_SECONDS
from tikv_br.errors import (
    Failure,
    LeaseLost,
    RetryBudgetExhausted,
    SafePointError,
    StorageUnreachable,
    Terminated,
)
from tikv_br.progress_events import Reporter, StepFinished, StepStarted

FULL = "TIKV_BR_CRASH_MATRIX"
"""Environment variable: every cell in every variant of the operation."""
Operation = Callable[[Reporter], object]


class Kind(enum.StrEnum):
    """Ways to break an operation."""

    EXCEPTION = "exception"
    SIGTERM = "sigterm"
    SIGKILL = "sigkill"
    LOST_LEASE = "lost lease"
    PD_GONE = "PD gone"
    """For good. Only where it is asked for: see `without_pd`."""


CODES = {
    Kind.EXCEPTION: StorageUnreachable.exit_code,
    Kind.SIGTERM: Terminated.exit_code,
    Kind.SIGKILL: -signal.SIGKILL,
    Kind.LOST_LEASE: LeaseLost.exit_code,
}
"""With which a process ends that is broken so."""


class When(enum.StrEnum):
    """On which side of a step."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class Cell:
    """One field of the matrix."""

    when: When
    step: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} {self.when} {self.step}".replace(" ", "-")

    def reporter(self, act: Callable[[], object]) -> Reporter:
        """Reporter that acts at the boundary and nowhere else."""
        return when(StepStarted if self.when is When.BEFORE else StepFinished, self.step, act)


def cells(steps: Sequence[Any], *kinds: Kind) -> list[Cell]:
    """Every boundary of the steps, in every kind.

    After a step is before the next one; only what is undone differs, and that only where the operation itself goes on.
    """
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    wanted = kinds or tuple(CODES)
    return [
        Cell(side, name, kind)
        for name in names
        for side in When
        for kind in wanted
        if side is When.BEFORE or name == names[-1] or kind is Kind.EXCEPTION
    ]


def ending(operation: Operation, reporter: Reporter) -> int:
    """The exit code that the command would have."""
    try:
        operation(reporter)
    except Failure as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        return error.exit_code
    return 0


PD_BUDGET = 6.0
"""Seconds for which calls to a PD that is gone are repeated, in all."""
NO_PD: dict[str, Any] = {"abort": {"code": "UNAVAILABLE", "details": "gone"}}
AT_ONCE = frozenset({0, RetryBudgetExhausted.exit_code, SafePointError.exit_code})
"""Exit codes without PD: it was not needed, for the work, or only to keep the safe point of a backup."""


def without_pd(steps: Sequence[Any], *names: str) -> list[Cell]:
    """PD is gone for good before these steps; with `FULL` set, before all."""
    found = [cell for cell in cells(steps, Kind.PD_GONE) if cell.when is When.BEFORE]
    return [cell for cell in found if cell.step in names or os.environ.get(FULL)]


def end_without_pd(operation: Operation, cell: Cell, live: LiveCluster) -> None:
    """Run an operation whose PD is gone from a step on: it ends within one budget and a clean-up. Afterwards PD is there."""
    went: list[float] = []

    def go() -> None:
        live.fail("*", NO_PD, store_id=0, count=-1)
        went.append(time.monotonic())

    try:
        code = ending(operation, cell.reporter(go))
        seconds = time.monotonic() - went[0]
    finally:
        live.disarm()
    assert code in AT_ONCE
    assert seconds < PD_BUDGET + CLEAN_UP_SECONDS + 1, f"it took {seconds:.1f} s"


def fail() -> None:
    """Raise what is no defect."""
    raise StorageUnreachable("broken on purpose")


def signal_here(number: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def end_by_itself(operation: Operation, cell: Cell) -> int:
    """Break an operation in the process that it runs in: for a fork."""
    number = signal.SIGKILL if cell.kind is Kind.SIGKILL else signal.SIGTERM
    return ending(operation, cell.reporter(lambda: signal_here(number)))


def some(found: Sequence[Cell], each: int = 1, offset: int = 0) -> list[Cell]:
    """So many cells of each step, in another kind from step to step; with `FULL` set, all."""
    if os.environ.get(FULL):
        return list(found)
    chosen: list[Cell] = []
    for number, step in enumerate(dict.fromkeys(cell.step for cell in found)):
        mine = [cell for cell in found if cell.step == step]
        chosen += [mine[(number + offset + 2 * nth) % len(mine)] for nth in range(each)]
    return chosen


def in_turn(found: Sequence[Cell], variants: Sequence[str]) -> list[tuple[Cell, str]]:
    """Each cell with one of the variants, in turn; with `FULL` set, with all."""
    if os.environ.get(FULL):
        return [(cell, variant) for cell in found for variant in variants]
    return [(cell, variants[number % len(variants)]) for number, cell in enumerate(found)]
