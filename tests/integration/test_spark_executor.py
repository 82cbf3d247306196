"""Tasks on a real Spark of two local threads, and the same on threads of the driver."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.support.waiting import eventually
from tikv_br import cancellation
from tikv_br.errors import Interrupted, SparkUnavailable, StorageFull, TaskFailed
from tikv_br.progress_events import Event, Notice, TasksProgress
from tikv_br.spark.channel import ProgressListener, ProgressSender
from tikv_br.spark.executor import ExecutorKind, ExecutorOptions, run_tasks
from tikv_br.spark.task import Message, TaskContext

SPARK = ExecutorOptions("spark", "local[2]")
DRIVER = ExecutorOptions("driver", concurrency=2)
END_SECONDS = 60  # 5 on a quiet machine; the other tasks sleep for four minutes
"""In which a run ends once a task has failed or a signal has come."""
BOTH = pytest.mark.parametrize("options", [SPARK, DRIVER], ids=["spark", "driver"])


def square(task: int, context: TaskContext) -> tuple[int, int]:
    """Return the square, and report three bytes and one key."""
    context.report(data_bytes=3, keys=1)
    return task, task * task


def square_once_seen(task: tuple[int, str], context: TaskContext) -> int:
    """Return the square once the driver has told of a first part."""
    number, seen = task
    context.report(data_bytes=100, keys=10)
    eventually(Path(seen).exists)
    context.report(data_bytes=400, keys=40)
    return number * number


def slow_square(task: int, context: TaskContext) -> int:
    """Take half a second in steps, reporting each."""
    for _ in range(5):
        context.report(data_bytes=100, keys=10)
        time.sleep(0.1)
    return task * task


def full_at_three(task: tuple[int, str], context: TaskContext) -> int:
    """Fail at task 3 with an error of ours; the others leave a file if they ever come to their end."""
    number, folder = task
    if number == 3:
        raise StorageFull("no space in bucket b", hint="Free some.")
    for _ in range(300):
        context.report(data_bytes=1)
        time.sleep(0.1)
    Path(folder, f"ended-{number}").touch()
    return number


def fails_beside_work(task: tuple[int, str, str], context: TaskContext) -> int:
    """Fail at task 0 once the other tasks are at work: they sleep for minutes, in a wait that can be cancelled or in one that cannot."""
    number, folder, kind = task
    if number == 0:
        eventually(lambda: len(list(Path(folder).iterdir())) == 2)
        Path(folder, "failed").touch()
        raise StorageFull("no space in bucket b")
    Path(folder, f"began-{number}").touch()
    (cancellation.sleep if kind == "cancellable" else time.sleep)(240)
    return context.index


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

    def send_and_die(sender: ProgressSender, message: Message) -> None:
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


@pytest.mark.parametrize(
    "options", [pytest.param(SPARK, marks=pytest.mark.core("spark")), DRIVER], ids=["spark", "driver"]
)
def test_each_result_arrives_once_and_progress_adds_up(options: ExecutorOptions) -> None:
    """Every task's result comes exactly once, and the last progress is the whole."""
    results: list[tuple[int, int]] = []
    events: list[Event] = []
    begun = time.monotonic()
    session = run_tasks(range(20), square, options=options, on_result=results.append, reporter=events.append)
    assert (0 < session < time.monotonic() - begun) if options.executor == "spark" else session == 0
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told == ([f"the Spark session on local[2] has started in {session:.1f} s"] if session else [])
    assert sorted(results) == [(n, n * n) for n in range(20)]
    last = events[-1]
    assert isinstance(last, TasksProgress)
    assert last.seconds <= time.monotonic() - begun - session
    assert (last.tasks_done, last.bytes_done, last.keys_done, last.fraction) == (20, 60, 20, 1.0)


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
        expected_task_bytes=500,
    )
    progress = [event for event in events if isinstance(event, TasksProgress)]
    assert any(event.tasks_done == 0 and event.bytes_done > 0 and 0 < event.fraction < 1 for event in progress)
    fractions = [event.fraction for event in progress]
    assert fractions == sorted(fractions)


