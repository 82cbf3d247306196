"""The steps that make a temporary backup out of an input: open it, write sorted SSTs, commit.

Nothing is resumed here: an unfinished staging is discarded and redone, a finished one is restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Struct

from tikv_br.backupset.coverage import keyspace_codec
from tikv_br.bulk_load.partition import (
    EXAMPLES,
    PartitionContext,
    PartitionJob,
    choose_encoding,
    commit,
    write_partition,
)
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.dataflow import steps
from tikv_br.dataflow.plan import Engine
from tikv_br.errors import UsageError
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.resume_options import MayChange, chosen, compared_as
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.url import CloudFlags
from tikv_br.tasks.executor import MIN_SPARK_BYTES
from tikv_br.tasks.frames import (
    kept,
    keyed_rows,
    map_partitions,
    part_rows,
    read_input,
    sorted_rows,
    sql_session,
    write_bad_rows,
)
from tikv_br.tasks.inputs import UNREADABLE, CsvDialect, Input
from tikv_br.tasks.settings import NO_SETTINGS, is_local
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from tikv_br.bulk_load.files import FileInput
    from tikv_br.bulk_load.local import Partition, SortedRuns

R = TypeVar("R")


class StageOptions(Struct, frozen=True):
    """Options of staging, except those in `BackupOptions`. Without an order column, repeated keys are refused."""

    input: Annotated[Input, compared_as("identity")]
    keyspace: Annotated[str, compared_as("identity")] = ""
    """Id or name of the target keyspace (API V2)."""
    bad_rows: Annotated[str, compared_as("identity")] = ""
    """Folder in which a folder gets the rows that cannot be loaded; ``""`` = there must be none."""
    partitions: MayChange[int | None] = None
    """Number of partitions; None = as many as Spark's reader makes, or by their size."""
    clouds: CloudFlags = msgspec.field(default_factory=CloudFlags)
    """Access of this process to an input in a cloud."""

    def identity(self, cluster: ClusterConfig) -> str:
        """A name that is the same for the same target and options that a resumed load must share, and not for others."""
        steps = self.input.path
        base = "" if steps.startswith("/") or ":" in steps else str(Path.cwd())  # a relative path is of this folder
        source = self.input
        # Text has a name of its own: what older versions have staged of it may have other rows.
        more = (*((source.csv, source.encoding) if source.is_text else ()), *filter(None, [source.expiry_column]))
        given = repr((source, base, self.keyspace, bool(self.bad_rows), cluster.pd, *chosen(self), *more))
        return f"load-{hashlib.sha256(given.encode()).hexdigest()[:16]}"


@dataclass
class StageContext(PartitionContext):
    """State of a staging."""

    stage: StageOptions = field(kw_only=True)
    stack: contextlib.ExitStack = field(kw_only=True)
    """Clean-up of the session."""
    files: FileInput | None = None  # open the input
    """Input that this process reads; None = Spark reads it."""
    opened: FileInput | None = None  # open the input
    """Input whose files this process has found, and Spark reads."""
    runs: SortedRuns | None = None  # sort and write
    parts: list[Partition] = field(default_factory=list)  # sort and write
    """Partitions of the runs."""
    session: SparkSession = field(init=False)  # open the input
    frame: DataFrame = field(init=False)  # open the input
    rows: DataFrame = field(init=False)  # open the input
    sorted_rows: DataFrame = field(init=False)  # sort and write
    now: int = 0  # sort and write
    """Seconds since the epoch from which TTLs count, by PD's clock."""
    partitions: int = 0  # sort and write
    reread: bool = False
    """True if the sorted rows are needed again after they are counted."""

    @property
    def limits(self) -> RowLimits:
        """The largest rows that the target's stores accept by puts."""
        return self.cluster.row_limits(self.codec)

    @property
    def hidden(self) -> int:
        """Return the number of files that are left out."""
        files = self.files or self.opened
        return files.hidden if files else 0

    @property
    def base_time(self) -> int:
        """Return the time to which the column of seconds is added: 0 if it has expiries."""
        return 0 if self.stage.input.expiry_column else self.now

    @property
    def problems(self) -> Counter[str]:
        """Rows that cannot be loaded, by the problem."""
        return super().problems + (self.runs.bad.problems if self.runs is not None else Counter[str]())

    @property
    def bad_rows(self) -> list[str]:
        """Some rows that cannot be loaded, with file and line."""
        found = (
            self.runs.bad.examples
            if self.runs is not None
            else chain.from_iterable(map(attrgetter("places"), self.results))
        )
        return list(map(str, found))[:EXAMPLES]

    @property
    def slots(self) -> int:
        """Return the number of partitions processed at once."""
        slots = (os.cpu_count() or 1) if self.runs is not None else self.session.sparkContext.defaultParallelism
        return min(slots, self.partitions)

    def run_partitions(self, function: Callable[[Iterator[pa.RecordBatch], TaskContext], R]) -> list[R]:
        """Run a function over the sorted rows; see `map_partitions`."""
        if self.runs is not None:
            from tikv_br.bulk_load.local import run_partitions

            return run_partitions(self.runs, self.parts, function, self.report, (self.clusters,))
        return map_partitions(
            self.session,
            self.sorted_rows,
            function,
            partitions=self.partitions,
            master=self.options.spark_master,
            reporter=self.report,
        )


