"""Holds changes until they are resolved, and gives them out by ascending ts: in bounded memory, the rest on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from formats import columns
from formats.keys import MAX_TS
from incremental import order
from incremental.runs import DiskRun, MemoryRun, merge

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

BATCH_OVERHEAD = 2048
"""What a batch takes beside its buffers, roughly: a feed may send rows one by one."""
FAN_IN = 8
"""So many runs of one level are merged into one of the next."""
SHARE = 4
"""Memory goes in equal parts to rows just added, twice to sorting them, and to the fronts of the runs on disk."""
FRONTS = 3 * FAN_IN
"""How many runs on disk may be read at once: enough for 500 times what is in memory."""


class Sorter:
    """Changes between feed and sink. For one thread.

    Takes about ``memory_bytes`` at most, if one chunk for each of some dozens of runs fits into it; what is more lies in
    ``directory`` in files that have no name, so that none outlives the process. Raises `StorageFull` and other
    `StorageError` for the directory.
    """

    def __init__(self, memory_bytes: int, directory: Path) -> None:
        self._most = max(memory_bytes // SHARE, 1)
        self._chunk_bytes = max(self._most // FRONTS, 1)
        self._directory = directory
        self._added: list[pa.RecordBatch] = []
        self._added_bytes = 0
        self._runs: list[DiskRun] = []
        self._taken_ts = 0
        self._warned_ts = -1
        self.late_rows = 0
        """Rows that came though their ts had been taken: more than none says that the feed was wrong about it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def memory_bytes(self) -> int:
        """What is held in memory, without the fronts of runs."""
        return self._added_bytes

    @property
    def disk_bytes(self) -> int:
        """What is held on disk."""
        return sum(run.size for run in self._runs)

    def add(self, batch: pa.RecordBatch) -> None:
        """Hold rows of `SCHEMA`, in any order, some perhaps for the second time; ts 0 is not allowed."""
        if not batch.num_rows:
            return
        late = int(np.count_nonzero(columns.numbers(batch["ts"]) <= np.uint64(self._taken_ts)))
        if late:
            self.late_rows += late
            if self._warned_ts < self._taken_ts:  # not for each of the batches in which they come
                log.warning("the feed tells rows below the resolved ts %d, %d so far", self._taken_ts, self.late_rows)
            self._warned_ts = self._taken_ts
        self._added.append(batch)
        self._added_bytes += _held_by(batch)
        if self._added_bytes > self._most:
            self._relieve()

    def take(self, resolved_ts: int) -> Iterator[pa.RecordBatch]:
        """Give out the rows up to a ts: by ascending ts, copies removed, in each batch the last row of each key.

        All rows of one ts lie in one batch, which also holds its last row: when a batch is done with, all up to the ts
        of its last row is. Take all of them before the next call; what is not taken is lost with the iterator.
        """
        self._taken_ts = max(self._taken_ts, resolved_ts)
        windows = merge([*self._runs, self._resolved(resolved_ts)], resolved_ts)  # as they came
        for rows in order.pieces(windows, self._chunk_bytes):
            yield order.last_of_keys(rows)
        self._drop_empty()

    def close(self) -> None:
        """Forget everything."""
        for run in self._runs:
            run.close()
        self._runs = []
        self._hold([])

    def _resolved(self, ts: int) -> MemoryRun:
        """What is in memory up to a ts."""
        parts = [order.split_at(batch, ts) for batch in self._added]
        self._hold([late for _, late in parts if late.num_rows])
        return MemoryRun(order.in_order([early for early, _ in parts]))

    def _relieve(self) -> None:
        """Make room: many small batches become one; if that is not enough, they go to disk."""
        rows = order.in_order(self._added)
        self._hold([rows])
        if self._added_bytes <= self._most // 2:
            return
        self._hold([])
        self._runs.append(DiskRun(self._directory, order.pieces([rows], self._chunk_bytes)))
        del rows
        level = 0
        while len(same := [run for run in self._runs if run.level == level]) >= FAN_IN:
            chunks = order.pieces(merge(same, MAX_TS), self._chunk_bytes)
            merged = DiskRun(self._directory, chunks, level + 1)
            self._runs.append(merged)
            self._drop_empty()
            level += 1

    def _hold(self, batches: list[pa.RecordBatch]) -> None:
        self._added = batches
        self._added_bytes = sum(map(_held_by, batches))

    def _drop_empty(self) -> None:
        for run in [run for run in self._runs if run.is_empty]:
            run.close()
            self._runs.remove(run)


def _held_by(batch: pa.RecordBatch) -> int:
    return int(batch.get_total_buffer_size()) + BATCH_OVERHEAD
