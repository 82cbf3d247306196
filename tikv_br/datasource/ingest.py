"""Writes to the source ``tikv`` by SSTs: tasks stage sorted runs, the driver merges them and has the stores ingest the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from tikv_br.backupset.files import FileEntry
from tikv_br.bulk_load.runs import RunsOptions, load_runs, remove_runs, write_runs
from tikv_br.datasource.options import with_hints
from tikv_br.datasource.rows import written_rows
from tikv_br.errors import ClusterFollowed, TargetNotEmpty
from tikv_br.formats.rows import unexpired

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Staged(WriterCommitMessage):
    """Files that a task has staged."""

    runs: tuple[FileEntry, ...] = field(repr=False)


@dataclass
class IngestWriter(DataSourceArrowWriter):
    """Writer of a bulk load.

    Nothing is written to the cluster before `commit`; a repeated task stages its rows again. Picklable.
    """

    options: RunsOptions
    now: int
    """PD's time when the write began: tasks need not reach PD, and their machines' clocks may differ."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one partition. Raises `UsageError` for nulls, negative TTLs, empty and repeated keys, `StorageError`."""
        with with_hints():
            rows = written_rows(iterator, lambda: self.now)
            return Staged(write_runs(self.options, (unexpired(each, self.now) for each in rows)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Ingest the rows of all tasks, in a process of the driver's. Raises `TikvBrError`; the target is unchanged if it is not empty."""
        with with_hints():
            try:
                load_runs(self.options, [run for each in messages if isinstance(each, Staged) for run in each.runs])
            except TargetNotEmpty as error:
                error.hint = "Empty the range, or set allow_overwrite to true."
                raise
            except ClusterFollowed as error:
                error.hint = "Write by puts (without ingest), or set allow_followers to true."
                raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - as Spark calls it
        with with_hints():
            remove_runs(self.options)
