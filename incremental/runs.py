"""Sorted rows in memory or on disk, read from the front and merged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from tikv_br.errors import StorageFull
from tikv_br.formats import columns
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.incremental.order import in_order
from tikv_br.storage.local import Hints, storage_errors

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
