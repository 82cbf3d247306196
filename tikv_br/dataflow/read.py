"""Readers of rows: of a cluster, page by page, and of the files of backups and a log.

Backups and a log that are read together: a base, incremental backups on it and a log, as of one timestamp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tikv_br.archive.log import LogArchive, LogGap, LogSource, read_log_rows
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import file_errors, open_file, read_rows
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.scan import Prefetcher
from tikv_br.cluster.timestamps import compose, show_ts
from tikv_br.dataflow.plan import Interval, plan_by_sizes, spread_sizes, task_bytes
from tikv_br.errors import BackupUnsupported, OutsideRestoreWindow, UsageError
from tikv_br.formats.api_version import ApiVersion
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

        ``codec`` is for the files' encoding and the range's keyspace. Raises as `read_rows` and `read_log_rows`.
        """
        from tikv_br.formats.order import newest_versions, rows_at
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


CLOCK_MARGIN_MS = 60_000
"""Seconds by which the clock of a backup's machine may be ahead of PD's: for backups without `scanned_ts`."""
CHECK_THREADS = 16
"""Files that are checked at the same time."""
SAMPLED_LOG_FILES = 32
"""Log files whose row groups are looked at to divide the keys into intervals of equal size."""


@dataclass(frozen=True, slots=True)
class MergeSources:
    """Sources of a merge: a full backup, incremental backups in the order of their time, and a log."""

    base: BackupSet
    increments: tuple[BackupSet, ...] = ()
    log: LogArchive | None = None

    @classmethod
    def open(cls, newest: StorageLocation, log: LogSource | None) -> MergeSources:
        """Open a backup, the backups that it continues, and a log of the same cluster.

        Raises as `BackupSet.open`, `BackupSet.chain` and `LogArchive.open`; `BackupUnsupported`, `UsageError`.
        """
        found = cls.of_backup(newest)
        if found.base.api_version is not ApiVersion.V2 or not found.base.backup_ts:
            raise BackupUnsupported(
                f"{found.base.store.location} has no backup-ts: its rows have no time",
                hint="Point-in-time recovery needs a backup of an API V2 cluster that tikv-br made.",
            )
        return found if log is None else found.with_log(LogArchive.open(open_store(log.storage), log.id))

    @classmethod
    def of_backup(cls, newest: StorageLocation) -> MergeSources:
        """Open a backup of any API version, and the backups that it continues. Raises as `BackupSet.open` and `BackupSet.chain`."""
        base, *increments = BackupSet.open(open_store(newest)).chain()
        return cls(base, tuple(increments))

    def with_log(self, log: LogArchive) -> MergeSources:
        """These backups and a log. Raises `UsageError` for the log of another cluster or range, or that starts after the backups."""
        if log.description.cluster_id != self.base.cluster_id:
            raise UsageError(
                f"the log is of cluster {log.description.cluster_id}, the backup of cluster {self.base.cluster_id}",
                hint="Pass a backup and a log of the same cluster.",
            )
        log.check(self.base.ranges, self.newest.backup_ts, self.newest.backup_ts)
        return replace(self, log=log)

    @property
    def newest(self) -> BackupSet:
        """The last increment, or the base."""
        return self.increments[-1] if self.increments else self.base

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the sources, without credentials."""
        urls = [each.store.location.redacted() for each in self.backups]
        if self.log is not None:
            urls.append(f"{self.log.store.location.redacted()} (log {self.log.description.log_id})")
        return tuple(urls)

    @property
    def backups(self) -> tuple[BackupSet, ...]:
        """The base and the increments."""
        return (self.base, *self.increments)

    def files(self, spans: Sequence[KeyRange]) -> list[tuple[BackupSet, tuple[FileEntry, ...]]]:
        """The files of each backup with keys in RPC ranges, by key."""
        found = []
        for each in self.backups:
            files = (
                file for file in each.files if any(not intersection(file.key_range, span).is_empty for span in spans)
            )
            found.append((each, tuple(sorted(files, key=lambda file: file.key_range))))
        return found

    def verify_identity(self, spans: Sequence[KeyRange]) -> None:
        """Check length and end of every file of the backups with keys in RPC ranges. Raises `BackupDamaged`."""
        with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="check") as pool:
            checks = [pool.submit(each.verify_identity, file) for each, files in self.files(spans) for file in files]
            for check in checks:
                check.result()

    def plan(self, log_files: Sequence[FileEntry], parts: Sequence[KeyRange], slots: int) -> list[Interval]:
        """Divide RPC ranges into tasks of about equal size, by the sizes of files. ``slots``: concurrent tasks."""
        sizes = sizes_by_key(self, log_files)
        wanted = task_bytes(sum(size for _, size in sizes), slots)
        return [interval for part in parts for interval in plan_by_sizes(part, sizes, wanted)]

    def log_files(self, ts: int) -> tuple[FileEntry, ...]:
        """The files of the log with changes after the newest backup, up to a timestamp. Raises as `LogArchive.check`."""
        if self.log is None:
            return ()
        found = {
            file.name: file for span in self.base.ranges for file in self.log.files_for(span, self.newest.backup_ts, ts)
        }
        return tuple(found.values())

    def window(self, *, allow_inexact: bool = False) -> tuple[int, int]:
        """The first and the last timestamp to which rows can be restored; with `allow_inexact` also in scan windows of the log.

        A backup is no snapshot: until the end of its scan it may lack rows that were deleted or expired in between, and have
        newer ones. So the window starts at the end of the scan of the newest backup, or of the log's scan window that this is in.
        The first is after the last if no time can be restored.
        """
        first = scanned_ts(self.newest)
        if self.log is None:
            return first, first
        end = self.log.end_ts(self.newest.backup_ts, self.base.ranges)
        if allow_inexact:
            return first, end
        return self.log.inexact_around(self.base.ranges, first)[1], self.log.inexact_around(self.base.ranges, end)[0]

    def lost(self) -> list[LogGap]:
        """The gaps of the log after the newest backup."""
        return self.log.lost(self.base.ranges, self.newest.backup_ts) if self.log is not None else []

    def check(self, ts: int, *, allow_inexact: bool = False) -> None:
        """Check that a timestamp is in the window and, without `allow_inexact`, in no scan window of the log.

        Raises `OutsideRestoreWindow`, `LogDamaged` if they were in a part of the log that is lost.
        """
        first, last = self.window(allow_inexact=allow_inexact)
        scanned, end = self.window(allow_inexact=True)
        if self.log is not None and ts > end:
            with contextlib.suppress(UsageError):  # the log is whole, but ends before
                self.log.check(self.base.ranges, self.newest.backup_ts, ts)
        if self.log is not None and first > last:
            raise OutsideRestoreWindow(
                f"the log {self.log.description.log_id} has all rows only up to {show_ts(last)}, before the first time that can be restored from the backup, {show_ts(first)}",
                hint="Wait until the log has reached that time, or use an older backup, or another --log-id.",
            )
        if not scanned <= ts <= end:
            later = "pass a log for later ones"
            if self.log is not None:
                later = (
                    f"wait until the log {self.log.description.log_id} has reached later ones, or pass another --log-id"
                )
            raise OutsideRestoreWindow(
                f"{show_ts(ts)} is outside the restorable window, {show_ts(first)} to {show_ts(last)}",
                hint=f"Pass a time in the window, an older backup for earlier times, or {later}.",
            )
        if self.log is None or allow_inexact:
            return
        before, after = self.log.inexact_around(self.base.ranges, ts)
        if before < after:
            exact = " or ".join(str(each) for each in (before, after) if scanned <= each <= end)
            inexact = "--allow-inexact: such keys then get an older value, or none."
            raise OutsideRestoreWindow(
                f"at {show_ts(ts)} not all rows are known: the change feed was interrupted, and of keys written more than once "
                f"between {show_ts(before)} and {show_ts(after)} it may have delivered only the newest version",
                hint=f"Pass {exact}, the nearest times at which all rows are known. Or pass {inexact}"
                if exact
                else f"Pass {inexact}",
            )


def sizes_by_key(sources: MergeSources, files: Sequence[FileEntry]) -> list[tuple[bytes, int]]:
    """Return ascending RPC keys with the approximate bytes to read from each to the next; ``files`` are the log's."""
    parts = [(file.start_key, file.end_key, file.total_bytes) for each in sources.backups for file in each.files]
    cuts = {start for start, _, _ in parts}
    if sources.log is not None:
        more_parts, more_cuts = file_parts(sources.log.store, ApiVersion.V2, files)
        parts += more_parts
        cuts |= more_cuts
    return spread_sizes(parts, cuts)


