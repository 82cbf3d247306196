"""Loads rows that Spark hands over task by task, in no order: tasks stage sorted runs, one process merges them and ingests the result.

A Spark data source has no session when it commits, so Spark cannot sort. Runs are Parquet files below ``runs/`` of the staging folder, the
temporary backup made of them is below ``backup/``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tikv_br.backupset import layout
from tikv_br.backupset.files import FileEntry, FileWriter
from tikv_br.backupset.rows import read_rows
from tikv_br.bulk_load.partition import (
    EXAMPLES,
    PartitionContext,
    PartitionJob,
    PartitionResult,
    choose_encoding,
    commit,
    write_partition,
)
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow import steps
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine, plan_by_sizes
from tikv_br.dataflow.read import file_sizes
from tikv_br.dataflow.run import remove_temporary, run_backup
from tikv_br.errors import Failure, UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Reporter, silent
from tikv_br.report.facts import counted
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.inputs import LARGE_ROW, LONG_KEY
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa

RUN_BYTES = 128 << 20
"""Rows that a task sorts in memory and writes as one run; it needs about three times that."""
MERGE_BYTES = 96 << 20
"""About how much of all runs a thread sorts in memory when they are merged."""
GROUP_BYTES = 4 << 20
"""Size of a row group of a run: ranges are cut at starts of row groups."""
RUNS, BACKUP = "runs", "backup"


@dataclass(frozen=True, slots=True)
class RunsOptions:
    """Options of one load."""

    cluster: ClusterConfig
    codec: KeyCodec
    """Codec of the target."""
    staging: StorageLocation
    """A folder for this load only."""
    allow_overwrite: bool = False
    allow_followers: bool = False
    limits: RowLimits = field(default_factory=RowLimits)
    """The largest rows that the target's stores accept by puts."""

    @property
    def backup(self) -> StorageLocation:
        """Location of the temporary backup."""
        return self.staging.child(BACKUP)


def write_runs(options: RunsOptions, batches: Iterable[pa.RecordBatch]) -> tuple[FileEntry, ...]:
    """Write the rows of a task, batches of `tikv_br.formats.columns.SCHEMA`, as sorted runs.

    Raises `UsageError` for an empty key, or a key that a run has twice, `StorageError`.
    """
    runs: list[FileEntry] = []
    buffer: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            buffer.append(batch)
            size += batch.nbytes
        if size >= RUN_BYTES:
            runs.append(_write_run(options, buffer))
            buffer, size = [], 0
    if buffer:
        runs.append(_write_run(options, buffer))
    return tuple(runs)


