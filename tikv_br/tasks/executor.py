"""Runs tasks on Spark or on threads of the driver, with the same handling of results, errors and progress."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct

from tikv_br.cancellation import Cancellation
from tikv_br.environment import is_installed
from tikv_br.errors import SparkUnavailable, UsageError
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.resume_options import MayChange
from tikv_br.tasks.settings import NO_SETTINGS, SparkSettings, check_settings, is_local
from tikv_br.tasks.task import Collector, SharedObjects, TaskContext, TaskMessage, run_task

if TYPE_CHECKING:
    from tikv_br.tasks.channel import ChannelAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
worker = SharedObjects()
"""Objects that tasks of this process share if it is a Spark worker; they outlive a task."""
ExecutorKind = Literal["spark", "driver"]
ExecutorChoice = Literal["auto", "spark", "driver"]
DRIVER_THREADS = 16
MIN_SPARK_TASKS = 4000
"""Number of tasks from which starting a JVM is worth its seconds even if stores do the work."""
MIN_SPARK_BYTES = 4 << 30
"""Bytes through the tasks from which starting a local Spark is worth its 7 s (docs/evidence/benchmarks.md)."""
POLL_SECONDS = 0.2
_CANCEL_SECONDS = 2.0
"""Seconds for cancelled tasks to clean up before the run ends without them."""


class ExecutorOptions(Struct, frozen=True, kw_only=True):
    """Where tasks run: options of each operation that can use Spark."""

    executor: MayChange[ExecutorChoice] = "auto"
    """``driver`` (threads of this process), ``spark``, or ``auto``: by the work, see `choose_executor`."""
    spark_master: MayChange[str] = "local[*]"
    spark_settings: MayChange[SparkSettings] = NO_SETTINGS
    concurrency: MayChange[int | None] = None
    """Maximum number of concurrent tasks; None = the executor's default."""

    @property
    def threads(self) -> int:
        """Number of tasks on this machine that wait for storage or stores most of their time."""
        return self.concurrency or min(DRIVER_THREADS, 2 * (os.cpu_count() or 1))

    def check_executor(self, rate_limit: int = 0) -> None:
        """Raise `UsageError` for what Spark would refuse, and for a rate limit that cannot be divided."""
        if self.executor == "driver":
            return
        check_settings(self.spark_master, self.spark_settings)
        if rate_limit and not is_local(self.spark_master) and self.concurrency is None:
            raise UsageError(
                "--ratelimit on a Spark cluster needs --concurrency",
                hint="The limit is divided among the concurrent tasks.",
            )

    def choose(self, executor: ExecutorKind, threads: int) -> ExecutorOptions:
        """The options with the chosen executor; the driver has this number of threads."""
        return ExecutorOptions(
            executor=executor,
            spark_master=self.spark_master,
            spark_settings=self.spark_settings,
            concurrency=threads if executor == "driver" else self.concurrency,
        )


def choose_executor(tasks: int, task_bytes: int = 0) -> ExecutorKind:
    """Choose Spark if it can start and there are many tasks, or many bytes pass through them; else threads."""
    return choose_and_explain(tasks, task_bytes, "")[0]


def choose_and_explain(tasks: int, task_bytes: int, reason: str) -> tuple[ExecutorKind, str]:
    """`choose_executor`, with the reason: the given one, unless Spark would be used and cannot start."""
    if tasks < MIN_SPARK_TASKS and task_bytes < MIN_SPARK_BYTES:
        return "driver", reason
    if not is_installed("pyspark"):  # on purpose, so that is no warning
        return "driver", "PySpark is not installed"
    from tikv_br.tasks.session import check_java  # late: tests replace it

    try:
        check_java()
    except SparkUnavailable as error:
        logger.warning(
            "cannot start Spark, running %s tasks on threads of this process: %s", f"{tasks:,}", error.message
        )
        return "driver", f"Spark cannot start: {error.message}"
    return "spark", reason