def file_parts(
    store: ObjectStore, version: ApiVersion, files: Sequence[FileEntry]
) -> tuple[list[tuple[bytes, bytes, int]], set[bytes]]:
    """Parts and cuts of Parquet files for `spread_sizes`, from the row groups of some of them."""
    from tikv_br.formats.parquet import ParquetReader

    parts: list[tuple[bytes, bytes, int]] = []
    cuts: set[bytes] = set()
    sampled = files[:: max(1, len(files) // SAMPLED_LOG_FILES)]
    for file in sampled:
        with file_errors(file):
            groups = ParquetReader(open_file(store, file)).groups()
        codec = codec_of(version, file.key_range)
        keys = [codec.rpc_key(each.first_key) for each in groups]
        cuts.update(keys[1:])  # the first says nothing about how keys are distributed
        parts += [
            (start, codec.rpc_key(group.last_key) if group.last_key else b"", group.size * len(files) // len(sampled))
            for start, group in zip(keys, groups, strict=True)
        ]
    return parts, cuts


def file_sizes(store: ObjectStore, version: ApiVersion, files: Sequence[FileEntry]) -> list[tuple[bytes, int]]:
    """Ascending RPC keys, and about how many bytes Parquet files have from each to the next."""
    _, cuts = file_parts(store, version, files)
    parts = [(file.start_key, file.end_key, file.total_bytes) for file in files]
    return spread_sizes(parts, cuts | {start for start, _, _ in parts})


def scanned_ts(base: BackupSet) -> int:
    """A timestamp after all rows of a backup were read."""
    manifest = base.manifest
    if manifest is None:
        raise BackupUnsupported(f"{base.store.location} was not made by tikv-br: the end of its scan is unknown")
    return manifest.description.scanned_ts or compose(manifest.statistics.finished_ms + CLOCK_MARGIN_MS)
