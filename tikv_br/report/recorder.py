"""Records the steps and the throughput of an operation for its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from tikv_br.progress_events import (
    Event,
    Notice,
    Reporter,
    StepFinished,
    StepStarted,
    StepUndone,
    TasksProgress,
    silent,
)

MAX_SAMPLES = 400
"""Maximum number of throughput samples; when it is exceeded, every second one is dropped."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of the drill, or of an operation within one. Times in seconds since the start of the drill."""

    name: str
    inside: str
    """The drill's step that contains it; ``""`` = it is one itself."""
    begin: float
    seconds: float
    ended_well: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress of an operation."""

    seconds: float
    """Seconds since the start of the drill."""
    step: str
    """Step of the operation."""
    keys: int
    bytes: int


class Recorder:
    """A `Reporter` that forwards to another one, and numbers the steps of a drill consecutively."""

    def __init__(
        self, reporter: Reporter = silent, total: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``total``: number of steps, in one list or several; 0 = the events have it."""
        self.phases: list[Phase] = []
        self.samples: list[Sample] = []
        self.notices: list[str] = []
        self._reporter, self._total, self._clock = reporter, total, clock
        self._began = clock()
        self._open: list[tuple[str, float]] = []
        """The current step of the drill, and within it the step of an operation."""
        self._started = 0

    @property
    def now(self) -> float:
        return self._clock() - self._began

    @property
    def step(self) -> str:
        """The drill's current step, ``""`` = none."""
        return self._open[0][0] if self._open else ""

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted(name):
                self._started += 1
                self._open = [(name, self.now)]
                self._reporter(self._counted(event))
            case StepFinished():
                self._close(1, ended_well=True)
                self._reporter(self._counted(event))
            case _:
                self._record(event)

    def nested(self, event: Event) -> None:
        """Record an event of an operation within a step. Its steps are not forwarded."""
        match event:
            case StepStarted(name):
                self._open = [*self._open[:1], (name, self.now)]
            case StepFinished():
                self._close(2, ended_well=True)
            case _:
                self._record(event)

    def set_reporter(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def failed(self) -> None:
        while self._open:
            self._close(len(self._open), ended_well=False)

    def _counted(self, event: StepStarted | StepFinished) -> Event:
        return replace(event, number=self._started, total=self._total) if self._total else event

    def _close(self, depth: int, *, ended_well: bool) -> None:
        name, begin = self._open[depth - 1]
        inside = self._open[0][0] if depth > 1 else ""
        self.phases.append(Phase(name, inside, round(begin, 3), round(self.now - begin, 3), ended_well))
        del self._open[depth - 1 :]

    def _record(self, event: Event) -> None:
        match event:
            case TasksProgress():
                self.samples.append(Sample(round(self.now, 3), self.step, event.keys_done, event.bytes_done))
                if len(self.samples) > MAX_SAMPLES:
                    self.samples[:] = self.samples[:-1:2] + self.samples[-1:]
            case Notice(message):
                self.notices.append(message)
            case StepUndone(name, problem) if problem:
                self.notices.append(f"{name}: {problem}")
        self._reporter(event)
