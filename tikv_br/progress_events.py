"""What work tells about its progress: plain values, sent to whoever listens. Knows nothing of how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStarted:
    """Step ``number`` (from 1) of ``total`` begins."""

    name: str
    number: int
    total: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step ended well after ``seconds``."""

    name: str
    number: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepUndone:
    """A step's effects were taken back after a failure; ``problem`` says what of it did not work, if anything."""

    name: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TasksProgress:
    """Tasks so far: counts of tasks, bytes and keys, and a fraction between 0 and 1 that never falls."""

    tasks_done: int
    tasks_total: int
    bytes_done: int
    keys_done: int
    fraction: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth a line that is neither an error nor a result."""

    message: str


Event = StepStarted | StepFinished | StepUndone | TasksProgress | Notice
Reporter = Callable[[Event], None]


def silent(_event: Event) -> None:
    """Report to nobody."""
