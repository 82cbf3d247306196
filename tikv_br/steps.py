"""An operation is a list of steps: run in order, reported, timed, and undone in reverse when one fails.

The list reads as the runbook. Steps share what they find out through the context that the operation defines.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from tikv_br import signals
from tikv_br.errors import TikvBrError
from tikv_br.progress_events import Reporter, StepFinished, StepStarted, StepUndone, silent

logger = logging.getLogger(__name__)
Context_contra = TypeVar("Context_contra", contravariant=True)
C = TypeVar("C")


class Step(Protocol[Context_contra]):
    """One step of an operation."""

    @property
    def name(self) -> str:
        """Name of the step, in the imperative: "check the target"."""

    def run(self, context: Context_contra) -> None:
        """Do the step. Raises a `TikvBrError` if it fails."""

    def undo(self, context: Context_contra) -> bool:
        """Undo what `run` did, however far it got: also called if `run` failed halfway or before its first line.

        Returns whether this step can have had any effect; only those that can are reported.
        """


class FunctionStep(Struct, Generic[C], frozen=True):
    """A step made of functions: the action and, if it has lasting effects, its undo."""

    name: str
    action: Callable[[C], object]
    undo_action: Callable[[C], object] | None = None
    """Returns False if there was nothing to undo."""

    def run(self, context: C) -> None:
        """Call the action."""
        self.action(context)

    def undo(self, context: C) -> bool:
        """Call the undo action, if there is one."""
        return self.undo_action is not None and self.undo_action(context) is not False


def run_steps(
    steps: Sequence[Step[C]],
    context: C,
    reporter: Reporter = silent,
    undoing: Callable[[float | None], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> dict[str, float]:
    """Run ``steps`` in order and return the seconds of each by name.

    If one fails, it and all steps before it are undone in reverse order, inside ``undoing`` (which gets the time of the signal that
    ended the step, if one did; see `cancellation.clean_up`), and the failure is raised. An undo
    that fails is reported and added to the failure as a note; the other undos still run. SIGINT and SIGTERM raise `Interrupted`
    and `Terminated` in the current step (main thread only); during the undos they are ignored.
    """
    timings: dict[str, float] = {}
    with signals.raising() as received, contextlib.ExitStack() as after_undo, contextlib.ExitStack() as undo:
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
            received.ignore()
            after_undo.enter_context(undoing(received.came_at))
            raise
    return timings


class _Undo(Generic[C]):
    """Undoes one step when the stack unwinds.

    Expected errors are reported and added to the failure as notes; others propagate, and the stack still runs the other undos.
    """

    def __init__(self, step: Step[C], context: C, reporter: Reporter) -> None:
        self._step, self._context, self._reporter = step, context, reporter

    def __call__(self, _type: object, failure: BaseException | None, _traceback: object) -> bool:
        problem, undone = "", False
        try:
            undone = self._step.undo(self._context)
        except (TikvBrError, OSError) as error:
            problem, undone = str(error), True
            logger.warning("cannot undo step %r: %s", self._step.name, problem)
            if failure is not None:
                failure.add_note(f"cannot undo step {self._step.name!r}: {problem}")
        if undone:
            self._reporter(StepUndone(self._step.name, problem))
        return False