def stage_steps(*, dry_run: bool) -> list[Step[StageContext]]:
    """The steps, in order. A dry run reads the input, and writes nothing."""
    checks: list[Step[StageContext]] = [
        FunctionStep("check the input", steps.check_input),
        FunctionStep("connect", steps.connect),
        FunctionStep("check the cluster", check_cluster),
    ]
    open_step = FunctionStep("open the input", open_input)
    if dry_run:
        return [*checks, open_step, FunctionStep("sort and count", write_files)]
    return [
        *checks,
        FunctionStep("check the storage", steps.check_storage),
        open_step,
        FunctionStep("acquire the backup lock", steps.acquire_backup_lock, steps.release_backup_lock),
        FunctionStep("record the run", steps.record_run),
        FunctionStep("sort and write", write_files),
        FunctionStep("check the rows", check_rows),
        FunctionStep("commit", commit),
        FunctionStep("clean up", steps.clean_up),
    ]


def check_cluster(context: StageContext) -> None:
    """Choose the encoding, which is the target's. Raises `UsageError` for TTLs or a keyspace that it does not have."""
    stage, api_version = context.stage, context.info.api_version
    flag, column = stage.input.expiry
    if column and not api_version.has_ttl:
        raise UsageError(
            f"{flag}: the cluster of API {api_version.label} does not support TTLs",
            hint="Use a cluster with storage.enable-ttl or API V2, or leave it out.",
        )
    keyspace_id = chosen_keyspace(context.cluster, stage.keyspace)
    choose_encoding(context, keyspace_codec(api_version, keyspace_id, "--keyspace"))
    context.engine = Engine("load", "rows come from an input", "driver", "its size and format decide", 1)


def open_input(context: StageContext) -> None:
    """Choose who reads the input, and find its columns. Raises `UsageError` if one is missing or has no mapping to bytes."""
    from tikv_br.bulk_load.files import NeedsSpark, open_files
    from tikv_br.bulk_load.local import check_columns

    options, stage = context.options, context.stage
    try:
        context.files = open_files(stage.input, stage.clouds)
        check_columns(context.files, stage.input)
    except NeedsSpark as reason:
        start_spark(context, reason.message)
        return
    if context.files.hidden:
        context.reporter(
            Notice(f"left out, because of names with _ or . at the start: {counted(context.files.hidden, 'file')}")
        )
    size = sum(file.size for file in context.files.files)
    if stage.bad_rows:
        start_spark(context, "Spark writes the rows of --bad-rows")
    elif options.executor == "spark":
        start_spark(context)
    elif options.executor == "auto":
        if not is_local(options.spark_master):
            start_spark(context)
        elif options.spark_settings != NO_SETTINGS:
            start_spark(context, "settings of Spark were passed")
        elif size >= MIN_SPARK_BYTES:
            start_spark(context, f"the input has {size >> 20:,} MiB; Spark pays off from {MIN_SPARK_BYTES >> 20:,} MiB")


