"""Opens a log archive, and chooses the files of a range and a time.

Up to which time the segments of a log cover its keys, and their gaps.

Looks up the changes of one key in a log archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.archive.records import (
    DESCRIPTION,
    DamagedObject,
    LogDescription,
    Segment,
    SegmentName,
    check_id,
    read_checkpoint_ts,
    read_segment,
    read_truncated_ts,
)
from tikv_br.backupset.coverage import codec_of, shown_keyspaces
from tikv_br.backupset.files import FileEntry, verify_file_content, verify_file_identity
from tikv_br.backupset.rows import read_rows
from tikv_br.backupset.sealed import read_record, with_key_of
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import BackupDamaged, BackupNotFound, LogDamaged, StorageObjectMissing, UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class LogGap:
    """Changes that no segment has: keys of `span` with from_ts < ts <= to_ts."""

    span: KeyRange
    from_ts: int
    to_ts: int
    cause: str = ""
    """The ingest whose rows no change feed delivers; empty = a segment is missing."""

    def __str__(self) -> str:
        because = f": {self.cause} ingested rows with older timestamps" if self.cause else ""
        period = f"from {show_ts(self.from_ts, age=False)} to {show_ts(self.to_ts, age=False)}"
        return f"{self.span} {period}{because}"


@dataclass(slots=True)
class Coverage:
    """Time up to which segments cover each key without a gap."""

    spans: Sequence[KeyRange]
    after_ts: int
    gaps: list[LogGap] = field(default_factory=list)
    _pieces: list[tuple[KeyRange, int]] = field(default_factory=list)
    """Adjacent spans, and the ts that each has reached."""

    def __post_init__(self) -> None:
        self._pieces = [(span, self.after_ts) for span in self.spans if not span.is_empty]

    def add(self, segments: Iterable[Segment]) -> Coverage:
        """Add segments by ascending `from_ts`; returns itself."""
        for segment in segments:
            if segment.to_ts > self.after_ts:
                self._add(segment)
            self.gaps += [
                LogGap(here, max(missed.from_ts, self.after_ts), missed.to_ts, missed.cause)
                for missed in segment.missed
                for span in self.spans
                if missed.to_ts > self.after_ts and not (here := intersection(span, missed.span)).is_empty
            ]
        return self

    @property
    def end_ts(self) -> int:
        """Lowest ts up to which every key is covered."""
        return min([gap.from_ts for gap in self.gaps] + [reached for _, reached in self._pieces], default=self.after_ts)

    def gaps_until(self, ts: int) -> list[LogGap]:
        """The gaps up to a ts, by time."""
        inside = [replace(gap, to_ts=min(gap.to_ts, ts)) for gap in self.gaps if gap.from_ts < ts]
        tail = [LogGap(span, reached, ts) for span, reached in self._pieces if reached < ts]
        return sorted(inside + tail, key=lambda gap: (gap.from_ts, gap.to_ts, gap.span))

    def _add(self, segment: Segment) -> None:
        pieces: list[tuple[KeyRange, int]] = []
        for span, reached in self._pieces:
            here = intersection(span, segment.span)
            if here.is_empty or segment.to_ts <= reached:
                pieces.append((span, reached))
                continue
            if segment.from_ts > reached:
                self.gaps.append(LogGap(here, reached, segment.from_ts))
            rest = gaps(span, [here])
            pieces += sorted([(here, segment.to_ts), *((each, reached) for each in rest)])
        self._pieces = []
        for span, reached in pieces:
            if self._pieces and self._pieces[-1][1] == reached and self._pieces[-1][0].end == span.start:
                span = KeyRange(self._pieces.pop()[0].start, span.end)  # noqa: PLW2901 - merged with the one before
            self._pieces.append((span, reached))


READERS = 16
"""Number of segments read at once."""
_INGEST_HINT = "Restore to a time before that, or start from a full backup that was made after it."


@dataclass(frozen=True, slots=True)
class LogSource:
    """Location and id of a log. Raises `UsageError` for an invalid id."""

    storage: StorageLocation
    id: str

    def __post_init__(self) -> None:
        check_id(self.id)


def log_ids(store: ObjectStore) -> list[str]:
    """The ids of all logs at a location, by name; lists every object there. Raises `StorageError`."""
    names = (info.name.split("/") for info in store.list())
    return sorted(name[0] for name in names if name[1:] == [DESCRIPTION])


@dataclass(frozen=True, slots=True)
class LogArchive:
    """A log as its records say. `check` or `files_for` prove that it has what a caller needs."""

    store: ObjectStore
    description: LogDescription
    segments: tuple[Segment, ...]
    """Segments by `from_ts`, except those that are damaged, lack a file or are in `replaced`."""
    replaced: tuple[Segment, ...] = ()
    """Segments that others of `segments` replace, until they are removed. Readers do not need them."""
    damage: tuple[DamagedObject, ...] = ()
    checkpoint_ts: int = 0
    """The writer has confirmed everything up to this; 0 = unknown, it keeps its checkpoint elsewhere."""
    truncated_ts: int = 0
    """Changes up to this are removed; 0 = none."""

    @classmethod
    def open(cls, store: ObjectStore, log_id: str, known: Iterable[Segment] = ()) -> LogArchive:
        """Read the records; of the data files only names and sizes. `known` segments, of an earlier call, are not read again.

        Raises `BackupNotFound`, `LogDamaged` for a damaged `log.json`, `CrypterMismatch`, `BackupUnsupported`, `StorageError`.
        Other damage, and gaps, do not raise here.
        """
        store = with_key_of(store, f"{check_id(log_id)}/{DESCRIPTION}")
        records = {segment.name: segment for segment in known}
        found = cls._read(store, log_id, records)
        if found.damage or found.gaps():  # perhaps only because the writer or a truncation was at work
            found = cls._read(store, log_id, records)
        return found

    @staticmethod
    def describe(store: ObjectStore, log_id: str) -> LogDescription:
        """Read only the description. Raises as `open`."""
        name = f"{log_id}/{DESCRIPTION}"
        try:
            found = read_record(store, LogDescription, name)
        except StorageObjectMissing as error:
            if any(SegmentName.parse(info.name) for info in store.list(log_id)):
                raise LogDamaged(f"{name} at {store.location.redacted()} is missing") from None
            others = ", ".join(log_ids(store))
            raise BackupNotFound(
                f"there is no log {log_id} at {store.location.redacted()}: {error.message}",
                hint=f"The logs there are {others}: pass one of them as --log-id."
                if others
                else "Check the URL and --log-id. `tikv-br log start` starts a log.",
            ) from None
        except BackupDamaged as error:
            raise LogDamaged(f"{store.location.redacted()}: {error.message}") from None
        if found.log_id != log_id:
            raise LogDamaged(f"{store.location.redacted()}: {name} is damaged: it belongs to the log {found.log_id}")
        return found

    @classmethod
    def _read(cls, store: ObjectStore, log_id: str, known: Mapping[str, Segment]) -> LogArchive:
        description = cls.describe(store, log_id)
        damage: list[DamagedObject] = []
        checkpoint_ts = read_checkpoint_ts(store, description, damage)  # before the segments, which may become more
        truncated_ts = read_truncated_ts(store, log_id, damage)
        sizes = {info.name: info.size for info in store.list(log_id)}
        names = {name: parsed for name in sizes if (parsed := SegmentName.parse(name))}
        with ThreadPoolExecutor(READERS, thread_name_prefix="log") as pool:
            reads = pool.map(lambda name: read_segment(store, log_id, name, sizes, known.get(name)), names)
            found = dict(zip(names, reads, strict=True))
        whole = sorted(
            (each for each in found.values() if isinstance(each, Segment)),
            key=lambda each: (each.from_ts, each.to_ts, each.name),
        )
        replaced = {name for segment in whole for name in segment.replaced}
        lost = (
            each
            for name, each in found.items()
            if isinstance(each, DamagedObject)
            and name not in replaced
            and names[name].to_ts > truncated_ts  # else a truncation may just be removing it
        )
        return cls(
            store=store,
            description=description,
            segments=tuple(each for each in whole if each.name not in replaced),
            replaced=tuple(each for each in whole if each.name in replaced),
            damage=(*damage, *lost),
            checkpoint_ts=checkpoint_ts,
            truncated_ts=truncated_ts,
        )

    def codec(self, keyspace: str = "") -> KeyCodec:
        """The codec of the keyspace with an id or a recorded name; ``""``: of the only keyspace. Raises `UsageError`."""
        names = self.description.names
        found = [id_ for id_, name in names.items() if keyspace in {"", str(id_), name}]
        if len(found) == 1:
            return KeyCodec(self.description.api_version, found[0])
        raise UsageError(
            f"the log {self.description.log_id} at {self.store.location.redacted()} is of keyspace "
            f"{shown_keyspaces(list(names), list(names.values()))}{f', not {keyspace}' if keyspace else ''}",
            hint="Choose one of its keyspaces, or another log.",
        )

    @property
    def start_ts(self) -> int:
        """The log has the changes after this. A backup to which it is applied must have all changes up to this."""
        return max(self.description.start_ts, self.truncated_ts)

    def end_ts(self, after_ts: int = 0, spans: Sequence[KeyRange] = ()) -> int:
        """The newest time up to which the log has every change after `after_ts`; no newer than `after_ts` if it has none.

        `spans` are RPC keys, by default the log's spans. The newest time that can be restored exactly is earlier if this is in
        one of `inexact_windows`.
        """
        after_ts = max(after_ts, self.start_ts)
        return Coverage(spans or self.description.ranges, after_ts).add(self.segments).end_ts

    def gaps(self) -> list[LogGap]:
        """The gaps since `start_ts`, by time; a missing end counts as one if the checkpoint is newer."""
        coverage = Coverage(self.description.ranges, self.start_ts).add(self.segments)
        return coverage.gaps_until(self.checkpoint_ts)

    def lost(self, spans: Sequence[KeyRange], after_ts: int) -> list[LogGap]:
        """The gaps in changes of `spans` (RPC keys) after a ts, but not a missing end."""
        return Coverage(spans, max(after_ts, self.start_ts)).add(self.segments).gaps

    def inexact_windows(self, spans: Sequence[KeyRange] = ()) -> list[tuple[int, int]]:
        """The times, by order, at which the state of keys of `spans` is not known: between, not at, two timestamps each.

        Of keys that were written more than once in such a time, older versions may not be in the log.
        """
        spans = spans or self.description.ranges
        periods = {each for segment in self.segments for each in segment.inexact}
        windows: list[tuple[int, int]] = []
        for each in sorted(periods, key=lambda period: period.from_ts):
            if all(intersection(each.span, span).is_empty for span in spans):
                continue
            if windows and each.from_ts < windows[-1][1]:
                windows[-1] = (windows[-1][0], max(windows[-1][1], each.to_ts))
            else:
                windows.append((each.from_ts, each.to_ts))
        return windows

    def inexact_around(self, spans: Sequence[KeyRange], ts: int) -> tuple[int, int]:
        """The nearest timestamps, before and after `ts`, at which the state of all keys of `spans` is known; twice `ts` if it is one."""
        return next((each for each in self.inexact_windows(spans) if each[0] < ts < each[1]), (ts, ts))

    def check(self, spans: Sequence[KeyRange], after_ts: int, up_to_ts: int) -> None:
        """Check that the log has every change of `spans` (RPC keys) with after_ts < ts <= up_to_ts.

        Raises `LogDamaged` for a gap, and `UsageError` if the log does not have these keys, starts later or ends earlier.
        """
        place = f"the log {self.description.log_id} at {self.store.location.redacted()}"
        for span in spans:
            if missing := gaps(span, self.description.ranges):
                raise UsageError(f"{place} does not contain the keys {missing[0]}")
        if after_ts < self.start_ts:
            raise UsageError(
                f"{place} starts at {show_ts(self.start_ts)}, after {show_ts(after_ts)}",
                hint="Use a backup that is newer than the start of the log.",
            )
        coverage = Coverage(spans, after_ts).add(self.segments)
        if not (found := coverage.gaps_until(up_to_ts)):
            return
        end = coverage.end_ts
        newest = f"the newest time that can be restored is {show_ts(self.inexact_around(spans, end)[0])}"
        if not coverage.gaps and not self.damage and end >= self.checkpoint_ts:
            raise UsageError(f"{place} ends at {show_ts(end)}, before {show_ts(up_to_ts)}; {newest}")
        causes = [each.problem for each in self.damage]
        if found[0].cause:
            raise LogDamaged(f"{place} has no changes of {found[0]}; {newest}", hint=_INGEST_HINT)
        causes = causes or ["a segment is missing"]
        more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
        raise LogDamaged(f"{place} has no changes of {found[0]}: {causes[0]}{more}; {newest}")

    def files_for(self, span: KeyRange, after_ts: int, up_to_ts: int) -> list[FileEntry]:
        """Files that together have every change of `span` (RPC keys) with after_ts < ts <= up_to_ts, by name.

        They have other rows as well, and the same row (key and ts) may be in several: also segments whose times others cover
        may have rows that arrived late. Raises as `check`.
        """
        self.check([span], after_ts, up_to_ts)
        found = {file.name: file for segment in self.segments for file in segment.files}
        return [
            found[name]
            for name in sorted(found)
            if found[name].min_ts <= up_to_ts
            and found[name].max_ts > after_ts
            and not intersection(found[name].key_range, span).is_empty
        ]

    def rows(self, file: FileEntry, span: KeyRange | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a file, or those in `span` (RPC keys), by key, newest version first. See `read_rows` for the errors."""
        return read_log_rows(self.store, file, codec_of(self.description.api_version, file.key_range), span)

    def verify_files(
        self, files: Iterable[FileEntry] | None = None, *, whole: bool = False, rows: bool = False
    ) -> list[DamagedObject]:
        """Check the identity of files, by default of all; with `whole` the hash of all bytes, with `rows` every row. Raises `StorageError`."""
        files = (
            {file.name: file for segment in self.segments for file in segment.files}.values()
            if files is None
            else files
        )

        def verify(file: FileEntry) -> DamagedObject | None:
            try:
                verify_file_identity(self.store, file, etag_counts=False)
                if whole:
                    verify_file_content(self.store, file)
                if rows:
                    self._verify_rows(file)
            except (BackupDamaged, LogDamaged) as error:
                return DamagedObject(file.name, error.message)
            return None

        with ThreadPoolExecutor(READERS, thread_name_prefix="log") as pool:
            return [found for found in pool.map(verify, files) if found]

    def _verify_rows(self, file: FileEntry) -> None:
        """Count all rows of a file. Raises `LogDamaged` if they are not those that its segment recorded."""
        count, timestamps = 0, set[int]()
        for batch in self.rows(file):
            ts = batch["ts"].to_numpy(zero_copy_only=False)
            count += batch.num_rows
            timestamps |= {int(ts.min()), int(ts.max())}
        found = count, min(timestamps, default=0), max(timestamps, default=0)
        if found != (recorded := (file.total_kvs, file.min_ts, file.max_ts)):
            names = "rows, first and last timestamp"
            raise LogDamaged(f"{file.name} has other {names} than recorded: {found} instead of {recorded}")

    def without_damaged_files(self, *, rows: bool) -> LogArchive:
        """The log as it is after `verify_files` of all bytes: segments with a damaged file count as missing. Raises `StorageError`."""
        if not (damage := self.verify_files(whole=True, rows=rows)):
            return self
        names = {each.name for each in damage}
        whole = (each for each in self.segments if names.isdisjoint(file.name for file in each.files))
        return replace(self, segments=tuple(whole), damage=(*self.damage, *damage))


