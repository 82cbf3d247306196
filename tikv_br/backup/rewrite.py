"""From files that stores wrote in their own encoding to files of another encoding or kind.

The way for what stores do not write: expiry and timestamps are exact, as the rows are the stores' own, not answers to
questions about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from formats.checksum import Checksum
from formats.keys import KeyCodec
from tikv_br.backup.convert import Conversion
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.range_tree import StoredSst
from tikv_br.backup.row_writer import FileForm
from tikv_br.backupset import meta
from tikv_br.backupset.coverage import KeyRange
from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(slots=True)
class Rewritten:
    """What went into new files."""

    source: Checksum = field(default_factory=Checksum)
    """As the source's servers count it."""
    dropped_ttls: int = 0
    dropped_tombstones: int = 0


@dataclass(frozen=True, slots=True)
class Rewriter:
    """Rewrites. Pickles."""

    conversion: Conversion
    """Its source is the encoding of the stores' files."""
    form: FileForm
    file_bytes: int
    """Keys and values of a file, before encoding and compression."""

    def files(self, store: ObjectStore, interval: KeyRange, attempt: str) -> DataFiles:
        """Where the rows of an interval go."""
        converter = self.conversion.of(interval)
        return DataFiles(
            store,
            interval,
            converter.target_range(interval),
            attempt,
            form=self.form,
            codec=converter.target,
            file_bytes=self.file_bytes,
        )

    def rewrite(
        self, store: ObjectStore, interval: KeyRange, written: Iterable[StoredSst], files: DataFiles
    ) -> Iterator[Rewritten]:
        """Convert the stores' files of an interval, in the order of keys; yields what it has come to after every batch.

        Raises `BackupDamaged` for a file that is not as its store said, besides what reading and writing raises.
        """
        converter = self.conversion.of(interval)
        total = Rewritten()
        yield total
        for file in written:
            before = total.source
            for records in _live_records(store, file, converter.source, total):
                converted = converter.convert(records)
                files.add(converted)
                total.source += converted.source
                total.dropped_ttls += converted.dropped_ttls
                yield total
            said = Checksum(file.file.crc64xor, file.file.total_kvs, file.file.total_bytes)
            if before + said != total.source:
                raise BackupDamaged(f"{file.name} does not hold what its store counted, {said}")


def _live_records(store: ObjectStore, file: StoredSst, codec: KeyCodec, total: Rewritten) -> Iterator[pa.RecordBatch]:
    from formats import columns
    from formats.rows import LiveFilter
    from tikv_br.proof.stored_rows import naming, records

    newest = LiveFilter(now=0)
    entry = replace(meta.decode_file(file.file), name=file.name)
    for batch in records(store, entry, codec):
        total.dropped_tombstones += int(columns.flags(batch["deleted"]).sum())
        with naming(entry):
            alive = newest.apply(batch)
        if alive.num_rows:
            yield alive
