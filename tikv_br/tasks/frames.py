"""Spark SQL: reads any input as a DataFrame, maps its columns to bytes, and runs a function over its partitions in Arrow batches.

The only module that uses Spark SQL. Rows go from Spark's readers through its sort to Python as Arrow batches; there is no Python object
for each row.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tikv_br.errors import SparkUnavailable, TaskFailed, UsageError
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Reporter
from tikv_br.tasks.channel import ANY_HOST, ChannelAddress, ProgressListener, RunSender
from tikv_br.tasks.collector import Collector
from tikv_br.tasks.executor import POLL_SECONDS, worker
from tikv_br.tasks.inputs import DEFAULT_LIMITS, Input, InputColumns, rank_of
from tikv_br.tasks.jobs import by_value, first_cause, spark_job
from tikv_br.tasks.session import driver_host, spark_context
from tikv_br.tasks.settings import NO_SETTINGS, SparkSettings, is_local
from tikv_br.tasks.task import TaskContext, TaskMessage, run_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


R = TypeVar("R")
PartitionFunction = Callable[["Iterator[pa.RecordBatch]", TaskContext], R]
_SETTINGS = {
    "spark.sql.adaptive.enabled": "false",  # it may merge or split partitions
    "spark.sql.execution.arrow.useLargeVarTypes": "true",  # as `tikv_br.formats.columns`
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),
}
_DEFAULTS = {"csv": {"header": "true", "enforceSchema": "false"}}
"""Options of formats unless others are given: columns need names, and these must be the same in all files."""
AVRO_PACKAGE = "org.apache.spark:spark-avro_2.13:VERSION"
"""Spark's module for Avro, which is not part of pyspark. VERSION is that of the Spark in use."""


@contextlib.contextmanager
def sql_session(master: str, settings: SparkSettings = NO_SETTINGS) -> Iterator[SparkSession]:
    """Start Spark SQL for the length of the block. Raises as `spark_context`, also if the master of a cluster cannot be reached."""
    with spark_context(master, settings=settings) as context:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        try:
            session = SparkSession(context)
            for name, value in _SETTINGS.items():
                session.conf.set(name, value)
        except (Py4JError, PySparkException):  # has no text once the JVM is gone
            raise SparkUnavailable(
                f"cannot start Spark on {master}: the session has ended before it could be used",
                hint="Check that the master runs there and can be reached, and that it accepts applications.",
            ) from None
        yield session


def read_input(session: SparkSession, source: Input) -> DataFrame:
    """The input, of which only the schema is read yet. Raises `UsageError` if Spark cannot read it."""
    name = source.spark_format
    options = {**_DEFAULTS.get(name, {}), **dict(source.reader_options)}
    with _as_usage_errors(f"Spark cannot read {source.path} as {name}"):
        return session.read.format(name).options(**options).load(source.path)


def keyed_rows(frame: DataFrame, source: Input, limits: RowLimits = DEFAULT_LIMITS) -> DataFrame:
    """Return the rows as ``key``, ``value`` (binary), ``ttl`` (bigint), ``rank`` and ``problem``, a text.

    ``problem`` is null in all others; with it, ``key`` and ``value`` are null. ``ttl`` is 0 without a TTL column, ``rank`` is the order
    column. Raises `UsageError` for a column that is missing or of a wrong type.
    """
    from pyspark.sql import functions

    columns = InputColumns.of(frame, source, limits)
    good = columns.problem.isNull()
    rank = rank_of(frame, source.order_column) if source.order_column else functions.lit(0)
    with _as_usage_errors("cannot map the columns of the input"):
        return frame.select(
            functions.when(good, columns.key).alias("key"),
            functions.when(good, columns.value).alias("value"),
            columns.ttl.alias("ttl"),
            rank.alias("rank"),
            columns.problem.alias("problem"),
        )


