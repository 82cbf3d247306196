"""The records of a log archive, and the names of its objects. All names start with the log's id.

=========================================================  ==========================================================
``log.json``                                               `LogDescription`
``segments/FROM-TO-SPAN-TOKEN.json``                       `Segment`; FROM and TO are timestamps, SPAN is an `interval_id`
``data/SPAN/MIN-MAX-TOKEN.parquet``                        rows of `tikv_br.formats.columns.SCHEMA` by key, newest version first
``truncated.json``                                         `Truncation`; absent until the log is truncated
``control.json``                                           `Control`; absent = active
``state/ID/epoch-N``, ``state/ID/checkpoint-N.json``       owner and `Checkpoint` of the writer; ID is the log's id
=========================================================  ==========================================================

In names, timestamps and spans have 16 hexadecimal digits, tokens 8; N is an epoch of 10 decimal digits.

Reads the objects of a log that may be damaged: segments, truncation, and the newest of the checkpoints in a folder.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import Struct

from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.backupset.files import FileEntry, replaced_size_damage
from tikv_br.backupset.index import check_paths
from tikv_br.backupset.layout import interval_id
from tikv_br.backupset.sealed import read_record
from tikv_br.errors import BackupDamaged, StorageObjectMissing, UsageError
from tikv_br.formats.json_types import ApiLabel, Hex
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import Later, Milliseconds, load
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.crypter import PLAIN, PLAINTEXT
from tikv_br.storage.url import StorageLocation

DESCRIPTION = "log.json"
TRUNCATION = "truncated.json"
CONTROL = "control.json"
SEGMENTS = "segments"
DATA = "data"
STATE = "state"
"""Folder of the writer's checkpoints, which are listed often: apart from the data files, which are many."""
DEFAULT_ID = "default"
"""Id of a log that got none."""
_ID = re.compile(r"(?=.{1,128}$)[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_SEGMENT = re.compile(r"(?:.*/)?segments/([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})\.json")
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoint-([0-9]{10})\.json")


def check_id(name: str) -> str:
    """Return a valid id of a log or sync unchanged. Raises `UsageError`."""
    if not _ID.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid id",
            hint="Use letters and digits, in groups joined by -, at most 128 characters.",
        )
    return name


class LogDescription(Struct, frozen=True):
    """Description of a log. Written once, when the log starts."""

    log_id: str
    tool_version: str
    cluster_id: int
    api_version: ApiLabel
    keyspace_id: int
    """The first, if the log is of several."""
    ranges: tuple[KeyRange, ...]
    """Ranges of the log, as RPC keys, in order; each lies in one keyspace."""
    start_ts: int
    """The log has all changes after this."""
    started_ms: Milliseconds
    """Milliseconds since the epoch."""
    has_checkpoint: bool
    """True if the writer saves its checkpoint beside the segments, so that a missing last segment is detected."""
    encryption: str = PLAINTEXT
    """`Crypter.method` of files and records."""
    keyspace_name: Later[str] = ""
    """Name of the keyspace in PD; empty = it has none, or it was not recorded."""
    keyspace_names: Later[tuple[str, ...]] = ()
    """Names of the keyspaces of a log of several, in the order of their ids; empty for a log of one."""

    @property
    def format_version(self) -> int:
        """2 if there are several keyspaces: readers of version 1 decode all keys as if they were in the first."""
        return 2 if self.keyspace_names else 1

    @property
    def names(self) -> dict[int, str]:
        """The recorded names of all keyspaces by their ids; empty ones were not recorded."""
        ids = keyspaces_in(self.api_version, self.ranges) if self.keyspace_names else (self.keyspace_id,)
        return dict(zip(ids, self.keyspace_names or (self.keyspace_name,), strict=False))


