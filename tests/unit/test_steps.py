"""Steps: order, timings, undoing, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field

import pytest

from tikv_br.errors import Interrupted, StorageFull, Terminated, TikvBrError
from tikv_br.progress_events import Event, StepFinished, StepStarted, StepUndone
from tikv_br.steps import FunctionStep, Step, run_steps


@dataclass
class Recorder:
    """A step that writes down what happens to it; ``fails`` and ``fails_undo`` are raised, ``signals`` sent to itself."""

    name: str
    fails: BaseException | None = None
    fails_undo: BaseException | None = None
    signal_in_run: int | None = None
    signal_in_undo: int | None = None

    def run(self, context: list[str]) -> None:
        """Write ``+name``."""
        context.append(f"+{self.name}")
        if self.signal_in_run is not None:
            os.kill(os.getpid(), self.signal_in_run)
        if self.fails is not None:
            raise self.fails

    def undo(self, context: list[str]) -> bool:
        """Write ``-name``."""
        if self.signal_in_undo is not None:
            os.kill(os.getpid(), self.signal_in_undo)
        context.append(f"-{self.name}")
        if self.fails_undo is not None:
            raise self.fails_undo
        return True


@dataclass
class Events:
    """Collects events."""

    seen: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Take one."""
        self.seen.append(event)


def test_steps_run_in_order_and_are_timed() -> None:
    """All run once, none is undone, each is announced as n of all and has its seconds."""
    log: list[str] = []
    events = Events()
    timings = run_steps([Recorder("plan"), Recorder("scan")], log, events)
    assert log == ["+plan", "+scan"]
    assert list(timings) == ["plan", "scan"]
    assert all(seconds >= 0 for seconds in timings.values())
    assert events.seen[0] == StepStarted("plan", 1, 2)
    finished = events.seen[-1]
    assert isinstance(finished, StepFinished)
    assert (finished.name, finished.number, finished.total) == ("scan", 2, 2)


def test_failure_undoes_what_was_begun_in_reverse() -> None:
    """The failing step and those before it are undone, later ones never touched, and the failure itself is raised."""
    log: list[str] = []
    events = Events()
    with pytest.raises(StorageFull, match="full"):
        run_steps([Recorder("a"), Recorder("b", fails=StorageFull("full")), Recorder("c")], log, events)
    assert log == ["+a", "+b", "-b", "-a"]
    assert events.seen[-2:] == [StepUndone("b"), StepUndone("a")]


def test_failing_undo_is_noted_and_the_others_still_run() -> None:
    """An undo that fails neither hides the failure nor keeps earlier steps from being undone."""
    log: list[str] = []
    events = Events()
    steps = [Recorder("a"), Recorder("b", fails_undo=OSError("stuck")), Recorder("c", fails=StorageFull("full"))]
    with pytest.raises(StorageFull) as caught:
        run_steps(steps, log, events)
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert caught.value.__notes__ == ["cannot undo step 'b': stuck"]
    assert StepUndone("b", "stuck") in events.seen


def test_defect_in_an_undo_still_lets_the_others_run() -> None:
    """An undo with a bug is raised as that bug, after everything else was undone."""
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_steps(
            [Recorder("a"), Recorder("b", fails_undo=ZeroDivisionError(), fails=StorageFull("full"))],
            log,
        )
    assert log == ["+a", "+b", "-b", "-a"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)])
def test_signal_raises_in_the_running_step_and_undoes(number: int, error: type[TikvBrError]) -> None:
    """SIGINT and SIGTERM end the step with their error, and what was begun is undone."""
    log: list[str] = []
    with pytest.raises(error):
        run_steps([Recorder("a"), Recorder("b", signal_in_run=number), Recorder("c")], log)
    assert log == ["+a", "+b", "-b", "-a"]


def test_signal_while_undoing_waits() -> None:
    """A second Ctrl-C does not stop the undoing, and the first error is raised."""
    log: list[str] = []
    steps = [Recorder("a"), Recorder("b", signal_in_undo=signal.SIGINT, fails=StorageFull("full"))]
    with pytest.raises(StorageFull):
        run_steps(steps, log)
    assert log == ["+a", "+b", "-b", "-a"]


def test_handlers_are_given_back() -> None:
    """After the run, well or not, both signals have the handlers they had before."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_steps([Recorder("a")], [])
    with pytest.raises(StorageFull):
        run_steps([Recorder("a", fails=StorageFull("full"))], [])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_steps_run_in_any_thread() -> None:
    """Outside the main thread, where no handler can be set, steps run all the same."""
    log: list[str] = []
    thread = threading.Thread(target=run_steps, args=([Recorder("a")], log))
    thread.start()
    thread.join()
    assert log == ["+a"]


def test_line_without_a_way_back_is_undone_without_a_word() -> None:
    """Only steps that left something behind are reported when they are undone."""
    events = Events()
    said: list[str] = []
    lines = [
        FunctionStep("look", said.append),
        FunctionStep("take", said.append, lambda _context: said.append("given back")),
        FunctionStep("fail", lambda _context: (_ for _ in ()).throw(StorageFull("full"))),
    ]
    with pytest.raises(StorageFull):
        run_steps(lines, "context", events)
    assert said == ["context", "context", "given back"]
    assert [event for event in events.seen if isinstance(event, StepUndone)] == [StepUndone("take")]


def test_an_undo_that_had_nothing_to_do_is_not_reported() -> None:
    """Else "undone: set the limit" would follow a notice that the limit could not be lifted."""
    events = Events()
    steps: list[Step[list[str]]] = [
        FunctionStep("limit", list[str].copy, lambda _: False),
        FunctionStep("lock", list[str].copy, lambda _: None),
        Recorder("c", fails=StorageFull("full")),
    ]
    with pytest.raises(StorageFull):
        run_steps(steps, [], events)
    assert [event for event in events.seen if isinstance(event, StepUndone)] == [StepUndone("c"), StepUndone("lock")]


def test_the_undo_knows_when_the_signal_came() -> None:
    """Its time runs from the signal; without one, from its own begin."""
    seen: list[float | None] = []

    def undoing(came_at: float | None) -> contextlib.AbstractContextManager[None]:
        seen.append(came_at)
        return contextlib.nullcontext()

    began = time.monotonic()
    with pytest.raises(Terminated):
        run_steps([Recorder("a", signal_in_run=signal.SIGTERM)], [], undoing=undoing)
    with pytest.raises(StorageFull):
        run_steps([Recorder("a", fails=StorageFull("full"))], [], undoing=undoing)
    assert seen[0] is not None
    assert began <= seen[0] <= time.monotonic()
    assert seen[1] is None