def sorted_rows(rows: DataFrame, partitions: int) -> DataFrame:
    """Divide rows of `keyed_rows` by ranges of sampled keys, and sort them by key; without ``rank``.

    All rows of a key are in one partition; those with the largest rank come first, of these the one with the largest value, of these
    the one with the longest TTL.
    """
    from pyspark.sql import functions

    rank, value, ttl = functions.col("rank"), functions.col("value"), functions.col("ttl")
    order = (functions.col("key"), rank.desc_nulls_last(), value.desc(), ttl.desc())
    return rows.repartitionByRange(partitions, "key").sortWithinPartitions(*order).drop("rank")


@contextlib.contextmanager
def kept(frame: DataFrame) -> Iterator[None]:
    """Leave the rows that a job reads on the disks of the executors, where later jobs find them, for the length of the block."""
    from py4j.protocol import Py4JError
    from pyspark import StorageLevel

    frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError, OSError):  # of a JVM that died
            frame.unpersist()


def write_bad_rows(frame: DataFrame, source: Input, folder: str, limits: RowLimits = DEFAULT_LIMITS) -> None:
    """Write the rows with a problem to a folder as JSON lines: all columns, and ``_problem``. Replaces the folder."""
    problem = InputColumns.of(frame, source, limits).problem
    with _as_usage_errors(f"Spark cannot write the bad rows to {folder}"):
        frame.where(problem.isNotNull()).withColumn("_problem", problem).write.mode("overwrite").json(folder)


@contextlib.contextmanager
def _as_usage_errors(what: str) -> Iterator[None]:
    """Raise `UsageError` for what Spark refuses."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:  # the second one of Hadoop: a file system whose jar is missing
        hint = "Check the path and the format, and that this Spark has what they need."
        if isinstance(error, PySparkException) and "AVRO" in (error.getCondition() or ""):
            hint = f"Pass --spark-conf spark.jars.packages={AVRO_PACKAGE}, or spark.jars with that jar."
        raise UsageError(f"{what}: {first_cause(error)}", hint=hint) from error


def map_partitions(
    session: SparkSession,
    frame: DataFrame,
    function: PartitionFunction[R],
    *,
    partitions: int,
    master: str,
    reporter: Reporter,
) -> list[R]:
    """Run ``function(batches, context)`` once for each of the partitions of a DataFrame, and return the results in any order.

    ``function`` and results must pickle; a partition may run more than once (see `TaskContext.attempt`), and only one result counts.
    The first error that it raises ends the job and is raised here. Raises `TaskFailed` if Spark fails.
    """
    results: list[R] = []
    context = session.sparkContext
    collector: Collector[R] = Collector(partitions, results.append, reporter)
    host = "127.0.0.1" if is_local(master) else ANY_HOST
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(ProgressListener(collector.put, host, driver_host(context)))
        outcomes = frame.mapInArrow(by_value(partial(_run_partition, function, listener.address)), "outcome binary")
        job = stack.enter_context(
            spark_job(context, lambda: [pickle.loads(row["outcome"]) for row in outcomes.collect()])  # noqa: S301 - made by this job
        )
        while not job.done():
            collector.take(POLL_SECONDS)
        wait([job])
        try:
            messages = job.result()
        except TaskFailed as failure:
            if "FAILED_READ_FILE" in failure.message:
                failure.hint = (
                    "Check that the file is complete and, if it is CSV, that its columns are those of the other files."
                )
            raise
        for message in messages:  # what the channel has not delivered
            collector.process(message)
        collector.take(0)
    return results


def _run_partition(
    function: PartitionFunction[R], address: ChannelAddress, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run one partition inside a Spark worker. Its outcome travels as in `run_tasks`: over the channel, and as the job's row."""
    import pyarrow as pa
    from pyspark import TaskContext as SparkTaskContext

    spark_task = SparkTaskContext.get()
    index, attempt = (spark_task.partitionId(), spark_task.attemptNumber()) if spark_task else (0, 0)
    sender = worker.get(RunSender).to(address)
    outcome: TaskMessage = run_task(
        function, batches, str(index), TaskContext(index, attempt, sender.send, shared=worker)
    )
    sender.send(outcome)
    for _ in batches:  # after an error: Spark waits until its rows are read
        pass
    yield pa.RecordBatch.from_pydict({"outcome": pa.array([pickle.dumps(outcome)], pa.large_binary())})
