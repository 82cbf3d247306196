"""Progress events of an operation: plain values for a `Reporter`, independent of how they are displayed."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class StepStarted(Struct, frozen=True):
    """Step ``number`` (from 1) of ``total`` begins."""

    name: str
    number: int
    total: int


class StepFinished(Struct, frozen=True):
    """A step succeeded after ``seconds``."""

    name: str
    number: int
    total: int
    seconds: float


class StepUndone(Struct, frozen=True):
    """A step was undone after a failure; ``problem`` is the error of the undo, if it failed."""

    name: str
    problem: str = ""


class TasksProgress(Struct, frozen=True):
    """Progress of a step's tasks; ``fraction`` is between 0 and 1 and never decreases."""

    tasks_done: int
    tasks_total: int
    bytes_done: int
    keys_done: int
    fraction: float
    seconds: float
    bytes_planned: int = 0
    """Approximate bytes of all tasks, such as the sizes of their regions; 0 = unknown."""


class Notice(Struct, frozen=True):
    """A message that is neither an error nor a result."""

    message: str
    warning: bool = False
    """True if --quiet shows it, too: the result may not be what was wanted."""


Event = StepStarted | StepFinished | StepUndone | TasksProgress | Notice
Reporter = Callable[[Event], None]


def silent(_event: Event) -> None:
    """Ignore the event."""