class SegmentName(NamedTuple):
    """Parsed name of a segment."""

    from_ts: int
    to_ts: int
    span_id: str
    token: str

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Parse the name of an object; None if it is not a segment."""
        found = _SEGMENT.fullmatch(name)
        return None if found is None else cls(int(found[1], 16), int(found[2], 16), found[3], found[4])


@dataclass(frozen=True, slots=True)
class Period:
    """Keys and times."""

    start: Hex
    """RPC keys, as in `span`."""
    end: Hex
    """Exclusive; ``b""`` = unbounded."""
    from_ts: int
    to_ts: int

    @property
    def span(self) -> KeyRange:
        return KeyRange(self.start, self.end)


@dataclass(frozen=True, slots=True)
class InexactPeriod(Period):
    """Keys and times with possibly missing versions: the feed was interrupted, and then delivers the newest only.

    The state of the keys at `from_ts` and before, and at `to_ts` and later, is complete.
    """


def merge_periods(periods: Iterable[InexactPeriod]) -> tuple[InexactPeriod, ...]:
    """Fewer periods that contain these: adjacent spans whose times overlap become one."""
    merged: list[InexactPeriod] = []
    for each in sorted(periods, key=lambda period: (period.start, period.from_ts)):
        last = merged[-1] if merged else None
        if last is not None and last.end >= each.start and last.to_ts >= each.from_ts and each.to_ts >= last.from_ts:
            end = max(last.end, each.end) if last.end and each.end else b""
            merged[-1] = InexactPeriod(last.start, end, min(last.from_ts, each.from_ts), max(last.to_ts, each.to_ts))
        else:
            merged.append(each)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class MissedIngest(Period):
    """Times and span of rows ingested with older timestamps: no segment has them."""

    cause: str
    """The command that ingested them."""


class Segment(Struct, frozen=True):
    """Every change of `span` with from_ts < ts <= to_ts is in its files, or in an earlier segment's.

    This holds for every writer and at any later time. Segments may overlap, and the same row (key and ts) may be in several.
    """

    log_id: str
    start: Hex
    """RPC keys, as in `span`."""
    end: Hex
    """Exclusive; ``b""`` = unbounded."""
    from_ts: int
    """Lower bound of ts, exclusive."""
    to_ts: int
    """Upper bound of ts, inclusive."""
    files: tuple[FileEntry, ...]
    """`total_kvs` counts versions and tombstones too; `crc64xor` is 0. Rows with a ts up to `from_ts` arrived late."""
    written_ms: Milliseconds
    """Milliseconds since the epoch."""
    token: str
    """Random: 8 hexadecimal digits."""
    inexact: Later[tuple[InexactPeriod, ...]] = ()
    """Keys and times of which the files may lack versions; the times may lie outside the segment."""
    replaces: Later[tuple[str, ...]] = ()
    """Names of segments of the same span all of whose rows and periods this one has too: made by a compaction. See `replaced`."""
    missed: Later[tuple[MissedIngest, ...]] = ()
    """Ingests that the writer noticed since the segment before; the times may lie outside the segment."""

    @property
    def span(self) -> KeyRange:
        return KeyRange(self.start, self.end)

    @property
    def replaced(self) -> set[str]:
        """Names in `replaces` of segments that this one can replace: within its times, and of its span. Others stay."""
        parsed = {name: SegmentName.parse(name) for name in self.replaces}
        return {
            name
            for name, of in parsed.items()
            if of is not None
            and (of.span_id, name.partition("/")[0]) == (interval_id(self.span), self.log_id)
            and self.from_ts <= of.from_ts <= of.to_ts <= self.to_ts
        }

    @property
    def name(self) -> str:
        times = f"{self.from_ts:016x}-{self.to_ts:016x}"
        return f"{self.log_id}/{SEGMENTS}/{times}-{interval_id(self.span)}-{self.token}.json"


class Truncation(Struct, frozen=True):
    """Changes up to `restorable_from` are removed, or may be at any time. Written before any of them is."""

    log_id: str
    restorable_from: int
    written_ms: Milliseconds
    """Milliseconds since the epoch."""


class LogState(enum.StrEnum):
    """State of a log that the operator has set."""

    ACTIVE = "active"
    PAUSED = "paused"
    """The writer exits, and `log start` is refused until `log resume`."""
    STOPPED = "stopped"
    """Stopped for good: changes after its end are lost. Otherwise as paused."""


class Control(Struct, frozen=True):
    """Written by `log pause`, `resume` and `stop`. The writer reads it before each save of its checkpoint."""

    log_id: str
    state: LogState
    changed_ms: Milliseconds
    """Milliseconds since the epoch."""


class Checkpoint(Struct, frozen=True):
    """The sink of a sync or log has confirmed all changes with a ts up to `checkpoint_ts`."""

    changefeed_id: str
    checkpoint_ts: int
    resolved_ts: int
    """The feed had delivered all changes up to this."""
    epoch: int
    """Epoch of the owner that saved it; 0 = not saved yet."""
    saved_ms: Milliseconds
    """Milliseconds since the epoch."""
    subject: str = ""
    """Description of source, range and sink, by which a restart with different options is detected."""
    keyspace: Later[str] = ""
    """Name of the source's keyspace; empty = it has none, or it was not recorded."""
    missed: Later[tuple[str, ...]] = ()
    """Ingests whose rows the sink lacks, as they keep older timestamps."""


