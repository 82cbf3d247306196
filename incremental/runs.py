"""Sorted runs: changes in order, on disk or in memory, that are taken from the front.

A run on disk is an Arrow IPC file without a name: it is unlinked while it is open, so that however the process ends the
disk gets its space back and no file is left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from formats import columns
from formats.keys import MAX_TS
from formats.records import SCHEMA
from incremental import order
from tikv_br.errors import StorageFull
from tikv_br.storage.disk_errors import Hints, disk_errors

EXHAUSTED = MAX_TS + 1
"""Stands for the ts of a row that is not there: later than any."""

_HINTS: Hints = {StorageFull: "Free space there, or have the sorter work in another directory."}


class Run(Protocol):
    """Rows in order, taken from the front in chunks that end where the ts changes."""

    @property
    def first_ts(self) -> int:
        """Of the next row; `EXHAUSTED` when there is none."""

    @property
    def chunk_ts(self) -> int:
        """Up to which all rows are in the chunk at the front, which is read for that."""

    def pop(self, ts: int) -> pa.RecordBatch:
        """Take the rows up to a ts, no later than `chunk_ts`."""

    def close(self) -> None:
        """Free what it holds."""


class MemoryRun(Run):
    """A run of one chunk, in memory."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        """`rows` are in order."""
        self._rows = rows

    @property
    def first_ts(self) -> int:
        """See `Run.first_ts`."""
        return _ts_at(self._rows, 0) if self._rows.num_rows else EXHAUSTED

    @property
    def chunk_ts(self) -> int:
        """See `Run.chunk_ts`."""
        return _ts_at(self._rows, -1)

    def pop(self, ts: int) -> pa.RecordBatch:
        """See `Run.pop`."""
        rows, self._rows = _cut(self._rows, ts)
        return rows

    def close(self) -> None:
        """See `Run.close`."""
        self._rows = self._rows.slice(0, 0)


class DiskRun(Run):
    """A run on disk, of which one chunk at most is in memory. Raises `StorageFull` and other `StorageError`."""

    def __init__(self, directory: Path, chunks: Iterable[pa.RecordBatch], level: int = 0) -> None:
        """Write the chunks: in order, and no ts in two of them. ``level`` counts the merges that it comes from."""
        self.level = level
        self._chunk: pa.RecordBatch | None = None
        self._next = 0
        self._first: list[int] = []
        with disk_errors(f"the sorter's file in {directory}", "written", _HINTS):
            self._file = tempfile.TemporaryFile(dir=directory, prefix="sorter-")  # noqa: SIM115 - open until `close`
            try:
                self._write(chunks)
            except BaseException:
                self._file.close()
                raise
        self._directory = directory
        self.size = self._file.tell()
        """Bytes on disk."""
        self._reader = pa.ipc.open_file(pa.PythonFile(self._file, mode="r"))

    @property
    def first_ts(self) -> int:
        """See `Run.first_ts`."""
        if self._chunk is not None:
            return _ts_at(self._chunk, 0)
        return self._first[self._next] if self._next < len(self._first) else EXHAUSTED

    @property
    def chunk_ts(self) -> int:
        """See `Run.chunk_ts`."""
        return _ts_at(self._front(), -1)

    def pop(self, ts: int) -> pa.RecordBatch:
        """See `Run.pop`."""
        rows, rest = _cut(self._front(), ts)
        self._chunk = rest if rest.num_rows else None
        return rows

    @property
    def is_empty(self) -> bool:
        """Whether all has been taken."""
        return self.first_ts == EXHAUSTED

    def close(self) -> None:
        """See `Run.close`."""
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
            with disk_errors(f"the sorter's file in {self._directory}", "read", _HINTS):
                self._chunk = self._reader.get_batch(self._next)
            self._next += 1
        return self._chunk


def merge(runs: Iterable[Run], ts: int) -> Iterator[pa.RecordBatch]:
    """Take all rows up to a ts off these runs, oldest first: batches in order, no ts in two of them."""
    runs = list(runs)
    while active := [run for run in runs if run.first_ts <= ts]:
        bound = min(ts, *(run.chunk_ts for run in active))
        yield order.in_order([run.pop(bound) for run in active if run.first_ts <= bound])


def _cut(rows: pa.RecordBatch, ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows in order up to a ts, and the rest: no copies."""
    count = int(np.searchsorted(columns.numbers(rows["ts"]), np.uint64(ts), side="right"))
    return rows.slice(0, count), rows.slice(count)


def _ts_at(rows: pa.RecordBatch, at: int) -> int:
    return int(columns.numbers(rows["ts"])[at])
