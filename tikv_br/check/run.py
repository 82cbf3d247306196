"""The probes of this machine; runs all probes, each with its own timeout, and summarises the results, also for Nagios."""

from __future__ import annotations

import contextlib
import importlib.metadata
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tikv_br.check.cluster_probes import CLUSTER_PROBES
from tikv_br.check.probe import (
    CheckOptions,
    Figure,
    Probe,
    ProbeContext,
    ProbeOutcome,
    ProbeSkipped,
    Result,
    Status,
    fail,
    listed,
    ok,
    skipped,
    warn,
)
from tikv_br.check.storage_probes import remove_scratch, storage_probes
from tikv_br.environment import install_hint, is_installed
from tikv_br.errors import SparkUnavailable, StorageError, TikvBrError
from tikv_br.tasks.session import MIN_JAVA, check_java, spark_context

SPARK_SECONDS = 90.0
"""A session may take that long to start, on a busy machine or a far cluster."""


def probe_java(context: ProbeContext) -> ProbeOutcome:
    """Java is there, and new enough: needed by Spark only."""
    wanted = context.options.tasks.executor
    if wanted == "driver":
        raise ProbeSkipped("not needed with --executor driver")
    if wanted != "spark" and not is_installed("pyspark"):
        raise ProbeSkipped("not needed without PySpark")
    try:
        return ok(f"Java {check_java()}")
    except SparkUnavailable as error:
        advice = f"Install Java {MIN_JAVA} or newer and set JAVA_HOME, or use --executor driver."
        return fail(error.message, advice) if wanted == "spark" else warn(error.message, advice)


def probe_spark(context: ProbeContext) -> ProbeOutcome:
    """Spark starts and runs a task, where it was asked for; else that it is installed."""
    wanted, master = context.options.tasks.executor, context.options.tasks.spark_master
    if wanted == "driver":
        raise ProbeSkipped("not needed with --executor driver")
    if not is_installed("pyspark"):
        if wanted == "spark":
            return fail("PySpark is not installed", install_hint("pyspark", "pandas"))
        return ok("PySpark is not installed: tasks run on threads")
    version = importlib.metadata.version("pyspark")
    if wanted != "spark":
        return ok(f"pyspark {version}; pass --executor spark to start it")
    with spark_context(master, settings=context.options.tasks.spark_settings) as spark:
        answer = spark.parallelize([1], 1).map(_plus_one).collect()
    if answer != [2]:
        return fail(f"a task on {master} answered {answer}", "Check the workers' Python: see PYSPARK_PYTHON.")
    return ok(f"pyspark {version} ran a task on {master}")


def _plus_one(number: int) -> int:
    return number + 1


MACHINE_PROBES = (Probe("java", probe_java, seconds=40.0), Probe("spark", probe_spark, seconds=SPARK_SECONDS))


def check(options: CheckOptions, on_result: Callable[[Result], None] = lambda _result: None) -> list[Result]:
    """The results in the order of the probes; ``on_result`` gets each as it arrives, in the caller's thread."""
    probes = (*CLUSTER_PROBES, *storage_probes(options.storage), *MACHINE_PROBES)
    with ProbeContext(options) as context:
        results = run_probes(probes, context, on_result)
        with contextlib.suppress(StorageError, ProbeSkipped):  # already reported by the probes
            remove_scratch(context)
    return results


def count(results: Sequence[Result]) -> dict[Status, int]:
    """Number of results by status."""
    counted = Counter(result.outcome.status for result in results)
    return {status: counted[status] for status in Status}


def run_probes(
    probes: Sequence[Probe], context: ProbeContext, on_result: Callable[[Result], None] = lambda _result: None
) -> list[Result]:
    """Run probes in parallel. A probe that exceeds its timeout fails; its thread is abandoned."""
    done: queue.SimpleQueue[tuple[int, ProbeOutcome]] = queue.SimpleQueue()
    began = time.monotonic()
    for index, probe in enumerate(probes):
        # Daemons: a probe that hangs, for example in a dead file system, must not keep the program from exiting.
        threading.Thread(
            target=_run_probe, args=(index, probe, context, done), name=f"probe-{probe.name}", daemon=True
        ).start()
    results: dict[int, Result] = {}
    limits = {index: probe.seconds or context.options.timeout for index, probe in enumerate(probes)}

    def book(index: int, outcome: ProbeOutcome) -> None:
        results[index] = Result(probes[index].name, outcome, round(time.monotonic() - began, 3))
        on_result(results[index])

    while len(results) < len(probes):
        waiting = {index: limit for index, limit in limits.items() if index not in results}
        index = min(waiting, key=lambda each: waiting[each])
        try:
            found, outcome = done.get(timeout=max(began + waiting[index] - time.monotonic(), 0.0))
        except queue.Empty:
            book(index, fail(f"no answer within {waiting[index]:g} s", "Check the network, or increase --timeout."))
            continue
        if found not in results:
            book(found, outcome)
    return [results[index] for index in range(len(probes))]


def _run_probe(
    index: int, probe: Probe, context: ProbeContext, done: queue.SimpleQueue[tuple[int, ProbeOutcome]]
) -> None:
    outcome = fail("the probe failed because of a bug in tikv-br", "Please report it, with the output on stderr.")
    try:
        outcome = probe.run(context)
    except ProbeSkipped as reason:
        outcome = skipped(str(reason))
    except TikvBrError as error:
        outcome = fail(error.message, error.hint)
    finally:
        done.put((index, outcome))


OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
"""Exit codes of a plug-in; the words of the line are the same."""
NAME = "TIKV-BR"


def state(results: Sequence[Result]) -> int:
    """The exit code: the worst status of all probes; `UNKNOWN` if all were skipped."""
    counted = count(results)
    if counted[Status.FAIL]:
        return CRITICAL
    if counted[Status.WARN]:
        return WARNING
    return OK if counted[Status.OK] else UNKNOWN


def line(results: Sequence[Result]) -> str:
    """The plug-in's output line: state, problems, counts, and the figures."""
    word = ("OK", "WARNING", "CRITICAL", "UNKNOWN")[state(results)]
    counted = count(results)
    wrong = [
        f"{result.name}: {result.outcome.seen}"
        for status in (Status.FAIL, Status.WARN)
        for result in results
        if result.outcome.status is status
    ]
    parts = [listed(wrong)] if wrong else []
    parts.append(", ".join(f"{number} {status.value}" for status, number in counted.items() if number))
    figures = " ".join(_figure(figure) for result in results for figure in result.outcome.figures)
    return _plain(f"{NAME} {word} - {'; '.join(parts)}") + (f" | {figures}" if figures else "")


def unknown(message: str) -> str:
    """The line of a check that could not be made."""
    return _plain(f"{NAME} UNKNOWN - {message}")


def _figure(figure: Figure) -> str:
    number = f"{figure.value:.0f}" if figure.unit == "B" else f"{figure.value:g}"
    limits = f";{figure.warn};{figure.critical}" if figure.warn or figure.critical else ""
    return f"'{figure.label}'={number}{figure.unit}{limits}"


def _plain(text: str) -> str:
    """Text without what ends the line or begins the figures."""
    return " ".join(text.split()).replace("|", "/")
