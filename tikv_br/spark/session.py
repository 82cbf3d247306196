"""Starts and stops Spark: checks Java first, redirects its log, and binds a local session to loopback."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tikv_br.errors import SparkUnavailable, UsageError

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext

logger = logging.getLogger(__name__)
MIN_JAVA = 17
_LAUNCHES = 3  # of a JVM that ends without output
_ATTEMPTS = 4  # of a task whose worker dies; tasks that fail by themselves are not run again
_MASTER = re.compile(r"local|local\[(\*|[1-9]\d*)(,\d+)?\]|spark://[^/\s]+|yarn|k8s://\S+")
_LOOPBACK = "127.0.0.1"
_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""This JVM only steers tasks: its better compiler costs more than half of all its processor time, and never pays."""


def is_local(master: str) -> bool:
    """Whether ``master`` means threads of this machine."""
    return master == "local" or master.startswith("local[")


def check_master(master: str) -> None:
    """Raise `UsageError` for a master that Spark would not understand: no JVM has to start to find out."""
    if not _MASTER.fullmatch(master):
        raise UsageError(
            f"invalid Spark master {master!r}", hint="Pass local[*], local[4], spark://host:7077, yarn or k8s://…."
        )


def check_java() -> int:
    """Return the major version of the Java that Spark will use. Raises `SparkUnavailable` below 17 or without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise SparkUnavailable("Java not found: JAVA_HOME is not set and `java` is not on the PATH")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SparkUnavailable(f"cannot run Java at {java}: {error}") from error
    version = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    major = int(version[1]) if version else 0
    if major < MIN_JAVA:
        raise SparkUnavailable(f"Java at {java} is version {major or 'unknown'}, Spark requires {MIN_JAVA} or newer")
    return major


@contextlib.contextmanager
def spark_context(master: str, *, concurrency: int | None = None, app_name: str = "tikv-br") -> Iterator[SparkContext]:
    """Start a session for the length of the block; it is stopped, JVM and all, however the block ends.

    ``concurrency`` sets the threads of ``local[*]``, and limits those of ``local[n]`` or the cores to take of a cluster. Raises `UsageError`
    for a malformed master and `SparkUnavailable`.
    """
    check_master(master)
    check_java()
    begin = time.monotonic()
    with tempfile.TemporaryFile() as log, _environment(master), _session(master, concurrency, app_name, log) as context:
        logger.debug("Spark session on %s after %.1f s", master, time.monotonic() - begin)
        yield context


def driver_host(context: SparkContext) -> str:
    """Return the address under which executors reach this process."""
    return context.getConf().get("spark.driver.host") or _LOOPBACK


@contextlib.contextmanager
def _session(master: str, concurrency: int | None, app_name: str, log: IO[bytes]) -> Iterator[SparkContext]:
    launch = _Launch(_conf(master, concurrency, app_name), log)
    try:
        yield launch.result(master)
    finally:
        launch.end()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Spark said: %s", _tail(log) or "nothing")


class _Launch:
    """Starts JVM and session on a thread of its own, so that a signal to the main thread interrupts neither.

    A JVM whose launch is interrupted would stay, as nothing refers to it; py4j takes the exception of a signal handler for its
    own; and a SparkContext made in the main thread would replace our handler of SIGINT.
    """

    def __init__(self, conf: SparkConf, log: IO[bytes]) -> None:
        self._conf, self._log = conf, log
        self._gateway: Any = None
        self._jvm_known = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spark-start")
        self._context = self._pool.submit(self._run)

    def _run(self) -> SparkContext:
        from pyspark import SparkContext

        try:
            self._gateway = _launch_jvm(self._conf, self._log)
        finally:
            self._jvm_known.set()
        return SparkContext(conf=self._conf, gateway=self._gateway)

    def result(self, master: str) -> SparkContext:
        """Wait for the session and return it. Raises `SparkUnavailable`."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return self._context.result()
        except (Py4JError, PySparkException, OSError) as error:
            raise SparkUnavailable(f"cannot start Spark on {master}: {_reason(self._log) or error}") from error

    def end(self) -> None:
        """Stop the session, or cancel its start, and end the JVM."""
        self._jvm_known.wait()
        if not self._context.done() and self._gateway is not None:
            self._gateway.proc.kill()  # what is about to start on it fails
        self._pool.shutdown()
        _stop(self._context.result() if self._context.exception() is None else None, self._gateway)
        del self._context  # its error knows our frames: a circle that would keep a dead JVM's pipe open


class _PopenArguments(dict[str, Any]):
    """What the JVM is launched with, less the function that pyspark would have Python run between fork and exec.

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


def _conf(master: str, concurrency: int | None, app_name: str) -> SparkConf:
    from pyspark import SparkConf

    settings = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()} {_QUICK_COMPILER}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.worker.reuse": "true",
        "spark.task.maxFailures": str(_ATTEMPTS),
    }
    if is_local(master):
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    elif concurrency is not None:
        settings["spark.cores.max"] = str(concurrency)
    conf = SparkConf(loadDefaults=False)
    conf.setMaster(_master(master, concurrency)).setAppName(app_name)
    return conf.setAll(list(settings.items()))


def _master(master: str, concurrency: int | None) -> str:
    """Let a local master run a task again whose worker died (plain ``local[n]`` never does), on at most ``concurrency`` threads."""
    if not is_local(master):
        return master
    threads, _, attempts = (
        ("1", "", "") if master == "local" else master.removeprefix("local[").removesuffix("]").partition(",")
    )
    if concurrency is not None:
        threads = str(concurrency if threads == "*" else min(int(threads), concurrency))
    return f"local[{threads},{attempts or _ATTEMPTS}]"


@contextlib.contextmanager
def _environment(master: str) -> Iterator[None]:
    """Set what Spark reads from the environment only, for the length of the session."""
    wanted = {"PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local(master):
        wanted |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": _LOOPBACK}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
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
        gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends when its standard input does
    try:
        gateway.proc.wait(timeout=10)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


def _tail(log: IO[bytes]) -> str:
    """Return the last 4 KiB of what the JVM wrote."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4096))
    return log.read().decode(errors="replace").strip()


def _reason(log: IO[bytes]) -> str:
    """Return the first line of the JVM's output that names an error."""
    lines = [line.strip() for line in _tail(log).splitlines()]
    return next((line for line in lines if "Exception" in line or "rror" in line), lines[-1] if lines else "")