def _write_run(options: RunsOptions, batches: Sequence[pa.RecordBatch]) -> FileEntry:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from tikv_br.formats import columns, parquet
    from tikv_br.formats.kernels.order import compare_neighbours

    rows = _by_key(batches)
    keys = rows["key"]
    repeated = compare_neighbours(*columns.view(keys)) == 0
    repeated[0] = False
    if (count := int(np.count_nonzero(repeated))) > 0:
        raise _duplicates(count, keys.take(np.flatnonzero(repeated)[:EXAMPLES]).to_pylist())
    for problem, mask in (
        (LONG_KEY, options.limits.long_keys(keys)),
        (LARGE_ROW, options.limits.large_rows(keys, rows["value"])),
    ):
        if count := pc.sum(mask).as_py():
            key = keys[pc.index(mask, pa.scalar(value=True)).as_py()].as_py()
            raise UsageError(
                f"the DataFrame has {counted(count, 'row')} with {problem}, for example {show_key(key)}",
                hint="Leave such rows out: stores refuse to write and to delete them by puts.",
            )
    if not keys[0].as_py():
        raise UsageError("a row has an empty key", hint="Correct the DataFrame.")
    with FileWriter(open_store(options.staging), f"{RUNS}/{secrets.token_hex(8)}.parquet") as file:
        parquet.write_rows(file.write, rows, max(GROUP_BYTES * rows.num_rows // rows.nbytes, 1))
        stored = file.close()
    return FileEntry(
        **stored._asdict(),
        start_key=options.codec.rpc_key(keys[0].as_py()),
        end_key=options.codec.rpc_key(keys[-1].as_py() + b"\0"),
        crc64xor=0,
        total_kvs=rows.num_rows,
        total_bytes=rows.nbytes,
    )


def remove_runs(options: RunsOptions) -> None:
    """Remove the runs that tasks have written. Raises `StorageError`."""
    store = open_store(options.staging)
    for info in list(store.list(RUNS)):
        store.delete(info.name)
    store.sweep("", deep=True)


def load_runs(options: RunsOptions, runs: Sequence[FileEntry], reporter: Reporter = silent) -> RestoreSummary | None:
    """Merge runs and ingest their rows; None if there are none. Removes what is staged, unless an ingest that has begun fails.

    `UsageError` for keys that several rows have, and errors of a target that is away or not empty, are raised before the target changes.
    Raises `TikvBrError`.
    """
    if not runs:
        remove_runs(options)  # of tasks that were run again, and had no rows then
        return None
    output = BackupOptions(options.cluster, options.backup, executor="driver")
    store = open_store(options.backup)
    try:
        run_backup(RunsContext(output, reporter, listed=False, load=options, runs=tuple(runs)), merge_steps())
    finally:
        remove_runs(options)
    try:
        wanted = RestoreOptions(
            options.cluster,
            options.backup,
            allow_overwrite=options.allow_overwrite,
            allow_followers=options.allow_followers,
            by_name=False,
            command="ingest from Spark",
        )
        done = restore(wanted, reporter)
    except Failure as error:
        if any(store.list(layout.RESTORE)):
            error.hint += (
                f" The rows are staged: `tikv-br restore raw --storage {options.backup.redacted()}` continues."
            )
        else:
            remove_temporary(store)
            remove_runs(options)
        raise
    remove_temporary(store)
    remove_runs(options)  # the folder, too
    return done


@dataclass
class RunsContext(PartitionContext):
    """State of a merge of runs."""

    load: RunsOptions = field(kw_only=True)
    runs: tuple[FileEntry, ...] = field(kw_only=True)


def merge_steps() -> list[Step[RunsContext]]:
    """The steps that make the temporary backup, in order."""
    return [
        FunctionStep("check the input", steps.check_input),
        FunctionStep("connect", steps.connect),
        FunctionStep("check the cluster", check_cluster),
        FunctionStep("check the storage", steps.check_storage),
        FunctionStep("acquire the backup lock", steps.acquire_backup_lock, steps.release_backup_lock),
        FunctionStep("record the run", steps.record_run),
        FunctionStep("merge and write", merge_runs),
        FunctionStep("check the rows", check_rows),
        FunctionStep("commit", commit),
        FunctionStep("clean up", steps.clean_up),
    ]


def check_cluster(context: RunsContext) -> None:
    """Write rows as the target holds them."""
    choose_encoding(context, context.load.codec)
    slots = os.cpu_count() or 1
    context.engine = Engine("load", "rows come from a DataFrame", "driver", "Spark is not there to sort them", slots)


def merge_runs(context: RunsContext) -> None:
    """Sort the rows of all runs, range by range, and write the files."""
    runs, load = context.runs, context.load
    start, end = min(run.start_key for run in runs), max(run.end_key for run in runs)
    sizes = file_sizes(open_store(load.staging), load.codec.api_version, runs)
    intervals = plan_by_sizes(KeyRange(start, end), sizes, MERGE_BYTES)
    plan = [each.span for each in intervals]
    job = PartitionJob(context.options, context.conversion, context.source_ranges[0], context.cluster.clock.now())
    run_tasks(
        plan,
        partial(merge_range, job, load, runs),
        options=ExecutorOptions(executor="driver", concurrency=context.engine.slots),
        on_result=context.results.append,
        reporter=context.report,
        planned_bytes=[each.size for each in intervals],
    )


def merge_range(
    job: PartitionJob, load: RunsOptions, runs: Sequence[FileEntry], span: KeyRange, context: TaskContext
) -> PartitionResult:
    """Write the files of a range of RPC keys."""
    return write_partition(job, _sorted_rows(job.now, load, runs, span), context)


def _sorted_rows(now: int, load: RunsOptions, runs: Sequence[FileEntry], span: KeyRange) -> Iterator[pa.RecordBatch]:
    """The rows of a range that have not expired, in the columns that `write_partition` takes."""
    import numpy as np
    import pyarrow as pa

    from tikv_br.formats import columns
    from tikv_br.formats.rows import unexpired

    store = open_store(load.staging)
    parts = ((run, intersection(run.key_range, span)) for run in runs)
    found = [rows for run, part in parts if not part.is_empty for rows in read_rows(store, run, load.codec, part)]
    if not found:
        return
    rows = unexpired(_by_key(found), now)
    expire_ts = columns.numbers(rows["expire_ts"])
    ttl = np.where(expire_ts == 0, 0, expire_ts - np.uint64(now)).astype(np.uint64)
    fields = {
        "key": rows["key"],
        "value": rows["value"],
        "ttl": pa.array(ttl),
        "problem": pa.nulls(len(ttl), pa.string()),
    }
    yield from pa.Table.from_pydict(fields).to_batches()


def check_rows(context: RunsContext) -> None:
    """Refuse repeated keys, and an input without rows, for example because all have expired in the meantime."""
    if context.duplicates:
        raise _duplicates(context.duplicates, context.duplicate_keys)
    if not any(each.files for each in context.results):
        raise UsageError("all rows have expired", hint="Write them with a later expire_ts.")


def _by_key(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.concat_batches(batches)
    return rows.take(pc.sort_indices(rows["key"]))


def _duplicates(count: int, keys: Iterable[bytes]) -> UsageError:
    return UsageError(
        f"the DataFrame has {counted(count, 'row')} with a key that another row has, for example {', '.join(map(show_key, keys))}",
        hint='Keep one row of each key, with dropDuplicates(["key"]) for example.',
    )
