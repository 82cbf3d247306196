"""An operation is a list of steps: run in order, reported, timed, and undone in reverse when one fails.

The list reads as the runbook. A step is a small object with its dependencies given; what one step finds out for the next
lies in the context that the operation defines.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Generic, Protocol, TypeVar

from tikv_br.errors import Interrupted, Terminated, TikvBrError
from tikv_br.progress_events import Reporter, StepFinished, StepStarted, StepUndone, silent

logger = logging.getLogger(__name__)
Context_contra = TypeVar("Context_contra", contravariant=True)
C = TypeVar("C")


class Step(Protocol[Context_contra]):
    """One line of the runbook."""

    @property
    def name(self) -> str:
        """What the step does, as a short imperative: "check the target"."""

    def run(self, context: Context_contra) -> None:
        """Do it. Raises a `TikvBrError` when it cannot be done."""

    def undo(self, context: Context_contra) -> bool:
        """Take back what `run` did, however far it came: also called when `run` failed half-way or before its first line.

        Returns whether this step can have had any effect: the others are not worth a word.
        """


@dataclass(frozen=True, slots=True)
class Line(Generic[C]):
    """A step made of functions: what to do and, where that leaves something behind, how to take it back."""

    name: str
    action: Callable[[C], None]
    take_back: Callable[[C], None] | None = None

    def run(self, context: C) -> None:
        """Do it."""
        self.action(context)

    def undo(self, context: C) -> bool:
        """Take it back, if there is a way and a need."""
        if self.take_back is None:
            return False
        self.take_back(context)
        return True


def run_steps(steps: Sequence[Step[C]], context: C, reporter: Reporter = silent) -> dict[str, float]:
    """Run ``steps`` in order and return the seconds of each by name.

    When one fails, all that were begun are undone in reverse order and the failure is raised. SIGINT and SIGTERM raise
    `Interrupted` and `Terminated` in the step that runs (main thread only); while undoing they wait until it is done.
    An undo that fails is reported and noted on the failure, and the other undos still run.
    """
    timings: dict[str, float] = {}
    with _signals_raise() as signals, contextlib.ExitStack() as undo:
        try:
            for number, step in enumerate(steps, 1):
                undo.push(_Undo(step, context, reporter))
                reporter(StepStarted(step.name, number, len(steps)))
                begin = time.monotonic()
                step.run(context)
                timings[step.name] = time.monotonic() - begin
                reporter(StepFinished(step.name, number, len(steps), timings[step.name]))
            undo.pop_all()
        except BaseException:
            signals.defer()
            raise
    return timings


class _Undo(Generic[C]):
    """Undoes one step when the stack unwinds; what fails in that is reported and noted on the failure itself.

    Only errors that an undo can honestly meet are caught; a defect goes up, and the stack still runs the other undos.
    """

    def __init__(self, step: Step[C], context: C, reporter: Reporter) -> None:
        self._step, self._context, self._reporter = step, context, reporter

    def __call__(self, _type: object, failure: BaseException | None, _traceback: object) -> bool:
        problem, undone = "", False
        try:
            undone = self._step.undo(self._context)
        except (TikvBrError, OSError) as error:
            problem, undone = str(error), True
            logger.warning("step %r was not undone: %s", self._step.name, problem)
            if failure is not None:
                failure.add_note(f"step {self._step.name!r} was not undone: {problem}")
        if undone:
            self._reporter(StepUndone(self._step.name, problem))
        return False


class _Signals:
    """SIGINT and SIGTERM raise `Interrupted` and `Terminated`, until `defer`: from then on they are only logged."""

    def __init__(self) -> None:
        self._deferred = False

    def defer(self) -> None:
        self._deferred = True

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self._deferred:
            logger.warning("%s: still undoing what was begun", signal.Signals(number).name)
        elif number == signal.SIGINT:
            raise Interrupted("interrupted")
        else:
            raise Terminated("told to end (SIGTERM)")


@contextlib.contextmanager
def _signals_raise() -> Iterator[_Signals]:
    """Handle both signals for the length of the block; elsewhere than in the main thread, leave them alone."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    previous = {number: signal.signal(number, signals.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
