"""Status of a log archive, removal of its old objects, and the operator's pause, resume and stop."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from tikv_br.archive.log import LogArchive, LogSource, log_ids
from tikv_br.archive.records import (
    CONTROL,
    DATA,
    DEFAULT_ID,
    SEGMENTS,
    TRUNCATION,
    Control,
    LogState,
    SegmentName,
    Truncation,
)
from tikv_br.backupset import lease
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.cluster.timestamps import physical_ms, show_ts
from tikv_br.errors import BackupDamaged, LogDamaged, StorageObjectMissing, UsageError
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

DAY_SECONDS = 86400.0
DELETES = 16
"""Number of objects removed at once."""
ORPHAN_SECONDS = DAY_SECONDS
"""Age after which a data file that no segment lists is removed: no writer will list it any more."""
GRACE_SECONDS = DAY_SECONDS
"""Seconds for which replaced segments and their files are kept: a running restore may use them."""


@dataclass(frozen=True, slots=True)
class LogStatus:
    """Figures of a log."""

    log_id: str
    storage: str
    cluster_id: int
    keyspace_id: int
    keyspace_name: str
    """Empty = PD knew none, or it was not recorded."""
    keyspaces: tuple[int, ...]
    """All of a log of several, of which the above is the first."""
    keyspace_names: tuple[str, ...]
    ranges: tuple[str, ...]
    state: LogState
    start_ts: int
    """Restorable times start here."""
    checkpoint_ts: int
    """0 = unknown, it is saved elsewhere."""
    end_ts: int
    """The log has every change up to this. Restorable times end here, or at the start of a scan window that this is in."""
    restorable_ts: int
    """The newest time that can be restored exactly."""
    rpo_seconds: float
    """Age of the end, by this machine's clock."""
    segments: int
    files: int
    rows: int
    """All versions and tombstones, including duplicates."""
    size: int
    """Bytes of the data files as stored."""
    size_per_day: int
    """`size` divided by the days from start to end."""
    scan_window_count: int
    """Times that cannot be restored exactly; see `LogArchive.inexact_windows`."""
    scan_window_seconds: float
    """Total duration of the scan windows."""
    gaps: tuple[str, ...]
    damage: tuple[str, ...]
    encryption: str
    level: str = "meta"
    """Level at which the files were checked: see `log status --level`."""


def status_of(archive: LogArchive, level: Literal["meta", "files", "data"] = "meta") -> LogStatus:
    """The status of a log. Raises `StorageError`, `LogDamaged` for its control record.

    ``level``: ``meta`` reads only records and sizes, ``files`` also compares the hash of each file, ``data`` also reads each row.
    """
    if level != "meta":
        archive = archive.without_damaged_files(rows=level == "data")
    files = {file.name: file for segment in archive.segments for file in segment.files}.values()
    end_ts, size = archive.end_ts(), sum(file.size for file in files)
    windows = [
        (max(first, archive.start_ts), min(last, end_ts))
        for first, last in archive.inexact_windows()
        if first < end_ts and last > archive.start_ts
    ]
    days = (physical_ms(end_ts) - physical_ms(archive.start_ts)) / 1000 / DAY_SECONDS
    return LogStatus(
        log_id=archive.description.log_id,
        storage=archive.store.location.redacted(),
        cluster_id=archive.description.cluster_id,
        keyspace_id=archive.description.keyspace_id,
        keyspace_name=archive.description.keyspace_name,
        keyspaces=tuple(archive.description.names),
        keyspace_names=tuple(archive.description.names.values()),
        ranges=tuple(map(str, archive.description.ranges)),
        state=state_of(archive.store, archive.description.log_id),
        start_ts=archive.start_ts,
        checkpoint_ts=archive.checkpoint_ts,
        end_ts=end_ts,
        restorable_ts=archive.inexact_around(archive.description.ranges, end_ts)[0],
        rpo_seconds=round(time.time() - physical_ms(end_ts) / 1000, 3),
        segments=len(archive.segments),
        files=len(files),
        rows=sum(file.total_kvs for file in files),
        size=size,
        size_per_day=round(size / days) if days > 0 else 0,
        scan_window_count=len(windows),
        scan_window_seconds=sum(physical_ms(last) - physical_ms(first) for first, last in windows) / 1000,
        gaps=tuple(map(str, archive.gaps())),
        damage=tuple(each.problem for each in archive.damage),
        encryption=archive.description.encryption,
        level=level,
    )


