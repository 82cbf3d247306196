"""Sorts changes by timestamp and key: in memory up to a limit, beyond it with sorted runs on disk, which are read from the front and merged."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tikv_br.errors import StorageFull
from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.formats.order import drop_repeated
from tikv_br.storage.local import Hints, storage_errors

if TYPE_CHECKING:
    from tikv_br.formats.kernels.order import Signs


ROW_BYTES = 33
"""Estimated size of a row in a batch besides its key and value."""
_SEED = np.frombuffer(os.urandom(8), np.uint64)[0]
"""Random, so that clients cannot choose keys that collide in the hash table."""


def in_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows by ascending ts, then key; of rows with the same ts and key, only the last.

    Most of these are duplicates. But if one request writes a key twice, both rows have the same ts, and the cluster keeps the
    last one. So `batches` must be in order of arrival.
    """
    rows = concatenate(batches)
    if rows.num_rows < 2:
        return rows
    ts = columns.numbers(rows["ts"])
    if (ts[1:] < ts[:-1]).any():
        rows = rows.take(pa.array(np.argsort(ts, kind="stable")))
    signs = _signs(rows)
    if (signs < 0).any():  # rows of one request are mostly in order of key already
        rows = rows.take(pc.sort_indices(rows, sort_keys=[("ts", "ascending"), ("key", "ascending")]))  # a stable sort
        signs = _signs(rows)
    return drop_repeated(rows, signs == 0)


def _signs(rows: pa.RecordBatch) -> Signs:
    """Return the order of each row's key relative to the row before (-1, 0, 1); 1 where the ts changes."""
    from tikv_br.formats.kernels.order import compare_neighbours

    ts = columns.numbers(rows["ts"])
    signs = compare_neighbours(*columns.view(rows["key"]))
    signs[1:][ts[1:] != ts[:-1]] = 1
    return signs


