"""The ledger entry of a task whose rows stores have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from tikv_br.backup.store_files import FileRecorder, RewriteTotals, rewrite_files
from tikv_br.backup.store_responses import ResponseSet
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.dataflow.convert import Converter
from tikv_br.dataflow.task import BackupJob
from tikv_br.dataflow.write import DataFiles, part_of
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class FinishedAnswers:
    """The answers of stores that cover an interval, to be recorded."""

    job: BackupJob
    interval: KeyRange
    attempt: str
    store: ObjectStore
    converter: Converter
    """Converter from the cluster's encoding to the backup's."""
    answers: ResponseSet
    report: Callable[[], None]
    """Called after each file, or batch of its rows."""

    def record(self) -> LedgerEntry:
        """The entry of the files as they are. Raises as `FileRecorder.record`."""
        job = self.job
        recorder = FileRecorder(self.converter, job.with_ttl, job.options.checksum, job.expiry_in_properties)
        files: list[FileEntry] = []
        source = Checksum()
        for written in self.answers.files():
            entry, sums = recorder.record(self.store, written)
            files.append(entry)
            source += sums
            self.report()
        counts = {entry.name: Checksum(0, entry.total_kvs, entry.total_bytes) for entry in files}
        return LedgerEntry(
            self.interval.start,
            self.interval.end,
            self.attempt,
            tuple(files),
            source,
            run=job.run,
            regions=self._regions(counts),
        )

    def rewrite(self, files: DataFiles) -> LedgerEntry:
        """Rewrite the stores' files; the entry of the new ``files``. Raises as `rewrite_files`."""
        total = RewriteTotals()
        for reached in rewrite_files(self.store, self.answers.files(), self.converter, files):
            total = reached
            self.report()
        longer = len(self.converter.target.prefix) - len(self.converter.source.prefix)
        counts = {
            written.name: Checksum(
                0, written.file.total_kvs, written.file.total_bytes + longer * written.file.total_kvs
            )
            for written in self.answers.files()
        }
        return LedgerEntry(
            self.interval.start,
            self.interval.end,
            self.attempt,
            files.finish(),
            total.source,
            dropped_ttls=total.dropped_ttls,
            dropped_tombstones=total.dropped_tombstones,
            run=self.job.run,
            regions=self._regions(counts),
        )

    def _regions(self, counts: Mapping[str, Checksum]) -> tuple[RegionPart, ...]:
        """Return the counts of each region, from its answer. ``counts`` are those of the stores' files, by name."""
        found = []
        for answer in self.answers.answers():
            sums = reduce(Checksum.merge, (counts[written.name] for written in answer.files), Checksum())
            if sums.total_kvs:
                found.append(part_of(self.converter.target_range(answer.range), sums))
        return tuple(found)
