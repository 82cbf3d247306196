"""Tasks on a real Spark of two local threads, one session for all tests, and the same on threads of the driver."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.support.waiting import eventually
from tikv_br.errors import TaskFailed
from tikv_br.progress_events import Event, TasksProgress
from tikv_br.tasks import session as spark_session
from tikv_br.tasks.channel import ProgressListener, ProgressSender
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.session import spark_context
from tikv_br.tasks.settings import SparkSettings
from tikv_br.tasks.task import TaskContext, TaskMessage

if TYPE_CHECKING:
    from pyspark import SparkContext

SPARK = ExecutorOptions(executor="spark", spark_master="local[2]")
DRIVER = ExecutorOptions(executor="driver", concurrency=2)
BOTH = pytest.mark.parametrize("options", [SPARK, DRIVER], ids=["spark", "driver"])


@pytest.fixture(scope="module")
def session() -> Iterator[SparkContext]:
    """The one session of this module."""
    with spark_context(SPARK.spark_master) as context:
        yield context


@pytest.fixture(autouse=True)
def shared_session(session: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs get the module's session instead of one of their own. What depends on its end is tested in test_spark_executor.py."""

    @contextlib.contextmanager
    def given(master: str, *, concurrency: int | None, settings: SparkSettings) -> Iterator[SparkContext]:
        assert (master, concurrency, settings) == (SPARK.spark_master, SPARK.concurrency, SPARK.spark_settings)
        yield session

    monkeypatch.setattr(spark_session, "spark_context", given)


def square(task: int, context: TaskContext) -> tuple[int, int]:
    """Return the square, and report three bytes and one key."""
    context.report(data_bytes=3, keys=1)
    return task, task * task


def square_once_seen(task: tuple[int, str], context: TaskContext) -> int:
    """Return the square once the driver has reported a first part."""
    number, seen = task
    context.report(data_bytes=100, keys=10)
    eventually(Path(seen).exists)
    context.report(data_bytes=400, keys=40)
    return number * number


def defective(task: int, context: TaskContext) -> int:
    """Divide by zero, as a defect of a task would."""
    return task // context.attempt


def dies_once(task: tuple[int, str], context: TaskContext) -> tuple[int, int]:
    """Kill the own worker at the first attempt of task 1."""
    index, _ = task
    if index == 1 and context.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return index, context.attempt


def dies_after_its_outcome(task: tuple[int, str], context: TaskContext) -> tuple[int, int]:
    """Have the worker killed when the driver has the outcome of the first attempt of task 1, before Spark has its row."""
    index, seen = task
    send = ProgressSender.send

    def send_and_die(sender: ProgressSender, message: TaskMessage) -> None:
        send(sender, message)
        if message.kind == "result":
            eventually(Path(seen).exists)
            os.kill(os.getpid(), signal.SIGKILL)

    if index == 1 and context.attempt == 0:
        mock.patch.object(ProgressSender, "send", send_and_die).start()
    return index, context.attempt


