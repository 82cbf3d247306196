"""Sorts changes by timestamp: in memory up to a limit, beyond it with sorted runs on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.incremental.order import in_order, last_of_keys, pieces, split_at
from tikv_br.incremental.runs import DiskRun, MemoryRun, merge

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
        """Remove and yield the rows up to a ts: sorted by ts, without duplicates, without `all_versions` only the last row of a key in each batch.

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
