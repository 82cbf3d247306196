"""Starts and stops Spark: checks Java first, redirects its log, and binds a local session to loopback.

Runs jobs of Spark, on workers whose Python has tikv-br in the version of this machine: others are refused.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pickle
import pwd
import re
import resource
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from tikv_br import __version__, pandas_import
from tikv_br.environment import has_current_folder, install_hint, is_installed
from tikv_br.errors import SparkUnavailable, SparkWorkerUnfit, TaskFailed, UsageError
from tikv_br.formats.numbers import parse_decimal
from tikv_br.tasks import shipped
from tikv_br.tasks.settings import LOOPBACK, NO_SETTINGS, SessionPlan, SparkSettings, check_settings, is_local

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext


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


MIN_JAVA = 17
_LAUNCHES = 3  # of a JVM that ends without output
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Variable of a process that spark-submit started, beside a JVM of its own."""
_LOG_OPTION = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
_PYTHON = "PYSPARK_PYTHON"
_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_OBEYED = (
    *(
        "JAVA_HOME",
        "JAVA_TOOL_OPTIONS",
        "_JAVA_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "SPARK_SUBMIT_OPTS",
        _ARGUMENTS,
        _SUBMITTED,
    ),
    *("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_DIRS", "SPARK_DIST_CLASSPATH", "SPARK_DAEMON_JAVA_OPTS"),
    *("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HADOOP_HOME"),
)
"""Variables that change how a JVM and Spark start."""
_CORE = re.compile(r"spark-core_[\d.]+-(.+)\.jar")
_JVM_FILES = 512
_NO_CAUSE = re.compile(r"logging level|initialization of VM")
_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""This JVM only steers tasks: its better compiler costs more than half of all its processor time, and never pays."""


def check_java() -> int:
    """Return the major version of the Java that Spark will use. Raises `SparkUnavailable` below 17 or without one, and where Spark cannot start."""
    if not is_installed("pyspark"):
        raise SparkUnavailable("PySpark is not installed", hint=install_hint("pyspark", "pandas"))
    _check_installation()
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise SparkUnavailable("Java not found: JAVA_HOME is not set and `java` is not on the PATH")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        raise SparkUnavailable(
            f"cannot run Java at {java}: {_reason(error.stderr + error.stdout) or error}", hint=_hint()
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise SparkUnavailable(f"cannot run Java at {java}: {error}") from error
    version = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    major = int(version[1]) if version else 0
    if major < MIN_JAVA:
        raise SparkUnavailable(f"Java at {java} is version {major or 'unknown'}, Spark requires {MIN_JAVA} or newer")
    return major


@contextlib.contextmanager
def spark_context(
    master: str,
    *,
    concurrency: int | None = None,
    settings: SparkSettings = NO_SETTINGS,
) -> Iterator[SparkContext]:
    """Start a session for the length of the block; it is stopped, JVM and all, however the block ends.

    ``concurrency`` sets the threads of ``local[*]``, and limits the threads of ``local[n]`` or the cores to take of a cluster. Raises `UsageError`
    for a malformed master, `SparkUnavailable`, and `SparkWorkerUnfit` if a cluster's worker cannot run tasks.
    """
    pandas_import.allow()
    check_settings(master, settings)
    check_java()
    check_reachable(master)
    begin = time.monotonic()
    with (
        tempfile.TemporaryFile() as log,
        _environment(master),
        _session(SessionPlan(master, concurrency, settings), log) as context,
    ):
        if not is_local(master):
            check_workers(context, master)
        logger.debug("Spark session on %s after %.1f s", master, time.monotonic() - begin)
        yield context


def _check_installation() -> None:
    """Raise `SparkUnavailable` for what would end the JVM with a message that names no cause."""
    if was_submitted():
        return
    if not has_current_folder():
        raise SparkUnavailable(
            "the current directory was removed, and a JVM does not start without",
            hint="Change to one that exists, then run the command again.",
        )
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise SparkUnavailable(
            f"this user (id {os.getuid()}) has no entry in /etc/passwd, and Spark's libraries cannot do without",
            hint="Add one (in a container: RUN useradd, an entrypoint, or libnss-wrapper), or pass --executor driver, which needs no Spark.",
        ) from None
    home = os.environ.get("SPARK_HOME")
    if not home:
        return
    hint = "Unset SPARK_HOME: the Spark that was installed with tikv-br is used then."
    if not Path(home, "bin", "spark-submit").is_file():
        raise SparkUnavailable(f"SPARK_HOME={home} has no bin/spark-submit", hint=hint)
    versions = {
        match[1] for each in Path(home, "jars").glob("spark-core_*.jar") if (match := _CORE.fullmatch(each.name))
    }
    ours = importlib.metadata.version("pyspark")
    if versions and ours not in versions:
        raise SparkUnavailable(
            f"SPARK_HOME={home} is Spark {', '.join(sorted(versions))}, and the pyspark of this Python is {ours}",
            hint=hint,
        )


def was_submitted() -> bool:
    """Whether spark-submit started this process. Raises `SparkUnavailable` if the variable that says so is not its own."""
    port = os.environ.get(_SUBMITTED)
    if port is not None and parse_decimal(port, (1 << 16) - 1) is None:
        raise SparkUnavailable(f"{_SUBMITTED}={port} is not a port", hint=f"Unset {_SUBMITTED}.")
    return port is not None


def submitted_master() -> str:
    """The master of the spark-submit that has started this process; ``""`` without one."""
    if not was_submitted():
        return ""
    from pyspark.java_gateway import launch_gateway

    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    try:
        return str(gateway.jvm.org.apache.spark.SparkConf().get("spark.master", ""))
    finally:
        gateway.close()


def driver_host(context: SparkContext) -> str:
    """Return the address under which executors reach this process."""
    return context.getConf().get("spark.driver.host") or LOOPBACK


@contextlib.contextmanager
def _session(plan: SessionPlan, log: IO[bytes]) -> Iterator[SparkContext]:
    import pyspark  # noqa: F401 - before there are two threads: each would hold a part of it that the other one imports

    launch = _Launch(plan, log)
    try:
        yield launch.result(plan.master)
    finally:
        launch.end()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Spark said: %s", _tail(log) or "nothing")


class _Launch:
    """Starts JVM and session on a thread of its own, so that a signal to the main thread interrupts neither.

    A JVM whose launch is interrupted would stay, as nothing refers to it; py4j takes the exception of a signal handler for its
    own; and a SparkContext made in the main thread would replace our handler of SIGINT.
    """

    def __init__(self, plan: SessionPlan, log: IO[bytes]) -> None:
        self._plan, self._log = plan, log
        self._gateway: Any = None
        self._jvm_known = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spark-start")
        self._context = self._pool.submit(self._run)

    def _run(self) -> SparkContext:
        from pyspark import SparkContext

        try:
            with _properties_file(self._plan.settings.properties):
                self._gateway = _launch_jvm(self._plan.launch_conf(), self._log)
        finally:
            self._jvm_known.set()
        conf = self._plan.session_conf(self._gateway.jvm.org.apache.spark.SparkConf())
        if not is_local(self._plan.master):  # pyspark takes the workers' Python from the environment only
            os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python") or os.environ.get(_PYTHON) or "python3"
        return SparkContext(conf=conf, gateway=self._gateway)

    def result(self, master: str) -> SparkContext:
        """Wait for the session and return it. Raises `SparkUnavailable`."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return self._context.result()
        except (Py4JError, PySparkException, OSError) as error:
            raise SparkUnavailable(
                f"cannot start Spark on {master}: {_reason(_output(self._log)) or error}", hint=_hint()
            ) from error

    def end(self) -> None:
        """Stop the session, or cancel its start, and end the JVM."""
        self._jvm_known.wait()
        if not self._context.done() and self._gateway is not None and self._gateway.proc is not None:
            self._gateway.proc.kill()  # what is about to start on it fails
        self._pool.shutdown()
        _stop(self._context.result() if self._context.exception() is None else None, self._gateway)
        del self._context  # its error knows our frames: a circle that would keep a dead JVM's pipe open


