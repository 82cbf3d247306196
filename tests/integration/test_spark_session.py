"""Sessions whose start is interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import pyspark.java_gateway
import pytest
from pyspark import SparkContext

from tikv_br.errors import Interrupted
from tikv_br.tasks.session import spark_context

LIMIT_SECONDS = 60
SUBMIT = "org.apache.spark.deploy.SparkSubmit"


def jvms() -> list[psutil.Process]:
    """Return the processes below this one that are, or become, Spark's JVM."""
    return [child for child in psutil.Process().children(recursive=True) if SUBMIT in command_line(child)]


def command_line(process: psutil.Process) -> list[str]:
    """Return the words a process was started with, none when it has gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def signal_raises() -> Iterator[None]:
    """SIGINT raises `Interrupted`, as in a run of the program."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted")

    before = signal.signal(signal.SIGINT, handle)
    yield
    assert signal.getsignal(signal.SIGINT) is handle
    signal.signal(signal.SIGINT, before)


def interrupt_when(ready: Callable[[], bool]) -> None:
    """Send SIGINT to this process as soon as ``ready``."""

    def wait() -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def assert_interrupted_without_trace() -> None:
    """Start a session that gets interrupted; its JVM must be gone at the end."""
    before = set(jvms())
    with pytest.raises(Interrupted), spark_context("local[1]"):
        time.sleep(LIMIT_SECONDS)
    assert set(jvms()) <= before


def count_and_be_interrupted(context: SparkContext) -> None:
    """Run a job, then wait for a SIGINT."""
    assert context.parallelize([1], 1).count() == 1
    interrupt_when(lambda: True)
    time.sleep(LIMIT_SECONDS)


def test_interrupt_while_the_jvm_starts_leaves_no_jvm() -> None:
    """A JVM without a session is waited for and ended: alone, it would never end."""
    before = set(jvms())
    interrupt_when(lambda: bool(set(jvms()) - before))
    assert_interrupted_without_trace()


def test_interrupt_while_the_session_starts_leaves_no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a session on a JVM is interrupted, and the interrupt is not reported as a failure of Spark."""
    launch = pyspark.java_gateway.launch_gateway
    launched = threading.Event()

    def launch_gateway(*arguments: object) -> Any:  # noqa: ANN401 - py4j has no types
        gateway = launch(*arguments)  # type: ignore[no-untyped-call]
        launched.set()
        return gateway

    monkeypatch.setattr(pyspark.java_gateway, "launch_gateway", launch_gateway)
    interrupt_when(launched.is_set)
    assert_interrupted_without_trace()


def test_interrupt_of_a_running_session_leaves_no_jvm() -> None:
    """The same once tasks could run."""
    before = set(jvms())
    with pytest.raises(Interrupted), spark_context("local[1]") as context:
        count_and_be_interrupted(context)
    assert set(jvms()) <= before