def choose_log(storage: StorageLocation, log_id: str | None) -> LogSource:
    """The log of this id, by default `DEFAULT_ID`: but if that has ended beside other logs, which one is meant must be said.

    Raises `UsageError`, `LogDamaged`, `StorageError`.
    """
    found = LogSource(storage, DEFAULT_ID if log_id is None else log_id)
    if log_id is None:
        store = open_store(storage)
        if state_of(store, DEFAULT_ID) is LogState.STOPPED and (
            others := [each for each in log_ids(store) if each != DEFAULT_ID]
        ):
            raise UsageError(
                f"the log {DEFAULT_ID} at {storage.redacted()} has ended, and other logs are beside it: {', '.join(others)}",
                hint=f"Pass the one that is meant as --log-id, also if it is {DEFAULT_ID}.",
            )
    return found


def state_of(store: ObjectStore, log_id: str) -> LogState:
    """Return the state of a log that the operator has set. Raises `LogDamaged`, `StorageError`."""
    try:
        found = read_record(store, Control, f"{log_id}/{CONTROL}")
    except StorageObjectMissing:
        return LogState.ACTIVE
    except BackupDamaged as error:
        raise LogDamaged(f"{store.location.redacted()}: {error.message}") from None
    if found.log_id != log_id:
        raise LogDamaged(f"{store.location.redacted()}: {log_id}/{CONTROL} belongs to the log {found.log_id}")
    return found.state


