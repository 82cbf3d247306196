"""Spark SQL: reads any input as a DataFrame, maps its columns to bytes, and runs a function over its partitions in Arrow batches.

The only module that uses Spark SQL. Rows go from Spark's readers through its sort to Python as Arrow batches; there is no Python object
for each row.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from tikv_br.errors import SparkUnavailable, TaskFailed, UsageError
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Reporter
from tikv_br.tasks.channel import ANY_HOST, ChannelAddress, ProgressListener, RunSender
from tikv_br.tasks.executor import POLL_SECONDS, worker
from tikv_br.tasks.inputs import DEFAULT_LIMITS, Input, InputColumns, rank_of
from tikv_br.tasks.session import by_value, driver_host, first_cause, spark_context, spark_job
from tikv_br.tasks.settings import NO_SETTINGS, SparkSettings, is_local
from tikv_br.tasks.task import Collector, TaskContext, TaskMessage, run_task

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
_DEFAULTS = {
    "csv": {"header": "true", "enforceSchema": "false", "multiLine": "true", "escape": '"', "mode": "FAILFAST"},
    "json": {"mode": "FAILFAST"},
}
"""Options of formats unless others are given: columns have names, which are the same in all files; CSV is as in RFC 4180."""
_FILES = {"parquet", "orc", "csv", "json", "avro", "text"}
"""Formats whose inputs are folders of files."""
AVRO_PACKAGE = "org.apache.spark:spark-avro_2.13:VERSION"
"""Spark's module for Avro, which is not part of pyspark. VERSION is the version of the Spark in use."""


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


def read_input(session: SparkSession, source: Input, files: Sequence[str] = ()) -> DataFrame:
    """The input, of which only the schema is read yet: all files at any depth, or partitions in names of folders.

    Raises `UsageError` if Spark cannot read it, if it would leave out a file, or finds others than ``files``.
    """
    name = source.spark_format
    place: str | list[str] = source.path
    if files and re.search(r"[*?]", source.path):  # a pattern of Spark also finds what is hidden
        place = [re.sub(r"([*?{}\[\]\\])", r"\\\1", file) for file in files]
    options = {**_DEFAULTS.get(name, {}), **dict(source.reader_options)}
    with _as_usage_errors(f"Spark cannot read {source.path} as {name}"):
        if name not in _FILES:
            return session.read.format(name).options(**options).load(place)
        frame = session.read.format(name).options(**{"recursiveFileLookup": "true", **options}).load(place)
        every = [unquote(file) for file in frame.inputFiles()]
        marks = [f"/{column}=" for _, column in source.used_columns if column not in frame.columns]
        inside = [file for file in every if all(mark in file for mark in marks)]
        if marks and inside:  # folders with partitions; Spark leaves out what is beside them
            if outside := sorted(set(every) - set(inside)):
                raise UsageError(
                    f"the input has {len(outside):,} files that are not in folders named {marks[0][1:]}…, such as {outside[0]}",
                    hint="Move them, or load them by a command of their own.",
                )
            frame = session.read.format(name).options(**options).load(place)
        if not files and name in {"parquet", "orc"}:
            full = session.read.format("binaryFile").option("recursiveFileLookup", "true").load(place).select("path")
            names = {_path(row["path"]) for row in full.collect()}
            if empty := sorted(file for file in every if _path(file) not in names):
                raise UsageError(
                    f"{', '.join(empty[:5])} of the input has no bytes, and so is no {name}",
                    hint="Write it again, or remove it from the folder.",
                )
    if files and len(every) != len(files):
        raise UsageError(
            f"Spark finds {len(every):,} files in {source.path}, but {len(files):,} are there",
            hint="Pass a path without links and signs that Spark interprets, or --executor driver.",
        )
    return frame


def _path(url: str) -> str:
    """A URL of a file in one form: Spark has several."""
    return unquote(re.sub(r"^(\w+):/+", r"\1:/", url))


def part_rows(
    session: SparkSession,
    parts: Sequence[object],
    function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """The rows that a function reads from parts, a task for each: it gets batches with the column ``part``, pickled."""
    from pyspark.sql.pandas.types import from_arrow_schema

    pickled = session.sparkContext.parallelize([(pickle.dumps(part),) for part in parts], max(len(parts), 1))
    return session.createDataFrame(pickled, "part binary").mapInArrow(by_value(function), from_arrow_schema(schema))


def keyed_rows(frame: DataFrame, source: Input, limits: RowLimits = DEFAULT_LIMITS) -> DataFrame:
    """Return the rows as ``key``, ``value`` (binary), ``ttl`` (bigint), ``rank``, ``problem``, a text, and ``place``.

    ``problem`` is null in rows that can be loaded; with it, ``key`` and ``value`` are null. ``ttl`` is 0 without a TTL column, ``rank`` is the order
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
            functions.lit(None).cast("string").alias("place"),
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


def write_bad_rows(frame: DataFrame, source: Input | None, folder: str, limits: RowLimits = DEFAULT_LIMITS) -> None:
    """Write the rows with a problem to a folder as JSON lines: all columns, and ``_problem``. Replaces the folder.

    ``source`` None = the frame has nothing else.
    """
    with _as_usage_errors(f"Spark cannot write the bad rows to {folder}"):
        if source is not None:
            problem = InputColumns.of(frame, source, limits).problem
            frame = frame.where(problem.isNotNull()).withColumn("_problem", problem)
        frame.write.mode("overwrite").json(folder)


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
                    "Check that the file is complete and, if it is CSV, that it has the columns of the other files."
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
