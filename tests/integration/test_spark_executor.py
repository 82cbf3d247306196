"""Tasks on a real Spark of two local threads, and the same on threads of the driver."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually
from tikv_br import cancellation
from tikv_br.errors import Interrupted, SparkUnavailable, StorageFull, TaskFailed
from tikv_br.progress_events import Event, Notice, TasksProgress
from tikv_br.tasks.executor import ExecutorKind, ExecutorOptions, run_tasks
from tikv_br.tasks.task import TaskContext

SPARK = ExecutorOptions(executor="spark", spark_master="local[2]")
DRIVER = ExecutorOptions(executor="driver", concurrency=2)
END_SECONDS = 60  # 5 on a quiet machine; the other tasks sleep for four minutes
"""In which a run ends once a task has failed or a signal has come."""
BOTH = pytest.mark.parametrize("options", [SPARK, DRIVER], ids=["spark", "driver"])


def square(task: int, context: TaskContext) -> tuple[int, int]:
    """Return the square, and report three bytes and one key."""
    context.report(data_bytes=3, keys=1)
    return task, task * task


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
    reported = [event.message for event in events if isinstance(event, Notice)]
    assert reported == ([f"the Spark session on local[2] has started in {session:.1f} s"] if session else [])
    assert sorted(results) == [(n, n * n) for n in range(20)]
    last = events[-1]
    assert isinstance(last, TasksProgress)
    assert last.seconds <= time.monotonic() - begun - session
    assert (last.tasks_done, last.bytes_done, last.keys_done, last.fraction) == (20, 60, 20, 1.0)


@BOTH
def test_first_error_is_raised_as_itself_and_cancels_the_rest(options: ExecutorOptions, tmp_path: Path) -> None:
    """An error of ours comes back with class, hint and the task's name, and the other tasks do not come to their end."""
    with pytest.raises(StorageFull) as caught:
        run_tasks(
            [(number, str(tmp_path)) for number in (1, 2, 3)],
            full_at_three,
            options=ExecutorOptions(executor=options.executor, spark_master="local[3]", concurrency=3),
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
            options=ExecutorOptions(executor=executor, spark_master="local[3]", concurrency=3),
            on_result=lambda _: None,
        )
    assert time.time() - (tmp_path / "failed").stat().st_mtime < END_SECONDS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyspark forgets the pipe of a dead JVM
def test_jvm_that_dies_is_an_error_of_ours() -> None:
    """A JVM that is killed while tasks run, as by the kernel when memory is short, ends the run with `TaskFailed`."""
    before = set(psutil.Process().children(recursive=True))

    def kill_jvm(event: Event) -> None:
        if isinstance(event, TasksProgress) and event.bytes_done:
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):  # a worker may have ended
                    if process.name() == "java":
                        process.kill()

    with pytest.raises(TaskFailed, match="Spark failed"):
        run_tasks(list(range(40)), slow_square, options=SPARK, on_result=lambda _: None, reporter=kill_jvm)


@BOTH
def test_failing_consumer_ends_the_run(options: ExecutorOptions) -> None:
    """An error of ``on_result`` is raised, and nothing is left running."""

    def refuse(_result: int) -> None:
        raise Interrupted("enough")

    threads = set(threading.enumerate())
    with pytest.raises(Interrupted, match="enough"):
        run_tasks(range(4), slow_square, options=options, on_result=refuse)
    eventually(lambda: not [each for each in set(threading.enumerate()) - threads if not each.daemon])


def test_an_empty_list_of_tasks_starts_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list of tasks is done at once, Java or not."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    kinds: list[ExecutorKind] = ["spark", "driver"]
    for kind in kinds:
        run_tasks([], square, options=ExecutorOptions(executor=kind), on_result=lambda _: None)


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