def set_state(store: ObjectStore, log_id: str, state: LogState) -> None:
    """Pause, resume or stop a log. Raises `UsageError` for a stopped one, as `LogArchive.open` if there is no such log."""
    LogArchive.describe(store, log_id)
    if state is not LogState.STOPPED:
        _check_not_stopped(log_id, state_of(store, log_id))
    write_record(store, f"{log_id}/{CONTROL}", Control(log_id, state, time.time_ns() // 1_000_000))


def check_active(store: ObjectStore, log_id: str) -> None:
    """Raise `UsageError` if a log is paused or stopped."""
    state = state_of(store, log_id)
    if state is LogState.PAUSED:
        raise UsageError(f"the log {log_id} is paused", hint="Run `tikv-br log resume`, then start it again.")
    _check_not_stopped(log_id, state)


def _check_not_stopped(log_id: str, state: LogState) -> None:
    if state is LogState.STOPPED:
        raise UsageError(
            f"the log {log_id} is stopped", hint="Start another log with another --log-id, and take a full backup."
        )


def acquire_lock(store: ObjectStore, log_id: str, work: str, wait: float = 0.0) -> PathLease:
    """Acquire the lock of a log, which every command that removes objects must hold. The log's writer does not need it.

    Raises `LeaseHeld`, `StorageError`.
    """
    return lease.acquire(open_store(store.location.child(log_id)), work, wait=wait)


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Objects of a log that are to be removed."""

    restorable_from: int
    """Changes up to this are removed; 0 = none."""
    segments: tuple[str, ...]
    """Object names of segments."""
    files: tuple[str, ...]
    size: int
    """Bytes of the files as stored."""


def plan_truncation(archive: LogArchive, until_ts: int, now: float | None = None) -> RemovalPlan:
    """Plan the removal of all segments that end at or before a ts, of their files, and of what `plan_clean_up` removes.

    Segments with an inexact period that reaches past the ts stay, because only they record it. Raises `UsageError` for a ts that the log has not reached or that is before an earlier truncation, `StorageError`.
    """
    log_id = archive.description.log_id
    if until_ts > (last := max((segment.to_ts for segment in archive.segments), default=archive.start_ts)):
        raise UsageError(
            f"the log {log_id} ends at {show_ts(last)}, before {show_ts(until_ts)}", hint="Pass an earlier time."
        )
    if until_ts < archive.start_ts:
        raise UsageError(
            f"the log {log_id} starts at {show_ts(archive.start_ts)}: there is nothing before that to remove"
        )
    return _plan_removal(archive, until_ts, GRACE_SECONDS, now)


def plan_clean_up(archive: LogArchive, grace: float = GRACE_SECONDS, now: float | None = None) -> RemovalPlan:
    """Plan the removal of segments that were replaced `grace` seconds ago, and of orphans.

    What an interrupted truncation left stays: its record describes, and only a truncation that the operator asks for may follow it.
    Orphans are files older than `ORPHAN_SECONDS` that no segment lists. Raises `StorageError`.
    """
    return _plan_removal(archive, 0, grace, now)


def _plan_removal(archive: LogArchive, until_ts: int, grace: float, now: float | None) -> RemovalPlan:
    log_id = archive.description.log_id
    objects = list(archive.store.list(log_id))
    written_ms = {info.name: info.modified_ms for info in objects}
    # The storage's clock wrote all these times. With the lock held, the newest time is the lock's: now.
    now = max(written_ms.values(), default=0) / 1000 if now is None else now
    segments_read = (*archive.segments, *archive.replaced)
    replaced_ms = {name: written_ms.get(each.name, math.inf) for each in segments_read for name in each.replaced}
    ends = {
        each.name: max([each.to_ts, *(it.to_ts for it in each.inexact), *(it.to_ts for it in each.missed)])
        for each in segments_read
    }

    def is_dead(name: str, end_ts: int) -> bool:
        return end_ts <= until_ts or replaced_ms.get(name, math.inf) <= (now - grace) * 1000

    listed = {file.name for each in segments_read if not is_dead(each.name, ends[each.name]) for file in each.files}
    dead = {file.name for each in segments_read for file in each.files} - listed
    known = listed | dead
    oldest_ms = (now - ORPHAN_SECONDS) * 1000
    # A damaged segment may list files as well; those that end later are kept, so that it can be repaired.
    is_whole = not any(each.name.startswith((f"{log_id}/{SEGMENTS}/", f"{log_id}/{DATA}/")) for each in archive.damage)
    segments, files, size = [], [], 0
    for info in objects:
        name = SegmentName.parse(info.name)
        if name is not None and is_dead(info.name, ends.get(info.name, name.to_ts)):
            segments.append(info.name)
        is_orphan = info.name not in known and info.modified_ms < oldest_ms and is_whole
        if info.name.startswith(f"{log_id}/{DATA}/") and (info.name in dead or is_orphan):
            files.append(info.name)
            size += info.size
    return RemovalPlan(until_ts, tuple(sorted(segments)), tuple(sorted(files)), size)


def truncate(archive: LogArchive, plan: RemovalPlan) -> None:
    """Carry out a plan. Interrupted, it leaves a valid log, and the next truncation removes the rest. Raises `StorageError`."""
    log_id = archive.description.log_id
    record = Truncation(log_id, plan.restorable_from, time.time_ns() // 1_000_000)
    write_record(archive.store, f"{log_id}/{TRUNCATION}", record)
    remove(archive, plan)


def remove(archive: LogArchive, plan: RemovalPlan) -> None:
    """Remove the objects of a plan, segments before the files that they list, and old partial files. Raises `StorageError`."""
    for names in (plan.segments, plan.files):
        with ThreadPoolExecutor(DELETES, thread_name_prefix="log") as pool:
            list(pool.map(archive.store.delete, names))
    known = [each.name for each in archive.segments]
    known += [file.name for each in (*archive.segments, *archive.replaced) for file in each.files]
    for folder in sorted({name.rpartition("/")[0] for name in known}):
        archive.store.sweep(folder, older_than=ORPHAN_SECONDS)
