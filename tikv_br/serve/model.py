"""Values of the page and of ``/api/overview.json``; the fields are as in the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tikv_br.archive.maintenance import LogStatus
from tikv_br.drill.history import PastDrill
from tikv_br.gc.status import GcReport
from tikv_br.serve.sources import Backups, Log, Sync

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadState(Generic[T]):
    """Last known state of a source."""

    place: str
    value: T | None = None
    """Value last read; None = nothing yet."""
    read_ms: int = 0
    """Time of that read, in milliseconds since the epoch; 0 = never."""
    error: str = ""
    """Reason why the last attempt failed; `value` is then from an earlier one."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class States:
    """Last known state of all sources."""

    backups: tuple[ReadState[Backups], ...] = ()
    logs: tuple[ReadState[Log], ...] = ()
    syncs: tuple[ReadState[tuple[Sync, ...]], ...] = ()
    drills: tuple[ReadState[tuple[PastDrill, ...]], ...] = ()
    gc: tuple[ReadState[GcReport], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a part of the overview."""

    place: str
    read_ms: int
    """Time of the last successful read, in milliseconds since the epoch; 0 = never."""
    error: str
    """Reason why the last attempt failed; the values are then from an earlier one."""
    hint: str


@dataclass(frozen=True, slots=True)
class Window:
    """The times that can be restored from a backup and a log archive."""

    log_id: str
    log: str
    """URL of the archive."""
    from_ts: int
    to_ts: int
    from_ms: int
    to_ms: int
    problem: str
    """Reason why there is no window; the times are then 0."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup. Times are milliseconds since the epoch, sizes bytes."""

    id: str
    path: str
    url: str
    parent: str
    """URL of the backup that it continues; empty = it is a full one."""
    depth: int
    """Number of backups before it in its chain, in this storage."""
    engine: str
    api_version: str
    key_mode: str
    """``raw`` or ``txn``."""
    cluster_id: int
    scope: str
    """The same for backups of one cluster, version and ranges."""
    backup_ts: int
    """Backup-ts; 0 = none."""
    finished_ms: int
    keyspaces: str
    """Names or ids, comma-separated; empty before API V2."""
    total_kvs: int
    rows_before: int
    """Rows of the full backup before it, if this one has less than half of them; else 0."""
    total_bytes: int
    backup_size: int
    files: int
    encryption: str
    pinned: bool
    removing: bool
    made_by_drill: bool
    """True if a drill made the backup: it may remove it, so the backup does not count."""
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest backup of a storage, or of the backups in it that one limit is for."""

    storage: str
    prefix: str
    """Prefix of paths or URLs; empty = all that have no limit of their own."""
    path: str
    """Path of the newest backup; empty = none."""
    finished_ms: int
    """Time of the newest backup; 0 = none."""
    max_age: float
    """Seconds; 0 = any age will do."""
    too_old: bool
    keyspaces: str
    """Of the newest full backup, as the following fields."""
    total_kvs: int
    rows_before: int
    """As in `Backup`."""

    @property
    def where(self) -> str:
        """Storage and prefix, for messages."""
        return f"{self.storage}, prefix {self.prefix}" if self.prefix else self.storage


@dataclass(frozen=True, slots=True)
class Storage:
    """The backups of one storage: chain after chain, the newest first; each from its full backup on."""

    source: Source
    backups: tuple[Backup, ...]
    newest: tuple[Newest, ...]
    """Newest backup for each limit of ages; empty before the storage was read."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A log archive."""

    source: Source
    status: LogStatus | None


@dataclass(frozen=True, slots=True)
class StatusPage:
    """The syncs of one process."""

    source: Source
    syncs: tuple[Sync, ...]


@dataclass(frozen=True, slots=True)
class Drills:
    """The drills of one place, the newest first."""

    source: Source
    drills: tuple[PastDrill, ...]


@dataclass(frozen=True, slots=True)
class GcService:
    """A service safe point."""

    service: str
    owner: str
    safe_point: int
    lag: float
    ttl: float | None
    """Seconds until it expires; None = never."""
    holds_gc: bool


@dataclass(frozen=True, slots=True)
class Gc:
    """Garbage collection of a cluster."""

    source: Source
    safe_point: int
    """0 = GC has never run, or nothing was read."""
    never_ran: bool
    lag: float | None
    """Age of the safe point in seconds."""
    holder: str
    """The service that GC waits for; empty = none."""
    held_seconds: float
    services: tuple[GcService, ...]
    """The oldest safe point first."""


@dataclass(frozen=True, slots=True)
class OverviewFinding:
    """Something that needs attention."""

    text: str
    section: str
    """Section of the page."""
    advice: str
    """Advice on what to do."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All that is shown."""

    version: str
    storages: tuple[Storage, ...]
    archives: tuple[Archive, ...]
    status_pages: tuple[StatusPage, ...]
    drills: tuple[Drills, ...]
    gc: tuple[Gc, ...]
    findings: tuple[OverviewFinding, ...]

    @property
    def sections(self) -> tuple[tuple[str, str, Sequence[Storage | Archive | StatusPage | Drills | Gc]], ...]:
        """Id and title of each section of the page, and what it shows."""
        return (
            ("backups", "Backups", self.storages),
            ("logs", "Log archives", self.archives),
            ("syncs", "Syncs", self.status_pages),
            ("drills", "Drills", self.drills),
            ("gc", "Garbage collection", self.gc),
        )

    @property
    def backups(self) -> tuple[Backup, ...]:
        return tuple(each for storage in self.storages for each in storage.backups)
