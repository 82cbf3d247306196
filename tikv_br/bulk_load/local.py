"""Sorts the rows of an input on threads of this process: sorted runs, in memory or on the disk, and partitions that merge them.

The columns become bytes as in `tikv_br.tasks.frames`, in Arrow's columns instead of Spark's.
"""

from __future__ import annotations

import os
import tempfile
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.bulk_load.inputs import BATCH_ROWS, FileInput, InputPart, NeedsSpark
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.limits import RowLimits
from tikv_br.formats.order import key_order
from tikv_br.progress_events import Reporter
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.tasks.inputs import (
    BAD_TTL,
    DEFAULT_LIMITS,
    EMPTY_KEY,
    LARGE_ROW,
    LONG_KEY,
    NULL_KEY,
    NULL_VALUE,
    Input,
    missing_column,
    unmapped_type,
)
from tikv_br.tasks.task import TaskContext

R = TypeVar("R")
Partition = tuple[KeyRange, ...]
"""Ranges of keys that follow each other, each small enough to be sorted in memory."""
RUN_BYTES = 16 << 20
"""Rows that a thread sorts in memory at once, for a run and when runs are merged. What it allocates stays small enough to be used again."""
MEMORY_BYTES = 512 << 20
"""Size of runs that stay in memory; further ones are on disk."""
RANGE_BYTES = 96 << 20
"""About how much of all runs a partition has."""
SMALL_BYTES = 8 << 20
"""Rows that are not worth a second thread."""
MAX_THREADS = 8
_SAMPLES = 64
"""Minimum number of samples per range; ranges are cut at sampled keys."""
_SAMPLE_BYTES = 64 << 10
_SIGN = np.uint64(1 << 63)
_TTL = r"^[0-9]{1,18}$"
_INTEGERS = {pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()}
_BYTES = {pa.binary(), pa.large_binary(), pa.string(), pa.large_string()}
_UNMAPPED = {
    pa.bool_(): "boolean",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
}
"""Types without a mapping, by Spark's names; what is not here is for Spark to refuse."""
_ORDERED = {pa.bool_(), pa.date32(), pa.timestamp("us"), pa.timestamp("ms"), pa.timestamp("us", "UTC")}


@dataclass
class SortedRuns:
    """The rows of an input as sorted runs. Thread-safe."""

    problems: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be loaded, by the problem; they are in no run."""
    size: int = 0
    """Bytes of all runs."""
    _runs: list[pa.RecordBatch] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: pa.RecordBatch) -> None:
        """Sort some rows, and keep them."""
        rows = _sorted(rows)
        with self._lock:
            self.size += rows.nbytes
            on_disk = self.size > MEMORY_BYTES
        kept = _on_disk(rows) if on_disk else rows
        with self._lock:
            self._runs.append(kept)

    def count(self, problems: Counter[str]) -> None:
        """Add rows that cannot be loaded."""
        with self._lock:
            self.problems += problems

    def partitions(self, count: int | None) -> list[Partition]:
        """Partitions of about the same size: the requested number, or of about `RANGE_BYTES`."""
        at_least = _threads() if self.size >= SMALL_BYTES else 1
        wanted = count or max(-(-self.size // RANGE_BYTES), at_least)
        each = max(-(-self.size // (wanted * RUN_BYTES)), 1)
        step = max(min(_SAMPLE_BYTES, self.size // (wanted * each * _SAMPLES)), 1)
        keys: list[bytes] = []
        for run in self._runs:
            places = np.linspace(0, run.num_rows - 1, min(-(-run.nbytes // step), run.num_rows), dtype=np.int64)
            keys += run["key"].take(pa.array(places)).to_pylist()
        keys.sort()
        pieces = wanted * each
        cuts = sorted({keys[len(keys) * number // pieces] for number in range(1, pieces)} - {b""}) if keys else []
        spans = [KeyRange(*ends) for ends in pairwise([b"", *cuts, b""])]
        return [tuple(spans[first : first + each]) for first in range(0, len(spans), each)]

    def rows(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, as `tikv_br.tasks.frames.sorted_rows` orders them."""
        nothing = pa.nulls(BATCH_ROWS, pa.string())
        for span in partition:
            parts = [part for run in self._runs if (part := _within(run, span)).num_rows]
            for rows in _merged(parts):
                for first in range(0, rows.num_rows, BATCH_ROWS):
                    batch = rows.slice(first, BATCH_ROWS)
                    yield batch.append_column("problem", nothing[: batch.num_rows])


