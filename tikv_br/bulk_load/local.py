"""Sorts the rows of an input on threads of this process: sorted runs, in memory or on the disk, and partitions that merge them.

The columns become bytes as in `tikv_br.tasks.frames`, in Arrow's columns instead of Spark's.
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.bulk_load.files import BATCH_ROWS, BadRow, BadRows, FileInput, InputPart, NeedsSpark, Rows
from tikv_br.bulk_load.partition import EXAMPLES
from tikv_br.errors import UsageError
from tikv_br.formats import columns
from tikv_br.formats.errors import InvalidKeyText
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import parse_key
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
    NOT_TEXT,
    NULL_KEY,
    NULL_VALUE,
    TTL_TEXT,
    UNREADABLE,
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
_DIGITS = np.full(256, 255, np.uint8)
"""Value of each hex digit."""
for _value, _signs in enumerate((*b"0123456789", *zip(b"abcdef", b"ABCDEF", strict=True))):
    _DIGITS[np.array(_signs)] = _value
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

    bad: BadRows = field(default_factory=lambda: BadRows(EXAMPLES))
    """Rows that cannot be loaded; they are in no run."""
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

    def count(self, bad: BadRows) -> None:
        """Add rows that cannot be loaded."""
        with self._lock:
            self.bad.problems += bad.problems
            self.bad.examples = sorted([*self.bad.examples, *bad.examples], key=lambda row: (row.file, row.line))[
                :EXAMPLES
            ]

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
                for batch in columns.slices(rows, BATCH_ROWS):
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
    """Read and sort an input. Raises `UsageError`, `StorageError`."""
    runs = SortedRuns()
    pa.set_memory_pool(
        pa.system_memory_pool()
    )  # keeps what is freed, see `keep_freed_memory`: page faults are half the time

    def read(part: _SharedPart, _: TaskContext) -> None:
        buffer: list[pa.RecordBatch] = []
        size = 0
        for parse in part:
            bad = BadRows(EXAMPLES)
            rows = keyed_rows(parse(), source, files.encoding, limits, bad)
            runs.count(bad)
            buffer += rows
            size += sum(batch.nbytes for batch in rows)
            if size >= RUN_BYTES:
                runs.add(pa.concat_batches(buffer))
                buffer, size = [], 0
        if buffer:
            runs.add(pa.concat_batches(buffer))

    threads = _threads()
    run_tasks(
        [shared for part in files.parts for shared in [_SharedPart(part)] * min(part.tasks, threads)],
        read,
        options=ExecutorOptions(executor="driver", concurrency=threads),
        on_result=lambda _: None,
        name_of=lambda _: "reading the input",
    )
    return runs


class _SharedPart:
    """The blocks of a part, for several threads: one at a time finds the next block."""

    def __init__(self, part: InputPart) -> None:
        self.name = part.file.name
        self._part = part
        self._lock = threading.Lock()
        self._blocks: Iterator[Callable[[], Rows]] | None = None

    def __iter__(self) -> Iterator[Callable[[], Rows]]:
        while True:
            with self._lock:
                self._blocks = self._blocks or self._part.blocks()
                parse = next(self._blocks, None)
            if parse is None:
                return
            yield parse


def rank_type(files: FileInput, source: Input) -> pa.DataType:
    """The type of ``rank`` in rows of text."""
    kind = files.schema.field(source.order_column).type if source.order_column else pa.int8()
    return pa.large_binary() if kind in _BYTES else kind


def rows_of_parts(
    source: Input, encoding: str, limits: RowLimits, rank: pa.DataType, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Read parts in a task of Spark: rows as of `tikv_br.tasks.frames.keyed_rows`. Raises nothing: an error is a problem."""
    for bad, rows in _parts_in_spark(source, encoding, limits, batches, EXAMPLES):
        for batch in rows:
            nothing = pa.nulls(batch.num_rows, pa.large_string())
            yield pa.RecordBatch.from_arrays([*batch.columns, nothing, nothing], names=_NAMES)
        places = {each: [str(row) for row in bad.examples if row.problem == each] for each in bad.problems}
        for problem, count in bad.problems.items():
            texts = pa.array([*places[problem], *[None] * (count - len(places[problem]))], pa.large_string())
            kinds = [pa.large_binary(), pa.large_binary(), pa.int64(), rank]
            nothings = [pa.nulls(count, kind) for kind in kinds]
            yield pa.RecordBatch.from_arrays(
                [*nothings, pa.array([problem] * count, pa.large_string()), texts], names=_NAMES
            )


