"""Spark SQL: reads any input as a DataFrame, maps its columns to bytes, and runs a function over its partitions in Arrow batches.

The only module that uses Spark SQL. Rows go from Spark's readers through its sort to Python as Arrow batches; there is no Python object
for each row.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar

from tikv_br.errors import SparkUnavailable, TaskFailed, UsageError
from tikv_br.progress_events import Reporter
from tikv_br.tasks.channel import ANY_HOST, ChannelAddress, ProgressListener, RunSender
from tikv_br.tasks.executor import POLL_SECONDS, Collector, worker
from tikv_br.tasks.jobs import by_value, first_cause, spark_job
from tikv_br.tasks.session import NO_SETTINGS, SparkSettings, driver_host, is_local, spark_context
from tikv_br.tasks.task import TaskContext, TaskMessage, run_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

R = TypeVar("R")
PartitionFunction = Callable[["Iterator[pa.RecordBatch]", TaskContext], R]
_SETTINGS = {
    "spark.sql.adaptive.enabled": "false",  # it may merge or split partitions
    "spark.sql.execution.arrow.useLargeVarTypes": "true",  # as `tikv_br.formats.columns`
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),
}
_FORMATS = {
    ".parquet": "parquet",
    ".orc": "orc",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""Spark's formats by the suffix of a path."""
_DEFAULTS = {"csv": {"header": "true", "enforceSchema": "false"}}
"""Options of formats unless others are given: columns need names, and these must be the same in all files."""
AVRO_PACKAGE = "org.apache.spark:spark-avro_2.13:VERSION"
"""Spark's module for Avro, which is not part of pyspark. VERSION is that of the Spark in use."""
NULL_KEY, EMPTY_KEY, NULL_VALUE, BAD_TTL = "null key", "empty key", "null value", "TTL is not a positive integer"


@dataclass(frozen=True, slots=True)
class Input:
    """An input that Spark reads, and the columns to use."""

    path: str
    """A path, folder or glob as Spark takes it."""
    key_column: str
    value_column: str
    ttl_column: str = ""
    """Column with the TTL in seconds; ``""`` = none."""
    order_column: str = ""
    """Column that decides between rows with the same key: the largest value counts; ``""`` = no order."""
    value_encoding: Literal["json", "avro"] = "json"
    """Encoding of a struct in the value column."""
    format: str = ""
    """Name of Spark's format; ``""`` = by the suffix of the path."""
    reader_options: tuple[tuple[str, str], ...] = ()
    """Options of Spark's reader."""

    @property
    def spark_format(self) -> str:
        """Return Spark's name of the format. Raises `UsageError` if neither the option nor the path determines it."""
        if self.format:
            return "json" if self.format == "jsonl" else self.format
        suffixes = [suffix.lower() for suffix in PurePosixPath(self.path).suffixes]
        found = next((_FORMATS[suffix] for suffix in reversed(suffixes) if suffix in _FORMATS), "")
        if not found:
            raise UsageError(
                f"the format of the input {self.path} is unknown",
                hint="Pass --input-format, for example parquet, csv, jsonl or orc.",
            )
        return found


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


def keyed_rows(frame: DataFrame, source: Input) -> DataFrame:
    """Return the rows as ``key``, ``value`` (binary), ``ttl`` (bigint), ``rank`` and ``problem``, a text.

    ``problem`` is null in all others; with it, ``key`` and ``value`` are null. ``ttl`` is 0 without a TTL column, ``rank`` is the order
    column. Raises `UsageError` for a column that is missing or of a wrong type.
    """
    from pyspark.sql import functions

    columns = _Columns.of(frame, source)
    good = columns.problem.isNull()
    rank = _rank(frame, source.order_column) if source.order_column else functions.lit(0)
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


def write_bad_rows(frame: DataFrame, source: Input, folder: str) -> None:
    """Write the rows with a problem to a folder as JSON lines: all columns, and ``_problem``. Replaces the folder."""
    problem = _Columns.of(frame, source).problem
    with _as_usage_errors(f"Spark cannot write the bad rows to {folder}"):
        frame.where(problem.isNotNull()).withColumn("_problem", problem).write.mode("overwrite").json(folder)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Key, value, TTL and problem of an input as Spark's expressions."""

    key: Column
    value: Column
    ttl: Column
    problem: Column

    @classmethod
    def of(cls, frame: DataFrame, source: Input) -> _Columns:
        """Build the expressions for an input. Raises `UsageError`."""
        from pyspark.sql import functions

        key = _bytes_of(frame, "--key-column", source.key_column, is_key=True)
        if source.value_encoding == "avro":
            value = _avro_of(frame, source.value_column)
        else:
            value = _bytes_of(frame, "--value-column", source.value_column, is_key=False)
        ttl = functions.lit(0).cast("bigint")
        problem = (
            functions.when(key.isNull(), functions.lit(NULL_KEY))
            .when(functions.length(key) == 0, functions.lit(EMPTY_KEY))
            .when(value.isNull(), functions.lit(NULL_VALUE))
        )
        if source.ttl_column:
            ttl = _ttl(frame, source.ttl_column)
            problem = problem.when(ttl.isNull() | (ttl <= 0), functions.lit(BAD_TTL))
        return cls(key, value, ttl, problem)


