"""Runs jobs of Spark, on workers whose Python has tikv-br in the version of this machine: others are refused."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tikv_br import __version__
from tikv_br.errors import SparkUnavailable, SparkWorkerUnfit, TaskFailed
from tikv_br.tasks import shipped

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_GROUP = "tikv-br"
_MODULES = ("grpc", "numba", "obstore", "pyarrow", "zstandard")
"""Modules that most tasks need and that no pure-Python archive has."""
_EXECUTOR_SECONDS = 300.0
"""Seconds for which no executor may be available: a cluster may be busy."""
_CANCEL_SECONDS = 10.0
_MASTER_SECONDS = 10.0
_MARKED = re.compile(re.escape(shipped.MARK) + r"(.*?)\|(.*?)" + re.escape(shipped.MARK))
_HOST = re.compile(r"TID \d+\) \((\S+) executor")
_VERSIONS = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version: (\S+) than.*?driver: (\S+?),")
_NO_PYTHON = re.compile(r"Cannot run program \"([^\"]+)\".*?: (error=.*)")


@contextlib.contextmanager
def spark_job(context: SparkContext, work: Callable[[], R]) -> Iterator[Future[R]]:
    """Run a job in a thread while the block runs; a block that raises cancels it and the Python workers in it.

    The future raises `TaskFailed` if the job fails, and `SparkWorkerUnfit` if a worker cannot load the function.
    """
    from py4j.protocol import Py4JError

    job: Future[R] = Future()

    def run() -> None:
        try:
            context.setJobGroup(_GROUP, "tikv-br tasks", interruptOnCancel=True)
            job.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            failure = unfit_worker(error) or TaskFailed(f"Spark failed: {first_cause(error)}")
            failure.__cause__ = error
            job.set_exception(failure)

    threading.Thread(target=run, name="spark-job", daemon=True).start()
    try:
        yield job
    except BaseException:
        with contextlib.suppress(Py4JError, OSError):  # of a JVM that died, or was killed
            context.cancelJobGroup(_GROUP)
        wait([job], timeout=_CANCEL_SECONDS)
        raise


def by_value(function: Callable[[Iterable[T]], Iterator[R]]) -> Callable[[Iterable[T]], Iterator[R]]:
    """A function over the rows of a partition as one that any worker can load; it raises a clear error on a worker that cannot run the function.

    Spark's closures refer to our functions by the names of their modules. A worker without these would fail with an error of pickle.
    """
    _pickle_by_value()
    return partial(shipped.run_function, __version__, pickle.dumps(function))  # type: ignore[return-value]


def _pickle_by_value() -> None:
    """Have `shipped` pickled by value from now on."""
    from pyspark.cloudpickle import register_pickle_by_value

    register_pickle_by_value(shipped)  # type: ignore[no-untyped-call]


def check_reachable(master: str) -> None:
    """Connect to a standalone cluster: Spark itself would try for minutes. Raises `SparkUnavailable`."""
    if not master.startswith("spark://"):
        return
    problems = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _MASTER_SECONDS).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
        else:
            return
    raise SparkUnavailable(
        f"cannot connect to the Spark master {'; '.join(problems)}",
        hint="Check --spark-master, whether the master runs, and the network.",
    )


def check_workers(context: SparkContext, master: str) -> None:
    """Look at the executors that are there, or appear within minutes.

    Raises `SparkWorkerUnfit` if one cannot run tasks, and `SparkUnavailable` if there is none. An executor that appears later
    is looked at by the tasks themselves: see `by_value`.
    """
    _pickle_by_value()
    count = max(2 * context.defaultParallelism, 4)
    rows = context.parallelize(range(count), count)
    examined = partial(shipped.examine_workers, __version__, _MODULES)

    def examine() -> list[tuple[str, str]]:
        first = context.runJob(rows, examined, [0])  # a cluster without tikv-br is refused by its first executor
        return first if any(problem for _host, problem in first) else context.runJob(rows, examined, [*range(1, count)])

    with spark_job(context, examine) as job:
        _await_executor(context, job, master)
        for host, problem in job.result():
            if problem:
                raise _unfit(host, problem)


def _await_executor(context: SparkContext, job: Future[Any], master: str) -> None:
    """Wait until the job has ended. Raises `SparkUnavailable` if none of its tasks starts in time."""
    deadline = time.monotonic() + _EXECUTOR_SECONDS
    tracker = context.statusTracker()
    while not wait([job], timeout=0.2).done:
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        if any(stage is not None and stage.numActiveTasks + stage.numCompletedTasks for stage in stages):
            deadline = time.monotonic() + _EXECUTOR_SECONDS  # an executor unpacks an archive first
        if time.monotonic() > deadline:
            host = context.getConf().get("spark.driver.host")
            raise SparkUnavailable(
                f"no executor of {master} ran a task within {_EXECUTOR_SECONDS:.0f} s",
                hint="Check that the cluster has free cores and memory (spark.executor.memory, spark.executor.cores), and that its "
                f"workers can connect to this machine at {host} (spark.driver.host, spark.driver.port). The executors' logs say more.",
            )


def unfit_worker(error: Exception) -> SparkWorkerUnfit | None:
    """Convert the error of a job if a worker cannot run tasks; else None."""
    text = str(error)
    if marked := _MARKED.search(text):
        return _unfit(marked[1], marked[2])
    found = _HOST.search(text)
    host = found[1] if found else "unknown"
    if versions := _VERSIONS.search(text.replace("\n", " ")):
        return _unfit(host, f"Python {versions[1]}, this machine has {versions[2]}")
    if program := _NO_PYTHON.search(text):
        return _unfit(host, f"no Python that can be started: {program[1]}: {program[2]}")
    return None


def _unfit(host: str, problem: str) -> SparkWorkerUnfit:
    return SparkWorkerUnfit(f"the Spark worker {host} cannot run tasks: it has {problem}")


def first_cause(error: Exception) -> str:
    """Return the line of Spark's long report that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Exception: " in line or "Error: " in line or "Job aborted" in line]
    return (causes or lines or [type(error).__name__])[0]