_NAMES = ["key", "value", "ttl", "rank", "problem", "place"]


def bad_rows_of_parts(
    source: Input, encoding: str, limits: RowLimits, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Read parts in a task of Spark, and return only the rows that cannot be loaded: as text, with their place."""
    for bad, _ in _parts_in_spark(source, encoding, limits, batches, math.inf):
        found = [
            {
                "_file": row.file,
                "_line": row.line,
                "_problem": row.problem,
                "_row": row.row.decode("utf-8", "backslashreplace"),
            }
            for row in bad.examples
        ]
        yield pa.RecordBatch.from_pylist(found, BAD_ROWS)


BAD_ROWS = pa.schema(
    {"_file": pa.large_string(), "_line": pa.int64(), "_problem": pa.large_string(), "_row": pa.large_string()}
)


def _parts_in_spark(
    source: Input, encoding: str, limits: RowLimits, batches: Iterable[pa.RecordBatch], examples: float
) -> Iterator[tuple[BadRows, list[pa.RecordBatch]]]:
    for data in (data for batch in batches for data in batch["part"].to_pylist()):
        part: InputPart = pickle.loads(data)  # noqa: S301 - made by this job
        try:
            for parse in part.blocks():
                bad = BadRows(examples)
                rows = keyed_rows(parse(), source, encoding, limits, bad)
                yield bad, rows
        except UsageError as error:
            broken = BadRows(examples)
            broken.add([BadRow(part.file.name, 0, UNREADABLE, None, error.message.encode())])
            yield broken, []


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
        options=ExecutorOptions(executor="driver", concurrency=_threads()),
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
    flag, name = source.expiry
    if name:
        kind = _type(files, flag, name)
        if kind not in _INTEGERS | _BYTES | {pa.uint64()}:
            raise NeedsSpark("its column of seconds is not an integer")
    if source.order_column:
        kind = _type(files, "--order-column", source.order_column)
        is_json_number = source.is_text and kind == pa.float64()
        if not is_json_number and kind not in _INTEGERS | _BYTES | _ORDERED and not pa.types.is_decimal128(kind):
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


def keyed_rows(found: Rows, source: Input, encoding: str, limits: RowLimits, bad: BadRows) -> list[pa.RecordBatch]:
    """The rows that can be loaded, as ``key``, ``value``, ``ttl`` and ``rank``; the others are counted."""
    bad.add(found.bad)
    table = found.table
    key, value = (_bytes_of(table[name]) for name in (source.key_column, source.value_column))
    checks: list[tuple[str, pa.ChunkedArray | pa.Array]] = []
    if found.locate is not None:  # text
        pairs = [
            decoded(each, encoding) if table[name].type in _BYTES else (each, None)
            for name, each in ((source.key_column, key), (source.value_column, value))
        ]
        (key, _), (value, _) = pairs
        checks = [(NOT_TEXT, wrong) for _, wrong in pairs if wrong is not None]
    checks += [
        (NULL_KEY, key.is_null()),
        (EMPTY_KEY, pc.fill_null(pc.equal(pc.binary_length(key), 0), fill_value=False)),
        (NULL_VALUE, value.is_null()),
    ]
    ttl = pa.array(np.zeros(table.num_rows, np.int64))
    if source.expiry[1]:
        ttl, wrong = _seconds(table[source.expiry[1]])
        checks.append((BAD_TTL, wrong))
    for problem, beyond in ((LONG_KEY, limits.long_keys(key)), (LARGE_ROW, limits.large_rows(key, value))):
        checks.append((problem, pc.fill_null(beyond, fill_value=False)))
    rank = table[source.order_column] if source.order_column else pa.nulls(table.num_rows, pa.int8())
    rank = rank.cast(pa.large_binary()) if rank.type in _BYTES else rank
    rows = pa.table({"key": key, "value": value, "ttl": ttl, "rank": rank})
    left: pa.ChunkedArray | None = None
    for problem, mask in checks:
        if not pc.any(mask).as_py():
            continue
        rest = mask if left is None else pc.and_(mask, left)
        left = pc.invert(mask) if left is None else pc.and_(left, pc.invert(mask))
        places = np.flatnonzero(rest.to_numpy(zero_copy_only=False) if isinstance(rest, pa.Array) else rest.to_numpy())
        room = int(min(bad.most - len(bad.examples), len(places))) if found.locate is not None else 0
        if found.locate is not None and room:
            bad.add(found.locate(places[:room].tolist(), problem))
        if len(places) > room:
            bad.problems[problem] += len(places) - room
    if left is not None:
        rows = rows.filter(left)
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


def decoded(column: pa.ChunkedArray, form: str) -> tuple[pa.ChunkedArray, pa.Array | None]:
    """The bytes that texts in a notation stand for, and which texts are wrong; None = no text is."""
    if form == "hex" and (fast := _from_hex(column.combine_chunks())) is not None:
        return pa.chunked_array([fast]), None
    try:
        column.cast(pa.large_string())
    except pa.ArrowInvalid:
        pass
    else:
        if form == "raw" or (form == "escaped" and not pc.any(pc.match_substring(column, "\\")).as_py()):
            return column, None
    texts = [None if text is None else _parsed(text, form) for text in column.to_pylist()]
    wrong = [found is None and text.is_valid for found, text in zip(texts, column, strict=True)]
    array = pa.array([b"?" if bad else found for found, bad in zip(texts, wrong, strict=True)], pa.large_binary())
    return pa.chunked_array([array]), pa.array(wrong)


def _parsed(text: bytes, form: str) -> bytes | None:
    try:
        return parse_key(text.decode(), form)
    except (UnicodeDecodeError, InvalidKeyText):
        return None


def _from_hex(column: pa.LargeBinaryArray) -> pa.LargeBinaryArray | None:
    """None if a text is not valid."""
    offsets, data = columns.view(pc.fill_null(column, b""))
    digits = _DIGITS[data[offsets[0] : offsets[-1]]]
    offsets = offsets - offsets[0]
    if (offsets % 2).any() or (digits > 15).any():
        return None
    found = columns.build(offsets // 2, np.bitwise_or(digits[::2] << np.uint8(4), digits[1::2], dtype=np.uint8))
    return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.large_binary())) if column.null_count else found


def _seconds(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The seconds as int64, 0 for null, and which are no positive integer."""
    is_null = column.is_null()
    if column.type in _BYTES:
        plain = pc.fill_null(pc.match_substring_regex(column.cast(pa.large_binary()), TTL_TEXT), fill_value=False)
        texts = pc.if_else(plain, column.cast(pa.large_binary()), pa.scalar(b"0", pa.large_binary()))
        numbers = texts.cast(pa.large_string()).cast(pa.int64())
    else:
        if column.type == pa.uint64():
            column = pc.if_else(pc.less(column, pa.scalar(1 << 63, pa.uint64())), column, pa.scalar(0, pa.uint64()))
        numbers = pc.fill_null(column.cast(pa.int64()), 0)
    wrong = pc.and_(pc.invert(is_null), pc.less_equal(numbers, 0))
    return numbers, wrong