def _column(frame: DataFrame, flag: str, name: str) -> tuple[Column, DataType]:
    """A column and its type. Raises `UsageError` if there is none, or more than one."""
    found = [field.dataType for field in frame.schema.fields if field.name == name]
    if len(found) != 1:
        raise missing_column(flag, name, frame.columns)
    return frame["`" + name.replace("`", "``") + "`"], found[0]


def missing_column(flag: str, name: str, columns: Sequence[str]) -> UsageError:
    """The error for a column that an input does not have, or more than once."""
    problem = "has more than one column" if name in columns else "has no column"
    return UsageError(f"{flag}: the input {problem} {name!r}", hint=f"Its columns are: {', '.join(columns) or 'none'}.")


def unmapped_type(flag: str, name: str, kind: str, *, is_key: bool) -> UsageError:
    """The error for a column of a type without a mapping to bytes; `kind` is Spark's name of the type."""
    allowed = "binary, string or an integer" if is_key else "binary, string, an integer, struct, array or map"
    return UsageError(
        f"{flag}: column {name!r} has type {kind}, which has no mapping to bytes",
        hint=f"The column must be {allowed}: convert it in the input.",
    )


def _bytes_of(frame: DataFrame, flag: str, name: str, *, is_key: bool) -> Column:
    """A column as binary. Raises `UsageError` for a type without a mapping."""
    from pyspark.sql import functions, types

    column, kind = _column(frame, flag, name)
    if isinstance(kind, types.BinaryType):
        return column
    if isinstance(kind, types.StringType):
        return column.cast("binary")
    if isinstance(kind, (types.ByteType, types.ShortType, types.IntegerType, types.LongType)):
        # The sign bit flipped: so the bytes sort as the numbers do.
        flipped = column.cast("bigint").bitwiseXOR(functions.lit(-(1 << 63)).cast("bigint"))
        return functions.unhex(functions.lpad(functions.hex(flipped), 16, "0"))
    if isinstance(kind, (types.StructType, types.ArrayType, types.MapType)) and not is_key:
        return functions.to_json(column, {"ignoreNullFields": "false"}).cast("binary")
    raise unmapped_type(flag, name, kind.simpleString(), is_key=is_key)


def _avro_of(frame: DataFrame, name: str) -> Column:
    """A struct column as binary Avro of a record with its fields. Raises `UsageError` for another type."""
    from pyspark.sql import functions, types

    column, kind = _column(frame, "--value-column", name)
    if not isinstance(kind, types.StructType):
        raise UsageError(
            f"--value-encoding avro: column {name!r} has type {kind.simpleString()}, not struct",
            hint="Leave out --value-encoding, or make a struct of the columns in the input.",
        )
    record = functions.struct(*(column.getField(field.name).alias(field.name) for field in kind.fields))
    # Of the struct itself Avro would make a union with null, as it may be null; a record built of its fields is never null.
    return functions.when(column.isNotNull(), functions.call_function("to_avro", record))


def _ttl(frame: DataFrame, name: str) -> Column:
    """The TTL column as bigint; null for text that is no integer. Raises `UsageError` for another type."""
    from pyspark.sql import types

    column, kind = _column(frame, "--ttl-column", name)
    if isinstance(kind, types.StringType):
        return column.try_cast("bigint")
    if isinstance(kind, (types.ByteType, types.ShortType, types.IntegerType, types.LongType)):
        return column.cast("bigint")
    raise UsageError(
        f"--ttl-column: column {name!r} has type {kind.simpleString()}, not an integer",
        hint="The column must have whole seconds.",
    )


def _rank(frame: DataFrame, name: str) -> Column:
    """The order column. Raises `UsageError` for a type that has no order."""
    from pyspark.sql import types

    column, kind = _column(frame, "--order-column", name)
    if not isinstance(kind, types.AtomicType):
        raise UsageError(
            f"--order-column: column {name!r} has type {kind.simpleString()}, which has no order",
            hint="Pass a column with numbers, times or text.",
        )
    return column


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