def checkpoint_epoch(name: str) -> int | None:
    """The epoch in the name of a checkpoint; None for any other object."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else int(found[1])


def data_name(log_id: str, span: KeyRange, min_ts: int, max_ts: int, token: str) -> str:
    return f"{log_id}/{DATA}/{interval_id(span)}/{min_ts:016x}-{max_ts:016x}-{token}.parquet"


def state_location(location: StorageLocation, log_id: str) -> StorageLocation:
    """The default location of the checkpoint of a log's writer. Checkpoints are not encrypted."""
    return replace(location.child(f"{log_id}/{STATE}"), crypter=PLAIN)


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """An object that is missing or altered. Its segment counts as missing."""

    name: str
    problem: str
    """A sentence that names the object."""


def newest_checkpoint(store: ObjectStore, folder: str, changefeed_id: str) -> Checkpoint | None:
    """The checkpoint of the owner with the highest epoch; None before the first. Raises `BackupDamaged`, `BackupUnsupported`."""
    # A listing during a takeover may miss the old owner's file, already removed, and the new owner's, not there yet.
    while saved := _names(store, folder) or _names(store, folder):
        epoch = max(saved)
        name = saved[epoch]
        try:
            found = load(Checkpoint, store.get(name), name)
        except StorageObjectMissing:
            continue  # a later owner has just removed it
        if (found.changefeed_id, found.epoch) != (changefeed_id, epoch):
            raise BackupDamaged(f"{name} is damaged: it belongs to {found.changefeed_id}, epoch {found.epoch}")
        return found
    return None


def _names(store: ObjectStore, folder: str) -> dict[int, str]:
    return {epoch: info.name for info in store.list(folder) if (epoch := checkpoint_epoch(info.name)) is not None}


def read_checkpoint_ts(store: ObjectStore, description: LogDescription, damage: list[DamagedObject]) -> int:
    """The ts of the newest owner's checkpoint; 0 if it is kept elsewhere. Adds to `damage` if it is missing."""
    if not description.has_checkpoint:
        return 0
    folder = f"{description.log_id}/{STATE}"
    problem = f"{folder}/checkpoint is missing: whether the log lacks its end is unknown"
    try:
        if found := newest_checkpoint(store, folder, description.log_id):
            return found.checkpoint_ts
    except BackupDamaged as error:
        problem = error.message
    damage.append(DamagedObject(folder, problem))
    return 0


def read_truncated_ts(store: ObjectStore, log_id: str, damage: list[DamagedObject]) -> int:
    """The ts up to which changes are removed, 0 = none. Adds to `damage` if its record is damaged."""
    name = f"{log_id}/{TRUNCATION}"
    try:
        found = read_record(store, Truncation, name)
    except StorageObjectMissing:
        return 0
    except BackupDamaged as error:
        damage.append(DamagedObject(name, error.message))
        return 0
    if found.log_id != log_id:
        damage.append(DamagedObject(name, f"{name} is damaged: it belongs to the log {found.log_id}"))
        return 0
    return found.restorable_from


def read_segment(
    store: ObjectStore, log_id: str, name: str, sizes: dict[str, int], known: Segment | None
) -> Segment | DamagedObject:
    """A segment whose files are all there in their size."""
    try:
        found = known or read_record(store, Segment, name)
        check_paths((file.name for file in found.files), name)
    except (BackupDamaged, StorageObjectMissing) as error:
        return DamagedObject(name, f"{name} is missing" if isinstance(error, StorageObjectMissing) else error.message)
    if found.name != name or found.log_id != log_id:
        return DamagedObject(name, f"{name} is damaged: it has the content of {found.name}")
    for file in found.files:
        if not file.name.startswith(f"{log_id}/{DATA}/"):
            return DamagedObject(name, f"{name} is damaged: {file.name} is not a data file of this log")
        size = sizes.get(file.name)
        if size is None:  # perhaps written after the names were listed
            size = store.stat(file.name).size if exists(store, file.name) else None
        if size is None:
            return DamagedObject(file.name, f"{file.name} is missing")
        if problem := replaced_size_damage(store, file, size):
            return DamagedObject(file.name, f"{file.name} {problem}")
    return found
