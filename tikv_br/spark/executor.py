"""Runs tasks, on Spark or on threads of the driver, by one code path for results, errors and progress."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from tikv_br.errors import SparkUnavailable, TaskFailed
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.spark.channel import ANY_HOST, ChannelAddress, ProgressListener, sender_to
from tikv_br.spark.collector import Collector
from tikv_br.spark.task import Message, TaskContext, run_task

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
ExecutorKind = Literal["spark", "driver"]
ExecutorChoice = Literal["auto", "spark", "driver"]
DRIVER_THREADS = 16
STEERING_TASKS = 4000
"""From so many tasks on that only steer stores, starting a JVM is worth its seconds."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Where tasks run: ``executor`` "spark" on ``master``, or "driver" (threads); ``concurrency`` None: as many as fit.

    "auto" is for tasks that only steer stores: see `for_steering`.
    """

    executor: ExecutorChoice = "spark"
    master: str = "local[*]"
    concurrency: int | None = None


def for_steering(tasks: int) -> ExecutorKind:
    """Where tasks belong whose bytes do not pass through Python: here, or on Spark where they are many and it can start."""
    if tasks < STEERING_TASKS:
        return "driver"
    from tikv_br.spark.session import check_java

    try:
        check_java()
    except SparkUnavailable as error:
        logger.warning("%s tasks run on threads of this process: %s", f"{tasks:,}", error.message)
        return "driver"
    return "spark"


def run_tasks(
    tasks: Sequence[T],
    function: Callable[[T, TaskContext], R],
    *,
    options: ExecutorOptions = ExecutorOptions(),
    on_result: Callable[[R], None],
    name_of: Callable[[T], str] = str,
    reporter: Reporter = silent,
    expected_task_bytes: int = 0,
) -> float:
    """Run ``function(task, context)`` for every task; ``on_result`` gets each result once, in the caller's thread, as it comes.

    ``function``, tasks and results must pickle (a function of a module, not a lambda). A task may run more than once
    (``context.attempt`` tells) when its worker dies; only one result counts. The first error that a task raises cancels
    the rest and is raised here as itself, its message led by the task's name; what is not ours becomes `TaskFailed`.
    Returns the seconds that the start of the session took, 0 on the driver; the reporter is told of it as well.
    Raises `SparkUnavailable` when no session can be had. ``expected_task_bytes`` makes progress finer than whole tasks.
    """
    if not tasks:
        return 0.0
    collector: Collector[R] = Collector(len(tasks), on_result, reporter, expected_task_bytes)
    names = [name_of(task) for task in tasks]
    executor = for_steering(len(tasks)) if options.executor == "auto" else options.executor
    if executor == "driver":
        _run_on_threads(tasks, names, function, options, collector)
        return 0.0
    return _run_on_spark(tasks, names, function, options, collector, reporter)


def _run_on_threads(
    tasks: Sequence[T],
    names: Sequence[str],
    function: Callable[[T, TaskContext], R],
    options: ExecutorOptions,
    collector: Collector[R],
) -> None:
    cancelled = threading.Event()

    def work(index: int) -> None:
        if not cancelled.is_set():
            context = TaskContext(index, 0, collector.put, cancelled)
            collector.put(run_task(function, tasks[index], names[index], context))

    with ThreadPoolExecutor(options.concurrency or DRIVER_THREADS, thread_name_prefix="task") as pool:
        try:
            for index in range(len(tasks)):
                pool.submit(work, index)
            while not collector.complete:
                collector.take(_POLL_SECONDS)
        except BaseException:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_on_spark(
    tasks: Sequence[T],
    names: Sequence[str],
    function: Callable[[T, TaskContext], R],
    options: ExecutorOptions,
    collector: Collector[R],
    reporter: Reporter,
) -> float:
    """Returns the seconds until the session stood."""
    from tikv_br.spark.session import driver_host, is_local, spark_context

    host = "127.0.0.1" if is_local(options.master) else ANY_HOST
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(spark_context(options.master, concurrency=options.concurrency))
        seconds = time.monotonic() - began
        reporter(Notice(f"the Spark session on {options.master} has started in {seconds:.1f} s"))
        collector.begin()
        listener = stack.enter_context(ProgressListener(collector.put, host, driver_host(context)))
        work = list(enumerate(zip(tasks, names, strict=True)))
        job = stack.enter_context(_spark_job(context, work, function, listener.address))
        while not collector.complete and job.is_alive():
            collector.take(_POLL_SECONDS)
        job.join()
        if not collector.complete:
            for message in job.outcomes():  # whatever the listener has missed
                collector.book(message)
            collector.take(0)
    return seconds


class _SparkJob(threading.Thread):
    """The one Spark job of a run, in a thread of its own so that the caller can follow its messages."""

    GROUP = "tikv-br"

    def __init__(self, context: SparkContext, work: Callable[[], list[Message]]) -> None:
        super().__init__(name="spark-job", daemon=True)
        self._context = context
        self._work = work
        self._outcomes: list[Message] = []
        self._failure: Exception | None = None

    def run(self) -> None:
        """Run the job to its end, well or not."""
        from py4j.protocol import Py4JError

        try:
            self._context.setJobGroup(self.GROUP, "tikv-br tasks", interruptOnCancel=True)
            self._outcomes = self._work()
        except (Py4JError, OSError) as error:
            self._failure = error

    def outcomes(self) -> list[Message]:
        """Return the outcome of every task. Raises `TaskFailed` when Spark has given up."""
        if self._failure is not None:
            raise TaskFailed(f"Spark gave up: {_first_cause(self._failure)}") from self._failure
        return self._outcomes


@contextlib.contextmanager
def _spark_job(
    context: SparkContext,
    work: list[tuple[int, tuple[T, str]]],
    function: Callable[[T, TaskContext], R],
    address: ChannelAddress,
) -> Iterator[_SparkJob]:
    """Run the job while the block runs; a block that raises cancels it and the Python workers in it."""
    from py4j.protocol import Py4JError

    def collect() -> list[Message]:
        return context.parallelize(work, len(work)).map(partial(_run_one, function, address)).collect()

    job = _SparkJob(context, collect)
    job.start()
    try:
        yield job
    except BaseException:
        with contextlib.suppress(Py4JError, OSError):  # of a JVM that died, or was killed
            context.cancelJobGroup(_SparkJob.GROUP)
        job.join(timeout=10)
        raise


def _run_one(
    function: Callable[[T, TaskContext], R], address: ChannelAddress, row: tuple[int, tuple[T, str]]
) -> Message:
    """Run one task inside a Spark worker; its outcome goes both ways, live and as the row's result."""
    from pyspark import TaskContext as SparkTaskContext

    index, (task, name) = row
    spark_task = SparkTaskContext.get()
    sender = sender_to(address)
    context = TaskContext(index, spark_task.attemptNumber() if spark_task else 0, sender.send)
    outcome = run_task(function, task, name, context)
    sender.send(outcome)
    _spare_collector()
    return outcome


@functools.cache
def _spare_collector() -> None:
    """Take what this worker has loaded by the end of its first task out of the collection that Spark runs after each.

    That one looks at all objects: 20 ms a task, several times as much with Arrow and the compiler of the kernels loaded.
    """
    gc.collect()
    gc.freeze()


def _first_cause(error: Exception) -> str:
    """Return the line of Spark's long report that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Exception: " in line or "Error: " in line or "Job aborted" in line]
    return (causes or lines or [type(error).__name__])[0]
