"""What is looked at on this machine: Java and Spark, for the work that may run there."""

from __future__ import annotations

import importlib.metadata

from tikv_br.check.probe import NotAsked, Probe, Verdict, fail, ok, warn
from tikv_br.check.surroundings import Surroundings
from tikv_br.errors import SparkUnavailable
from tikv_br.spark.session import MIN_JAVA, check_java, spark_context

SPARK_SECONDS = 90.0
"""A session may take that long to start, on a busy machine or a far cluster."""


def look_at_java(around: Surroundings) -> Verdict:
    """Java is there, and new enough: needed by Spark only."""
    wanted = around.options.executor
    if wanted == "driver":
        raise NotAsked("--executor driver needs none")
    try:
        return ok(f"Java {check_java()}")
    except SparkUnavailable as error:
        advice = f"Install Java {MIN_JAVA} or newer and set JAVA_HOME, or use --executor driver."
        return fail(error.message, advice) if wanted == "spark" else warn(error.message, advice)


def look_at_spark(around: Surroundings) -> Verdict:
    """Spark starts and runs a task, where it was asked for; else that it is installed."""
    wanted, master = around.options.executor, around.options.spark_master
    if wanted == "driver":
        raise NotAsked("--executor driver needs none")
    version = importlib.metadata.version("pyspark")
    if wanted != "spark":
        return ok(f"pyspark {version}; --executor spark tries it")
    with spark_context(master) as context:
        answer = context.parallelize([1], 1).map(_plus_one).collect()
    if answer != [2]:
        return fail(f"a task on {master} answered {answer}", "Check the workers' Python: see PYSPARK_PYTHON.")
    return ok(f"pyspark {version} ran a task on {master}")


def _plus_one(number: int) -> int:
    return number + 1


MACHINE_PROBES = (Probe("java", look_at_java, seconds=40.0), Probe("spark", look_at_spark, seconds=SPARK_SECONDS))