class _PopenArguments(dict[str, Any]):
    """Arguments for launching the JVM, without the function that pyspark would run between fork and exec.

    In a process with threads (gRPC's, ours) that child may crash, or hang on a lock that no thread of it will release; without it
    no Python runs there. A separate process group keeps Ctrl-C from the JVM instead.
    """

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - any argument
        if name != "preexec_fn":
            super().__setitem__(name, value)


def _launch_jvm(conf: SparkConf, log: IO[bytes]) -> Any:  # noqa: ANN401 - py4j has no types
    """Start the JVM; again if it ends without output, as if the system killed it for lack of memory."""
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    for tries_left in reversed(range(_LAUNCHES)):
        try:
            return launch_gateway(conf, _PopenArguments(stdout=log, stderr=log, process_group=0))  # type: ignore[no-untyped-call]
        except PySparkException:
            if not tries_left or _tail(log):
                raise
    raise AssertionError


@contextlib.contextmanager
def _properties_file(properties: dict[str, str]) -> Iterator[None]:
    """Let a JVM that starts in the block read settings from a file of mode 0600, because `ps` shows arguments."""
    before = os.environ.get(_ARGUMENTS)
    try:
        given = shlex.split(before or "pyspark-shell")
    except ValueError as error:
        raise SparkUnavailable(f"{_ARGUMENTS} cannot be parsed: {error}", hint=_hint()) from None
    if not properties or was_submitted():
        yield
        return
    if "--properties-file" in given:
        raise UsageError(
            f"--spark-conf and --spark-archive do not go with a --properties-file in {_ARGUMENTS}",
            hint="Put its settings into spark-defaults.conf, or pass them with --spark-conf.",
        )
    with tempfile.NamedTemporaryFile("w", encoding="ascii", prefix="tikv-br-", suffix=".conf") as file:  # mode 0600
        file.writelines(f"{_escaped(name)}={_escaped(value)}\n" for name, value in properties.items())
        file.flush()
        os.environ[_ARGUMENTS] = shlex.join(["--load-spark-defaults", "--properties-file", file.name, *given])
        try:
            yield
        finally:
            _set_variable(_ARGUMENTS, before)