@BOTH
def test_first_error_is_raised_as_itself_and_cancels_the_rest(options: ExecutorOptions, tmp_path: Path) -> None:
    """An error of ours comes back with class, hint and the task's name, and the other tasks do not come to their end."""
    with pytest.raises(StorageFull) as caught:
        run_tasks(
            [(number, str(tmp_path)) for number in (1, 2, 3)],
            full_at_three,
            options=ExecutorOptions(options.executor, "local[3]", 3),
            on_result=lambda _: None,
            name_of=lambda task: f"interval-{task[0]}",
        )
    assert caught.value.message == "task interval-3: no space in bucket b"
    assert caught.value.hint == "Free some."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["cancellable", "deaf"])
@pytest.mark.parametrize("executor", ["spark", "driver"])
def test_the_first_error_ends_the_run_within_seconds(executor: ExecutorKind, kind: str, tmp_path: Path) -> None:
    """Whatever the other tasks do: those that cannot be cancelled are left behind."""
    with pytest.raises(StorageFull):
        run_tasks(
            [(number, str(tmp_path), kind) for number in (0, 1, 2)],
            fails_beside_work,
            options=ExecutorOptions(executor, "local[3]", 3),
            on_result=lambda _: None,
        )
    assert time.time() - (tmp_path / "failed").stat().st_mtime < END_SECONDS


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyspark forgets the pipe of a dead JVM
def test_jvm_that_dies_is_an_error_of_ours() -> None:
    """A JVM that is killed while tasks run, as by the kernel when memory is short, ends the run with `TaskFailed`."""
    before = set(psutil.Process().children(recursive=True))

    def kill_jvm(event: Event) -> None:
        if isinstance(event, TasksProgress) and event.bytes_done:
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):  # a worker may end meanwhile
                    if process.name() == "java":
                        process.kill()

    with pytest.raises(TaskFailed, match="Spark failed"):
        run_tasks(list(range(40)), slow_square, options=SPARK, on_result=lambda _: None, reporter=kill_jvm)


def test_spark_runs_elsewhere_and_driver_here() -> None:
    """Tasks of Spark run in other processes, tasks of the driver in this one."""
    for options, here in ((SPARK, False), (DRIVER, True)):
        processes: list[int] = []
        run_tasks(range(4), process_of, options=options, on_result=processes.append)
        assert (set(processes) == {os.getpid()}) is here


@BOTH
def test_failing_consumer_ends_the_run(options: ExecutorOptions) -> None:
    """What ``on_result`` raises is raised, and nothing is left running."""

    def refuse(_result: int) -> None:
        raise Interrupted("enough")

    threads = set(threading.enumerate())
    with pytest.raises(Interrupted, match="enough"):
        run_tasks(range(4), slow_square, options=options, on_result=refuse)
    eventually(lambda: not [each for each in set(threading.enumerate()) - threads if not each.daemon])


def test_nothing_to_do_starts_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list of tasks is done at once, Java or not."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    kinds: list[ExecutorKind] = ["spark", "driver"]
    for kind in kinds:
        run_tasks([], square, options=ExecutorOptions(kind), on_result=lambda _: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyspark forgets the pipe of a dead JVM
def test_spark_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Java that dies is an error with its own last words, not a stack trace."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && echo \'version "21"\' && exit\necho Error: out of bits >&2\nexit 1\n'
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match=r"cannot start Spark on local\[2\]: Error: out of bits"):
        run_tasks([1], square, options=SPARK, on_result=lambda _: None)


def test_spark_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the JVM nor Spark writes a word to our own stdout or stderr."""
    run_tasks([1], square, options=SPARK, on_result=lambda _: None)
    assert capfd.readouterr() == ("", "")
