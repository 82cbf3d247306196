"""Readers of rows: of a cluster, page by page, and of the files of backups and a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.archive.log import read_log_rows
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.prefetch import Prefetcher
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.rawkv import RawClient
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.ttl import TtlFetcher


def scan_rows(
    raw: RawClient, span: KeyRange, ttls: TtlFetcher | None, rate_limit: RateLimit | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of an RPC range of a cluster, page by page, one page ahead: batches of ``tikv_br.formats.columns.SCHEMA``.

    With ``ttls`` they have their expiry, and rows that have vanished are left out. Raises `ClusterError`, and `DamagedBytes`
    for keys outside the client's keyspace.
    """
    from tikv_br.formats import columns

    for page in Prefetcher(raw.scan_pages(span, rate_limit=rate_limit)):
        rows, expire_ts = (page, None) if ttls is None else ttls.live_rows(page)
        yield columns.records(columns.user_keys(rows.keys, raw.codec), rows.values, expire_ts=expire_ts)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a full backup, of the increments on it and of a log, as of one timestamp. Picklable."""

    backups: tuple[tuple[StorageLocation, tuple[FileEntry, ...]], ...]
    """Backups in the order of their time, with the files of each by key."""
    ts: int
    """The rows of this timestamp are read; without meaning for a single backup."""
    now: int
    """Rows that have expired by then are left out; seconds since the epoch."""
    log: StorageLocation | None = None
    log_files: tuple[FileEntry, ...] = ()
    after_ts: int = 0
    """Timestamp up to which the backups contain the log's changes, or newer versions of the same keys."""

    def batches(self, span: KeyRange, codec: KeyCodec) -> Iterator[pa.RecordBatch]:
        """The rows of an RPC range, by ascending key: batches of `SCHEMA` without tombstones, one version per key.

        ``codec`` is that of the files, in the range's keyspace. Raises as `read_rows` and `read_log_rows`.
        """
        from tikv_br.formats.merge import newest_versions, rows_at
        from tikv_br.formats.rows import LiveFilter

        runs = [_rows_of(read_rows, location, files, span, codec) for location, files in self.backups]
        if self.log is not None:
            import pyarrow.compute as pc

            rows = _rows_of(read_log_rows, self.log, self.log_files, span, codec)
            # The tombstone that hides an older row, which arrived late, may be in an earlier segment that is not read.
            later = (batch.filter(pc.greater(batch["ts"], self.after_ts)) for batch in rows)
            runs.append(iter([newest_versions(later, self.ts)]))
        elif len(runs) == 1:
            yield from map(LiveFilter(self.now).apply, runs[0])
            return
        yield from rows_at(runs, self.ts, self.now)


def _rows_of(
    read: Callable[[ObjectStore, FileEntry, KeyCodec, KeyRange], Iterator[pa.RecordBatch]],
    location: StorageLocation,
    files: Sequence[FileEntry],
    span: KeyRange,
    codec: KeyCodec,
) -> Iterator[pa.RecordBatch]:
    store = open_store(location)
    for file in files:
        part = intersection(file.key_range, span)
        if not part.is_empty:
            yield from read(store, file, codec, part)