def last_of_keys(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each key, without changing the order."""
    from tikv_br.formats.kernels.order import last_of_keys as kernel

    last = kernel(*columns.view(rows["key"]), _SEED)
    return rows if last.all() else rows.filter(pa.array(last))


def concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows as one batch, without changing the order."""
    filled = [batch for batch in batches if batch.num_rows]
    if not filled:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    return filled[0] if len(filled) == 1 else pa.concat_batches(filled)


def split_at(rows: pa.RecordBatch, ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The rows up to a ts, and those after it, without changing the order in each part."""
    early = columns.numbers(rows["ts"]) <= np.uint64(ts)
    if early.all():
        return rows, rows.slice(rows.num_rows)
    if not early.any():
        return rows.slice(0, 0), rows
    return rows.filter(pa.array(early)), rows.filter(pa.array(~early))


def pieces(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about `size` bytes: merges small batches and splits large ones.

    The given batches must be in order, and no ts may be in two of them; the same holds for the result.
    """
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(part.nbytes for part in pending) >= size:
            yield from _split(concatenate(pending), size)
            pending = []
    if pending:
        yield from _split(concatenate(pending), size)


def _split(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Split only between two ts: a part is larger than `size` if the rows of one ts are."""
    ts = columns.numbers(rows["ts"])
    ends = np.cumsum(columns.row_sizes(rows) + ROW_BYTES)
    first = 0
    while first < rows.num_rows:
        start = ends[first - 1] if first else 0
        last = min(max(int(np.searchsorted(ends, start + size)), first), rows.num_rows - 1)
        end = int(np.searchsorted(ts, ts[last], side="right"))
        yield rows.slice(first, end - first)
        first = end


EXHAUSTED = MAX_TS + 1
"""`first_ts` of an empty run: higher than any ts."""
_HINTS: Hints = {StorageFull: "Free space there, or pass another directory for the sorter."}


class Run(Protocol):
    """Sorted rows, read from the front in chunks; no ts is in two chunks."""

    @property
    def first_ts(self) -> int:
        """The ts of the next row; `EXHAUSTED` if there is none."""

    @property
    def chunk_ts(self) -> int:
        """The last ts of the next chunk, which this loads."""

    def pop(self, ts: int) -> pa.RecordBatch:
        """Remove and return the rows up to a ts, at most `chunk_ts`."""

    def close(self) -> None:
        """Release memory and disk space."""


class MemoryRun(Run):
    """A run of one chunk, in memory."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        """`rows` must be sorted."""
        self._rows = rows

    @property
    def first_ts(self) -> int:
        return _ts_at(self._rows, 0) if self._rows.num_rows else EXHAUSTED

    @property
    def chunk_ts(self) -> int:
        return _ts_at(self._rows, -1)

    def pop(self, ts: int) -> pa.RecordBatch:
        rows, self._rows = _split_sorted(self._rows, ts)
        return rows

    def close(self) -> None:
        self._rows = self._rows.slice(0, 0)


class DiskRun(Run):
    """A run on disk, with at most one chunk in memory. Raises `StorageFull` and other `StorageError`."""

    def __init__(self, directory: Path, chunks: Iterable[pa.RecordBatch], level: int = 0) -> None:
        """Write sorted chunks; no ts may be in two of them. `level` is the number of merges that led to this run."""
        self.level = level
        self._chunk: pa.RecordBatch | None = None
        self._next = 0
        self._first: list[int] = []
        with storage_errors(f"the sorter's file in {directory}", "written", _HINTS):
            self._file = tempfile.TemporaryFile(dir=directory, prefix="sorter-")  # noqa: SIM115 - open until `close`
            try:
                self._write(chunks)
            except BaseException:
                self._file.close()
                raise
        self._directory = directory
        self.size = self._file.tell()
        """Size on disk, in bytes."""
        self._reader = pa.ipc.open_file(pa.PythonFile(self._file, mode="r"))

    @property
    def first_ts(self) -> int:
        if self._chunk is not None:
            return _ts_at(self._chunk, 0)
        return self._first[self._next] if self._next < len(self._first) else EXHAUSTED

    @property
    def chunk_ts(self) -> int:
        return _ts_at(self._front(), -1)

    def pop(self, ts: int) -> pa.RecordBatch:
        rows, rest = _split_sorted(self._front(), ts)
        self._chunk = rest if rest.num_rows else None
        return rows

    @property
    def is_empty(self) -> bool:
        return self.first_ts == EXHAUSTED

    def close(self) -> None:
        self._chunk, self._next = None, len(self._first)
        with suppress(OSError):
            self._file.close()

    def _write(self, chunks: Iterable[pa.RecordBatch]) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), SCHEMA, options=options) as writer:
            for chunk in chunks:
                self._first.append(_ts_at(chunk, 0))
                writer.write_batch(chunk)
        self._file.flush()

    def _front(self) -> pa.RecordBatch:
        if self._chunk is None:
            with storage_errors(f"the sorter's file in {self._directory}", "read", _HINTS):
                self._chunk = self._reader.get_batch(self._next)
            self._next += 1
        return self._chunk


def merge(runs: Iterable[Run], ts: int) -> Iterator[pa.RecordBatch]:
    """Remove all rows up to a ts from the runs and yield them in sorted batches; no ts is in two batches."""
    runs = list(runs)
    while active := [run for run in runs if run.first_ts <= ts]:
        bound = min(ts, *(run.chunk_ts for run in active))
        yield in_order([run.pop(bound) for run in active if run.first_ts <= bound])


def _split_sorted(rows: pa.RecordBatch, ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Sorted rows up to a ts, and the rest, without copying."""
    count = int(np.searchsorted(columns.numbers(rows["ts"]), np.uint64(ts), side="right"))
    return rows.slice(0, count), rows.slice(count)


def _ts_at(rows: pa.RecordBatch, at: int) -> int:
    return int(columns.numbers(rows["ts"])[at])


log = logging.getLogger(__name__)

BATCH_OVERHEAD = 2048
"""Estimated memory of a batch besides its buffers; a feed may deliver single rows."""
FAN_IN = 8
"""Number of runs of one level that are merged into one of the next level."""
SHARE = 4
"""Memory is divided into four equal parts: rows just added, two for sorting them, and chunks of the runs on disk."""
FRONTS = 3 * FAN_IN
"""Maximum number of runs on disk read at once: enough for 500 times the rows in memory."""


class Sorter:
    """Holds changes between feed and sink, and sorts them by ts. Not thread-safe.

    Uses at most about ``memory_bytes``, provided that one chunk for each of some dozens of runs fits into it. Further rows
    are written to unnamed files in ``directory``, which the kernel removes if the process is killed. Raises `StorageFull` and
    other `StorageError` for the directory.
    """

    def __init__(self, memory_bytes: int, directory: Path, *, all_versions: bool = False) -> None:
        """Create a sorter; with `all_versions`, `take` yields every version of a key."""
        self._all_versions = all_versions
        self._max_bytes = max(memory_bytes // SHARE, 1)
        self._chunk_bytes = max(self._max_bytes // FRONTS, 1)
        self._directory = directory
        self._added: list[pa.RecordBatch] = []
        self._added_bytes = 0
        self._runs: list[DiskRun] = []
        self._taken_ts = 0
        self._warned_ts = -1
        self.late_rows = 0
        """Rows that arrived after `take` of their ts, because the feed's resolved-ts was wrong."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def memory_bytes(self) -> int:
        """Size of rows in memory, without the chunks of runs on disk."""
        return self._added_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(run.size for run in self._runs)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of `SCHEMA` in any order, possibly with duplicates; ts 0 is not allowed."""
        if not batch.num_rows:
            return
        late = int(np.count_nonzero(columns.numbers(batch["ts"]) <= np.uint64(self._taken_ts)))
        if late:
            self.late_rows += late
            if self._warned_ts < self._taken_ts:  # once for each resolved-ts, not for each batch
                log.warning(
                    "the feed delivered rows below its resolved-ts %d (%d rows so far)", self._taken_ts, self.late_rows
                )
            self._warned_ts = self._taken_ts
        self._added.append(batch)
        self._added_bytes += _memory_of(batch)
        if self._added_bytes > self._max_bytes:
            self._spill()

    def take(self, resolved_ts: int) -> Iterator[pa.RecordBatch]:
        """Remove and yield the rows up to a ts: sorted by ts, without duplicates. Of each key a batch has only the last row, unless `all_versions`.

        All rows of one ts are in the same batch. So once a batch is written, everything up to the ts of its last row is.
        Consume the iterator before the next call; rows that it has not yielded are lost.
        """
        self._taken_ts = max(self._taken_ts, resolved_ts)
        windows = merge([*self._runs, self._resolved(resolved_ts)], resolved_ts)  # runs in order of arrival
        for rows in pieces(windows, self._chunk_bytes):
            yield rows if self._all_versions else last_of_keys(rows)
        self._drop_empty()

    def close(self) -> None:
        """Drop all rows and remove the files."""
        for run in self._runs:
            run.close()
        self._runs = []
        self._set_added([])

    def _resolved(self, ts: int) -> MemoryRun:
        """The rows in memory up to a ts, which are removed from it."""
        parts = [split_at(batch, ts) for batch in self._added]
        self._set_added([late for _, late in parts if late.num_rows])
        return MemoryRun(in_order([early for early, _ in parts]))

    def _spill(self) -> None:
        """Free memory: merge the small batches into one, and write it to disk if that is not enough."""
        rows = in_order(self._added)
        self._set_added([rows])
        if self._added_bytes <= self._max_bytes // 2:
            return
        self._set_added([])
        self._runs.append(DiskRun(self._directory, pieces([rows], self._chunk_bytes)))
        del rows
        level = 0
        while len(same := [run for run in self._runs if run.level == level]) >= FAN_IN:
            chunks = pieces(merge(same, MAX_TS), self._chunk_bytes)
            merged = DiskRun(self._directory, chunks, level + 1)
            self._runs.append(merged)
            self._drop_empty()
            level += 1

    def _set_added(self, batches: list[pa.RecordBatch]) -> None:
        self._added = batches
        self._added_bytes = sum(map(_memory_of, batches))

    def _drop_empty(self) -> None:
        for run in [run for run in self._runs if run.is_empty]:
            run.close()
            self._runs.remove(run)


def _memory_of(batch: pa.RecordBatch) -> int:
    return int(batch.get_total_buffer_size()) + BATCH_OVERHEAD