def run_tasks(
    tasks: Sequence[T],
    function: Callable[[T, TaskContext], R],
    *,
    options: ExecutorOptions,
    on_result: Callable[[R], None],
    name_of: Callable[[T], str] = str,
    reporter: Reporter = silent,
    planned_bytes: Sequence[int] = (),
    shared: Iterable[object] = (),
) -> float:
    """Run ``function(task, context)`` for every task; ``on_result`` gets each result once, in the caller's thread, as it comes.

    ``function``, tasks and results must pickle (a function of a module, not a lambda). A task may run more than once if its
    worker dies, even at the same time, so names of what it writes need a random token; only one result counts. The first
    error that a task raises cancels the rest and is raised here as itself, its message led by the task's name; what is not
    ours becomes `TaskFailed`.
    Returns the seconds that the start of the session took, 0 on the driver; it is reported as well.
    Raises `SparkUnavailable` when no session can be had. ``planned_bytes``, about how many bytes each task will report, weighs tasks for the progress.
    Tasks on the driver get the objects in ``shared`` from `TaskContext.shared`; a process of Spark makes its own.
    """
    if not tasks:
        return 0.0
    collector: Collector[R] = Collector(len(tasks), on_result, reporter, planned_bytes)
    executor = choose_executor(len(tasks)) if options.executor == "auto" else options.executor
    if executor == "driver":
        _run_on_threads(tasks, name_of, function, options, collector, SharedObjects(shared))
        return 0.0
    return _run_on_spark(tasks, name_of, function, options, collector, reporter)


def _run_on_threads(
    tasks: Sequence[T],
    name_of: Callable[[T], str],
    function: Callable[[T, TaskContext], R],
    options: ExecutorOptions,
    collector: Collector[R],
    shared: SharedObjects,
) -> None:
    """Run the tasks on daemon threads: one that ignores its cancellation does not delay the end of the run or the process."""
    cancellation = Cancellation()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        waiting.put(index)

    def work() -> None:
        with cancellation.active(), contextlib.suppress(queue.Empty):
            while not cancellation.is_cancelled:
                index = waiting.get_nowait()
                context = TaskContext(index, 0, collector.put, cancellation, shared)
                collector.put(run_task(function, tasks[index], name_of(tasks[index]), context))

    threads = [
        threading.Thread(target=work, name=f"task_{number}", daemon=True)
        for number in range(min(options.concurrency or DRIVER_THREADS, len(tasks)))
    ]
    try:
        for thread in threads:
            thread.start()
        while not collector.complete:
            collector.take(POLL_SECONDS)
    except BaseException:
        cancellation.cancel()
        _await_cancelled(threads)
        raise
    for thread in threads:
        thread.join()


def _await_cancelled(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _CANCEL_SECONDS
    started = [thread for thread in threads if thread.ident is not None]
    for thread in started:
        thread.join(max(deadline - time.monotonic(), 0))
    left = sum(thread.is_alive() for thread in started)
    if left:
        logger.warning("%d cancelled tasks are still running after %.0f s; abandoning them", left, _CANCEL_SECONDS)


def _run_on_spark(
    tasks: Sequence[T],
    name_of: Callable[[T], str],
    function: Callable[[T, TaskContext], R],
    options: ExecutorOptions,
    collector: Collector[R],
    reporter: Reporter,
) -> float:
    """Returns the seconds until the session stood."""
    from tikv_br.tasks.channel import ANY_HOST, ProgressListener
    from tikv_br.tasks.session import by_value, driver_host, spark_context, spark_job

    host = "127.0.0.1" if is_local(options.spark_master) else ANY_HOST
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(
            spark_context(options.spark_master, concurrency=options.concurrency, settings=options.spark_settings)
        )
        seconds = time.monotonic() - began
        reporter(Notice(f"the Spark session on {options.spark_master} has started in {seconds:.1f} s"))
        collector.begin()
        listener = stack.enter_context(ProgressListener(collector.put, host, driver_host(context)))
        work = ((index, (task, name_of(task))) for index, task in enumerate(tasks))
        one = partial(_run_one, function, listener.address, on_cluster=not is_local(options.spark_master))
        outcomes = context.parallelize(work, len(tasks)).mapPartitions(by_value(partial(map, one)))
        job = stack.enter_context(spark_job(context, outcomes.collect))
        while not collector.complete and not job.done():
            collector.take(POLL_SECONDS)
        wait([job])
        if not collector.complete:
            for message in job.result():  # what the channel has not delivered
                collector.process(message)
            collector.take(0)
    return seconds


def _run_one(
    function: Callable[[T, TaskContext], R],
    address: ChannelAddress,
    row: tuple[int, tuple[T, str]],
    *,
    on_cluster: bool = False,
) -> TaskMessage:
    """Run one task inside a Spark worker. Its outcome travels at once over the channel, and for certain as the job's row.

    Errors on a cluster name the worker: what cannot be reached from there may be reached from here.
    """
    from pyspark import TaskContext as SparkTaskContext

    from tikv_br.tasks.channel import RunSender

    index, (task, name) = row
    spark_task = SparkTaskContext.get()
    sender = worker.get(RunSender).to(address)
    context = TaskContext(index, spark_task.attemptNumber() if spark_task else 0, sender.send, shared=worker)
    outcome = run_task(function, task, f"{name} on worker {socket.gethostname()}" if on_cluster else name, context)
    sender.send(outcome)
    return outcome