def _sorted(rows: pa.RecordBatch) -> pa.RecordBatch:
    order, signs = key_order(rows["key"])
    if (signs[1:] == 0).any():
        fields = [("rank", "descending"), ("value", "descending"), ("ttl", "descending")]
        order = np.asarray(pc.sort_indices(rows, [("key", "ascending"), *fields]))
    return rows if bool((order[1:] > order[:-1]).all()) else rows.take(pa.array(order))


def _merged(parts: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Parts of runs as rows in order; not even copied, if they follow each other as they are."""
    ends = sorted((part["key"][0].as_py(), part["key"][-1].as_py(), at) for at, part in enumerate(parts))
    if all(last < first for (_, last, _), (first, _, _) in pairwise(ends)):
        return [parts[at] for _, _, at in ends]
    return [_sorted(pa.concat_batches(parts))]


def _within(run: pa.RecordBatch, span: KeyRange) -> pa.RecordBatch:
    keys = run["key"]
    numbers = range(run.num_rows)
    first = bisect_left(numbers, span.start, key=lambda at: keys[at].as_py()) if span.start else 0
    last = bisect_left(numbers, span.end, key=lambda at: keys[at].as_py()) if span.end else run.num_rows
    return run.slice(first, last - first)


def _on_disk(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows as pages of a file that has no name any more: what ends this process removes it."""
    with tempfile.NamedTemporaryFile(prefix="tikv-br-") as file:
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_batch(rows)
        return pa.ipc.open_file(pa.memory_map(file.name)).get_batch(0)


def _threads() -> int:
    return min(os.cpu_count() or 1, MAX_THREADS)


def read_runs(files: FileInput, source: Input, limits: RowLimits = DEFAULT_LIMITS) -> SortedRuns:
    """Read and sort an input. Raises `NeedsSpark`, `StorageError`."""
    runs = SortedRuns()
    pa.set_memory_pool(
        pa.system_memory_pool()
    )  # keeps what is freed, see `keep_freed_memory`: page faults are half the time

    def read(part: InputPart, _: TaskContext) -> None:
        buffer: list[pa.RecordBatch] = []
        size = 0
        for table in part.read():
            problems: Counter[str] = Counter()
            rows = _keyed_rows(table, source, problems, limits)
            runs.count(problems)
            buffer += rows
            size += sum(batch.nbytes for batch in rows)
            if size >= RUN_BYTES:
                runs.add(pa.concat_batches(buffer))
                buffer, size = [], 0
        if buffer:
            runs.add(pa.concat_batches(buffer))

    run_tasks(
        files.parts,
        read,
        options=ExecutorOptions("driver", concurrency=_threads()),
        on_result=lambda _: None,
        name_of=lambda part: part.file.name,
    )
    return runs


def run_partitions(
    runs: SortedRuns,
    partitions: Sequence[Partition],
    function: Callable[[Iterator[pa.RecordBatch], TaskContext], R],
    reporter: Reporter,
    shared: Iterable[object],
) -> list[R]:
    """Run ``function(batches, context)`` once for each partition of the runs; see `tikv_br.tasks.frames.map_partitions`."""
    results: list[R] = []
    run_tasks(
        partitions,
        lambda partition, context: function(runs.rows(partition), context),
        options=ExecutorOptions("driver", concurrency=_threads()),
        on_result=results.append,
        name_of=lambda partition: str(partitions.index(partition)),
        reporter=reporter,
        planned_bytes=[runs.size // len(partitions)] * len(partitions),
        shared=shared,
    )
    return results


def check_columns(files: FileInput, source: Input) -> None:
    """Raise what `tikv_br.tasks.frames.keyed_rows` raises for a missing column or a wrong type, or `NeedsSpark`."""
    _check_bytes(files, "--key-column", source.key_column, is_key=True)
    _check_bytes(files, "--value-column", source.value_column, is_key=False)
    if source.ttl_column:
        kind = _type(files, "--ttl-column", source.ttl_column)
        if kind not in _INTEGERS and not pa.types.is_string(kind):
            raise NeedsSpark("its TTL column is not an integer")
    if source.order_column:
        kind = _type(files, "--order-column", source.order_column)
        if kind not in _INTEGERS | _BYTES | _ORDERED and not pa.types.is_decimal128(kind):
            raise NeedsSpark(f"Spark orders {kind} in its own way")


def _type(files: FileInput, flag: str, name: str) -> pa.DataType:
    if name not in files.schema.names:
        raise missing_column(flag, name, files.columns)
    return files.schema.field(name).type


def _check_bytes(files: FileInput, flag: str, name: str, *, is_key: bool) -> None:
    kind = _type(files, flag, name)
    if kind in _UNMAPPED:
        raise unmapped_type(flag, name, _UNMAPPED[kind], is_key=is_key)
    if kind not in _INTEGERS | _BYTES:
        raise NeedsSpark(f"only Spark maps {kind} to bytes")


def _keyed_rows(table: pa.Table, source: Input, problems: Counter[str], limits: RowLimits) -> list[pa.RecordBatch]:
    """The rows that can be loaded, as ``key``, ``value``, ``ttl`` and ``rank``; the others are counted."""
    key, value = (_bytes_of(table[name]) for name in (source.key_column, source.value_column))
    ttl = _ttl(table[source.ttl_column]) if source.ttl_column else None
    bad = pc.or_kleene(key.is_null(), value.is_null())
    empty = pc.fill_null(pc.equal(pc.binary_length(key), 0), fill_value=False)
    bad = pc.or_(bad, empty)
    ttl_is_wrong = None
    if ttl is not None:
        ttl_is_wrong = pc.fill_null(pc.less_equal(ttl, 0), fill_value=True)
        bad = pc.or_(bad, ttl_is_wrong)
    too_long, too_large = (
        pc.fill_null(each, fill_value=False) for each in (limits.long_keys(key), limits.large_rows(key, value))
    )
    bad = pc.or_(bad, pc.or_(too_long, too_large))
    rank = table[source.order_column] if source.order_column else pa.nulls(table.num_rows, pa.int8())
    ttl = pa.array(np.zeros(table.num_rows, np.int64)) if ttl is None else ttl
    rows = pa.table({"key": key, "value": value, "ttl": ttl, "rank": rank})
    if pc.any(bad).as_py():
        checks = [(NULL_KEY, key.is_null()), (EMPTY_KEY, empty), (NULL_VALUE, value.is_null())]
        if ttl_is_wrong is not None:
            checks.append((BAD_TTL, ttl_is_wrong))
        left = bad
        for problem, mask in [*checks, (LONG_KEY, too_long), (LARGE_ROW, too_large)]:
            found = pc.and_(left, mask)
            problems[problem] += pc.sum(found).as_py()
            left = pc.and_(left, pc.invert(found))
        rows = rows.filter(pc.invert(bad))
    return [batch for batch in rows.to_batches() if batch.num_rows]


def _bytes_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if column.type in _BYTES:
        return column.cast(pa.large_binary())
    numbers = column.cast(pa.int64()).combine_chunks()
    flipped = numbers.fill_null(0).to_numpy().view(np.uint64) ^ _SIGN
    offsets = np.arange(len(numbers) + 1, dtype=np.int64) * 8
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flipped.astype(">u8"))]
    texts = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(numbers), buffers)
    if numbers.null_count:
        texts = pc.if_else(numbers.is_valid(), texts, pa.scalar(None, pa.large_binary()))
    return pa.chunked_array([texts])


def _ttl(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column as int64. Raises `NeedsSpark` for text that is not a plain number: Spark may accept it."""
    if column.type != pa.string():
        return column.cast(pa.int64())
    if not pc.all(pc.match_substring_regex(column, _TTL)).as_py() and len(column.drop_null()):
        raise NeedsSpark("its TTLs are not all plain numbers")
    return column.cast(pa.int64())