def start_spark(context: StageContext, reason: str = "") -> None:
    """Have Spark read the input: start the session that the later steps use, and read the schema. Raises `UsageError` if it must not."""
    options, source, files = context.options, context.stage.input, context.files
    if options.executor == "driver":
        from tikv_br.bulk_load.files import NeedsSpark

        raise NeedsSpark(f"--executor driver: this process cannot read the input: {reason}")
    if options.executor == "auto" and reason:
        context.reporter(Notice(f"Spark reads the input: {reason}"))
    began = time.monotonic()
    context.session = context.stack.enter_context(sql_session(options.spark_master, options.spark_settings))
    context.session_seconds = time.monotonic() - began
    if files is not None and source.is_text:
        context.rows = text_rows(context, files, context.limits)
    else:
        if source.is_text and (source.csv != CsvDialect() or source.encoding not in {None, "raw"}):
            raise UsageError(
                f"Spark's own reader is needed: {reason}; it does not know --csv-… and --encoding",
                hint="Pass its options with --input-option, or a local path or a URL of S3, GCS or Azure as for --storage.",
            )
        context.frame = read_input(context.session, source, [file.name for file in files.files] if files else [])
        context.rows = keyed_rows(context.frame, source, context.limits)
    context.opened, context.files = files, None


def text_rows(context: StageContext, files: FileInput, limits: RowLimits) -> DataFrame:
    """The rows of CSV or JSON lines, which tasks of Spark read as threads of this process do."""
    import pyarrow as pa

    from tikv_br.bulk_load.local import rank_type, rows_of_parts

    source = context.stage.input
    rank = rank_type(files, source)
    types = (pa.large_binary(), pa.large_binary(), pa.int64(), rank, pa.large_string(), pa.large_string())
    schema = pa.schema(list(zip(("key", "value", "ttl", "rank", "problem", "place"), types, strict=True)))
    return part_rows(context.session, files.parts, partial(rows_of_parts, source, files.encoding, limits, rank), schema)


def sort_rows(context: StageContext) -> None:
    """Sort the rows, or have Spark sort them when they are read."""
    if context.files is not None:
        from tikv_br.bulk_load.local import read_runs

        context.runs = read_runs(context.files, context.stage.input, context.limits)
        context.parts = context.runs.partitions(context.stage.partitions)
        context.partitions = len(context.parts)
        return
    context.partitions = context.stage.partitions or max(context.rows.rdd.getNumPartitions(), 1)
    context.sorted_rows = sorted_rows(context.rows, context.partitions)
    if context.reread:
        context.stack.enter_context(kept(context.sorted_rows))


def write_files(context: StageContext) -> None:
    """Sort the rows and write the files; a dry run only counts."""
    context.now = context.cluster.clock.now()
    options, now = context.options, context.base_time
    job = PartitionJob(options, context.conversion, context.source_ranges[0], now, dry_run=options.dry_run)
    sort_rows(context)
    context.results = context.run_partitions(partial(write_partition, job))


def check_rows(context: StageContext) -> None:
    """Refuse bad rows and duplicates unless they are allowed, and an input without rows."""
    stage = context.stage
    bad = context.problems.total()
    examples = "; ".join(map(str, context.bad_rows))
    if context.problems[UNREADABLE]:
        raise UsageError(
            f"the input has a file that cannot be read: {examples}", hint="Correct the file, or pass its dialect."
        )
    if bad and not stage.bad_rows:
        problems = ", ".join(f"{count:,} with {problem}" for problem, count in sorted(context.problems.items()))
        raise UsageError(
            f"the input has {counted(bad, 'row')} that cannot be loaded: {problems}; {examples}",
            hint="Correct the input, or pass --bad-rows DIR to write these rows there and load the others.",
        )
    if context.duplicates and not stage.input.order_column:
        keys = ", ".join(map(show_key, context.duplicate_keys))
        raise UsageError(
            f"the input has {counted(context.duplicates, 'row')} with a key that another row has, for example {keys}",
            hint="Correct the input, or pass --on-duplicate last --order-column COLUMN to load only the last row of each key.",
        )
    if not any(each.rows.total_kvs for each in context.results):
        raise UsageError("the input has no rows to load", hint="Check the path or glob of --input.")
    if bad:
        folder = f"{stage.bad_rows.rstrip('/')}/{stage.identity(context.options.cluster)}"
        write_rejected(context, folder)
        context.reporter(Notice(f"{counted(bad, 'row')} cannot be loaded, see {folder}"))


def write_rejected(context: StageContext, folder: str) -> None:
    """Have Spark write the rows that cannot be loaded."""
    source, files = context.stage.input, context.opened
    if files is None or not source.is_text:
        write_bad_rows(context.frame, source, folder, context.limits)
        return
    from tikv_br.bulk_load.local import BAD_ROWS, bad_rows_of_parts

    function = partial(bad_rows_of_parts, source, files.encoding, context.limits)
    write_bad_rows(part_rows(context.session, files.parts, function, BAD_ROWS), None, folder)
