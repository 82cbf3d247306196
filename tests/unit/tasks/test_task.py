"""A task's edge: results, errors and progress as messages."""

from __future__ import annotations

import pickle
import threading

import pytest

from tikv_br.cancellation import Cancellation, TaskCancelled, run_on_threads, sleep
from tikv_br.errors import StorageFull, TaskFailed
from tikv_br.tasks.task import TaskContext, TaskMessage, run_task


def run(function: object) -> tuple[TaskMessage, list[TaskMessage]]:
    """Run one task of index 4 at attempt 2."""
    sent: list[TaskMessage] = []
    outcome = run_task(function, "input", "interval-4", TaskContext(4, 2, sent.append))  # type: ignore[arg-type]
    return outcome, sent


def test_result_is_sent_with_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes reported within the throttle's time are not lost: the outcome brings them."""
    monkeypatch.setattr("tikv_br.tasks.task.REPORT_SECONDS", 600.0)  # longer than any machine takes for the task

    def work(task: str, context: TaskContext) -> str:
        for _ in range(10):
            context.report(data_bytes=7, keys=1)
        return task.upper()

    outcome, sent = run(work)
    assert (outcome.kind, outcome.index, outcome.attempt) == ("result", 4, 2)
    assert pickle.loads(outcome.body) == "INPUT"
    assert outcome.totals == (70, 10)
    assert len(sent) == 1, "the first report, for all came within the throttle's time"


def test_our_error_keeps_class_and_hint() -> None:
    """An error of ours is sent as itself, with the task's name in front."""

    def work(_task: str, _context: TaskContext) -> None:
        raise StorageFull("no room", hint="make some")

    outcome, _ = run(work)
    error = pickle.loads(outcome.body)
    assert (type(error), error.message, error.hint) == (StorageFull, "task interval-4: no room", "make some")


def test_result_that_does_not_pickle_is_an_error_not_a_hang() -> None:
    """A defective task cannot return a lock; its error names the result."""
    outcome, _ = run(lambda _task, _context: threading.Lock())
    error = pickle.loads(outcome.body)
    assert isinstance(error, TaskFailed)
    assert "pickle" in error.message


def test_cancelled_task_stops_at_its_next_report() -> None:
    """Reporting raises once the run has failed elsewhere, and the task's outcome is the cancellation."""
    cancelled = Cancellation()
    context = TaskContext(0, 0, lambda _: None, cancelled)
    context.report(data_bytes=1)
    cancelled.cancel()
    with pytest.raises(TaskCancelled):
        context.report(data_bytes=1)
    outcome = run_task(lambda _task, given: given.report(), "x", "a", context)
    assert outcome.kind == "error"


def test_counts_are_taken_back_in_cancelled_work() -> None:
    """Reported counts, also those of the report that raised the cancellation, sum up to nothing at the driver."""
    cancelled, sent = Cancellation(), list[TaskMessage]()
    context = TaskContext(0, 0, sent.append, cancelled)

    def attempt() -> None:
        with context.retract_on_error():
            context.report(data_bytes=5, keys=1)
            cancelled.cancel()
            context.report(data_bytes=7, keys=2)

    with pytest.raises(TaskCancelled):
        attempt()
    assert [message.totals for message in sent] == [(5, 1), (0, 0)]


def test_the_first_error_ends_calls_that_came_before() -> None:
    """On threads: an error of a later item does not wait for an earlier one, which is cancelled."""
    ended = list[int]()

    def call(number: int) -> int:
        try:
            if number == 1:
                raise StorageFull("full")
            sleep(600)
            return number
        finally:
            ended.append(number)

    with pytest.raises(StorageFull):
        run_on_threads(call, range(2), 2, "test")
    assert ended == [1, 0]
    assert run_on_threads(str, range(5), 2, "test") == list("01234")


def test_calls_on_threads_end_with_the_work_that_they_belong_to() -> None:
    """Also in a function that such a call makes itself."""
    outer = Cancellation()

    def call(depth: int) -> None:
        if depth:
            run_on_threads(call, [depth - 1], 1, "test")
        outer.cancel()
        sleep(600)

    with outer.active(), pytest.raises(TaskCancelled):
        run_on_threads(call, [2], 1, "test")