def _escaped(text: str) -> str:
    """A key or a value for Java's Properties: each unit of UTF-16 as an escape."""
    encoded = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{unit:04x}" for unit in struct.unpack(f">{len(encoded) // 2}H", encoded))


@contextlib.contextmanager
def _environment(master: str) -> Iterator[None]:
    """Set what Spark reads from the environment only, for the length of the session."""
    wanted = {"PYSPARK_DRIVER_PYTHON": sys.executable, _PYTHON: os.environ.get(_PYTHON)}
    # Not in spark.driver.extraJavaOptions, which may be the user's.
    ours = f"{_LOG_OPTION} {_QUICK_COMPILER}"
    wanted["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, (os.environ.get("SPARK_SUBMIT_OPTS"), ours)))
    if is_local(master):
        wanted |= {_PYTHON: sys.executable, "SPARK_LOCAL_IP": LOOPBACK}
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        _set_variable(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _stop(context: SparkContext | None, gateway: Any) -> None:  # noqa: ANN401 - py4j has no types
    """Stop the session and end the JVM; nothing of it is left for the next one in this process."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    with contextlib.suppress(Py4JError, OSError):
        if context is not None:
            context.stop()
    SparkContext._active_spark_context = None  # noqa: SLF001
    SparkContext._gateway = None  # noqa: SLF001
    SparkContext._jvm = None  # noqa: SLF001
    if gateway is None:
        return
    with contextlib.suppress(Py4JError, OSError):
        if gateway.proc is None:  # the JVM is spark-submit's, and may serve a later session
            gateway.close()
            return
        gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends when its standard input does
    try:
        gateway.proc.wait(timeout=10)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


def _tail(log: IO[bytes]) -> str:
    """Return the last 4 KiB of what the JVM wrote."""
    return _output(log)[-4096:].strip()


def _output(log: IO[bytes]) -> str:
    """Return the last 64 KiB of what the JVM wrote."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - (64 << 10)))
    return log.read().decode(errors="replace")


def _reason(output: str) -> str:
    """Return the first line of a JVM's output that names an error."""
    lines = [line.strip() for line in output.splitlines()]
    wrong = (
        line
        for line in lines
        if re.search(r"Exception|[Ee]rror\b|^Unrecognized|^Invalid", line) and not _NO_CAUSE.search(line)
    )
    return next(wrong, lines[-1] if lines else "")


def _hint() -> str:
    """What to change if there is a Java and Spark does not start: the variables that both obey, as far as they are set."""
    found = [name for name in _OBEYED if (value := os.environ.get(name)) and not value.startswith(_LOG_OPTION)]
    advice = (
        [
            f"Check the environment: {', '.join(found)} {'is' if len(found) == 1 else 'are'} set. Unset what belongs to another installation."
        ]
        if found
        else []
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _JVM_FILES:
        advice.append(f"A process may open {files} files here, too few for a JVM: ulimit -n 4096.")
    return (
        " ".join(advice)
        or "Check --spark-master and --spark-conf, and the memory of this machine; --log-level debug shows the output of Spark. --executor driver needs no Spark."
    )