class Visits:
    """Counts the tasks that used it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> int:
        """The number of this visit."""
        with self._lock:
            self.count += 1
            return self.count


def visit(_task: int, context: TaskContext) -> tuple[int, int]:
    """Return the process the task ran in, and how many of its tasks have used the shared object by then."""
    return os.getpid(), context.shared(Visits).add()


def process_of(_task: int, _context: TaskContext) -> int:
    """Return the process the task ran in."""
    return os.getpid()


@BOTH
def test_progress_is_live_and_never_falls(options: ExecutorOptions, tmp_path: Path) -> None:
    """Bytes are seen while no task has ended yet, and the fraction only grows."""
    events: list[Event] = []
    seen = tmp_path / "seen"

    def report(event: Event) -> None:
        events.append(event)
        if isinstance(event, TasksProgress) and event.bytes_done:
            seen.touch()

    run_tasks(
        [(number, str(seen)) for number in range(2)],
        square_once_seen,
        options=options,
        on_result=lambda _: None,
        reporter=report,
        planned_bytes=[500, 500],
    )
    progress = [event for event in events if isinstance(event, TasksProgress)]
    assert any(event.tasks_done == 0 and event.bytes_done > 0 and 0 < event.fraction < 1 for event in progress)
    fractions = [event.fraction for event in progress]
    assert fractions == sorted(fractions)


@BOTH
def test_defect_in_a_task_becomes_task_failed(options: ExecutorOptions) -> None:
    """An error that is not ours names its class, its message and where it happened."""
    with pytest.raises(
        TaskFailed, match=r"task 7: unexpected ZeroDivisionError.*(?s:.*)def.*|ZeroDivisionError"
    ) as caught:
        run_tasks([7], defective, options=options, on_result=lambda _: None)
    assert "in defective" in caught.value.message


def test_killed_worker_is_replaced_and_its_task_run_again(tmp_path: Path) -> None:
    """A Python worker that is killed costs an attempt, not the run."""
    results: list[tuple[int, int]] = []
    run_tasks([(n, str(tmp_path)) for n in range(3)], dies_once, options=SPARK, on_result=results.append)
    attempts = dict(results)
    assert sorted(attempts) == [0, 1, 2]
    assert attempts[1] >= 1


def test_an_outcome_that_arrived_counts_though_its_worker_died(tmp_path: Path) -> None:
    """Spark runs the task again and has the row of the second attempt, but the first outcome is the one that counts."""
    results: list[tuple[int, int]] = []
    seen = tmp_path / "seen"

    def take(result: tuple[int, int]) -> None:
        results.append(result)
        if result[0] == 1:
            seen.touch()

    run_tasks([(n, str(seen)) for n in range(3)], dies_after_its_outcome, options=SPARK, on_result=take)
    assert sorted(index for index, _ in results) == [0, 1, 2]
    assert dict(results)[1] == 0


def test_a_lost_channel_loses_and_repeats_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver's port does not answer, results and errors come with Spark's own rows when the job has ended."""
    results: list[tuple[int, int]] = []
    monkeypatch.setattr(ProgressListener, "_accept", lambda _self: None)
    run_tasks(range(4), square, options=SPARK, on_result=results.append)
    assert sorted(results) == [(n, n * n) for n in range(4)]
    with pytest.raises(TaskFailed, match="ZeroDivisionError"):
        run_tasks([7], defective, options=SPARK, on_result=lambda _: None)


def test_a_channel_that_breaks_midway_loses_and_repeats_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outcomes come over the channel, and all with Spark's rows: each counts once."""
    results: list[tuple[int, int]] = []

    def read_four(listener: ProgressListener, connection: Connection) -> None:
        with connection, suppress(EOFError, ConnectionError):  # a worker may have fewer to tell, and go before that
            for _ in range(4):  # progress, last progress and result of a task, and one message of the next
                listener._receive(pickle.loads(connection.recv_bytes()[32:]))

    monkeypatch.setattr(ProgressListener, "_read", read_four)
    run_tasks(range(8), square, options=SPARK, on_result=results.append)
    assert sorted(results) == [(n, n * n) for n in range(8)]


@BOTH
def test_tasks_of_a_process_share_objects(options: ExecutorOptions) -> None:
    """A process of Spark keeps what its tasks share; tasks on the driver use the caller's object."""
    found: list[tuple[int, int]] = []
    given = Visits()
    run_tasks(range(8), visit, options=options, on_result=found.append, shared=[given])
    assert given.count == (8 if options is DRIVER else 0)
    for process in {process for process, _ in found}:
        visits = sorted(number for each, number in found if each == process)
        assert visits == list(range(1, len(visits) + 1))


def test_spark_runs_elsewhere_and_driver_here() -> None:
    """Tasks of Spark run in other processes, tasks of the driver in this one."""
    for options, here in ((SPARK, False), (DRIVER, True)):
        processes: list[int] = []
        run_tasks(range(4), process_of, options=options, on_result=processes.append)
        assert (set(processes) == {os.getpid()}) is here
