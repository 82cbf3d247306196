"""Listens to a drill or another operation and keeps what its report shows: which step took how long, how fast keys and bytes came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
"""Of throughput; of a longer drill every second one is dropped, as often as needed."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of the drill, or of an operation within one. Times in seconds since the drill began."""

    name: str
    inside: str
    """The drill's step that it is a part of; ``""`` = it is one itself."""
    begin: float
    seconds: float
    ended_well: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """How far an operation was."""

    seconds: float
    """Since the drill began."""
    step: str
    """The drill's."""
    keys: int
    bytes: int


class Recorder:
    """A `Reporter` that passes on to another one, so that one drill counts its steps through."""

    def __init__(
        self, reporter: Reporter = silent, total: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``total`` steps are to come, in one list or several; 0 = they are counted by who runs them."""
        self.phases: list[Phase] = []
        self.samples: list[Sample] = []
        self.notices: list[str] = []
        self._reporter, self._total, self._clock = reporter, total, clock
        self._began = clock()
        self._open: list[tuple[str, float]] = []
        """The drill's step under way, and within it that of an operation."""
        self._started = 0

    @property
    def now(self) -> float:
        """Seconds since the drill began."""
        return self._clock() - self._began

    @property
    def step(self) -> str:
        """The drill's step under way, ``""`` = none."""
        return self._open[0][0] if self._open else ""

    def __call__(self, event: Event) -> None:
        """Note an event of the drill itself."""
        match event:
            case StepStarted(name):
                self._started += 1
                self._open = [(name, self.now)]
                self._reporter(self._counted(event))
            case StepFinished():
                self._close(1, ended_well=True)
                self._reporter(self._counted(event))
            case _:
                self._note(event)

    def inside(self, event: Event) -> None:
        """Note an event of an operation within a step; of its steps only the drill's own reporter is spared."""
        match event:
            case StepStarted(name):
                self._open = [*self._open[:1], (name, self.now)]
            case StepFinished():
                self._close(2, ended_well=True)
            case _:
                self._note(event)

    def pass_on_to(self, reporter: Reporter) -> None:
        """Pass on what comes now to another one."""
        self._reporter = reporter

    def failed(self) -> None:
        """Note that the steps under way failed."""
        while self._open:
            self._close(len(self._open), ended_well=False)

    def _counted(self, event: StepStarted | StepFinished) -> Event:
        return replace(event, number=self._started, total=self._total) if self._total else event

    def _close(self, depth: int, *, ended_well: bool) -> None:
        name, begin = self._open[depth - 1]
        inside = self._open[0][0] if depth > 1 else ""
        self.phases.append(Phase(name, inside, round(begin, 3), round(self.now - begin, 3), ended_well))
        del self._open[depth - 1 :]

    def _note(self, event: Event) -> None:
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