def read_log_rows(
    store: ObjectStore, file: FileEntry, codec: KeyCodec, span: KeyRange | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield rows as `read_rows`, for a file of a log. Raises `LogDamaged` instead of `BackupDamaged`."""
    try:
        yield from read_rows(store, file, codec, span)
    except BackupDamaged as error:
        raise LogDamaged(f"the log at {store.location.redacted()} is damaged: {error.message}") from None


class KeyChange(NamedTuple):
    """A version of a key."""

    ts: int
    deleted: bool
    value: bytes
    """Empty for a delete."""
    expire_ts: int
    """Seconds since the epoch; 0 = never."""


def changes_of(
    archive: LogArchive, user_key: bytes, after_ts: int, up_to_ts: int, keyspace: str = ""
) -> list[KeyChange]:
    """The versions of a key with after_ts < ts <= up_to_ts that the log has, by ts. It may lack some: see `gaps` and `inexact_windows`.

    Raises `LogDamaged`, `StorageError`, and as `LogArchive.codec`.
    """
    rpc_key = archive.codec(keyspace).rpc_key(user_key)
    span = KeyRange(rpc_key, rpc_key + b"\0")
    files = {
        file.name: file
        for segment in archive.segments
        for file in segment.files
        if file.min_ts <= up_to_ts and file.max_ts > after_ts and file.key_range.contains(span)
    }

    def read(file: FileEntry) -> list[KeyChange]:
        return [change for change in _versions(archive, file, span) if after_ts < change.ts <= up_to_ts]

    with ThreadPoolExecutor(READERS, thread_name_prefix="lookup") as pool:
        return sorted({change for found in pool.map(read, files.values()) for change in found})


def _versions(archive: LogArchive, file: FileEntry, span: KeyRange) -> Iterator[KeyChange]:
    for batch in archive.rows(file, span):
        for row in batch.select(["ts", "deleted", "value", "expire_ts"]).to_pylist():
            yield KeyChange(row["ts"], row["deleted"], b"" if row["deleted"] else row["value"], row["expire_ts"])
