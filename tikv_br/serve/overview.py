"""The values that the page and ``/api/overview.json`` show, made of what the sources have. Pure but for the version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tikv_br import __version__
from tikv_br.archive.maintenance import LogStatus
from tikv_br.archive.records import LogState
from tikv_br.backupset.index import IndexEntry, ListedBackup
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.drill.history import PastDrill
from tikv_br.errors import LogDamaged, UsageError
from tikv_br.gc.status import GcReport
from tikv_br.serve.sources import Backups, Baseline, Log, Sync

T = TypeVar("T")
GC_LIMIT = 86400.0
"""Age of the GC safe point, in seconds, that is worth a look: the default of ``gc status --warn``."""


@dataclass(frozen=True, slots=True)
class State(Generic[T]):
    """What is known of a source."""

    place: str
    value: T | None = None
    """What was last read; None = nothing yet."""
    read_ms: int = 0
    """When, in milliseconds since the epoch; 0 = never."""
    error: str = ""
    """Why the last attempt failed; `value` is then that of an earlier one."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class States:
    """What is known of all sources."""

    backups: tuple[State[Backups], ...] = ()
    logs: tuple[State[Log], ...] = ()
    syncs: tuple[State[tuple[Sync, ...]], ...] = ()
    drills: tuple[State[tuple[PastDrill, ...]], ...] = ()
    gc: tuple[State[GcReport], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a part of the overview comes from."""

    place: str
    read_ms: int
    """When it was last read, in milliseconds since the epoch; 0 = never."""
    error: str
    """Why the last attempt to read it failed; the values are then those of an earlier one."""
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
    """Why there is none; the times are then 0."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup. Times are milliseconds since the epoch, sizes bytes."""

    id: str
    path: str
    url: str
    parent: str
    """URL of the backup that it continues; empty = it is a full one."""
    depth: int
    """How many backups of this storage its chain has before it."""
    engine: str
    api_version: str
    cluster_id: int
    backup_ts: int
    """0 = none."""
    finished_ms: int
    total_kvs: int
    total_bytes: int
    backup_size: int
    files: int
    encryption: str
    pinned: bool
    removing: bool
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """The backups of one storage: chain after chain, the newest first; each from its full backup on."""

    source: Source
    backups: tuple[Backup, ...]


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
    lag: float | None
    """Age of the safe point in seconds."""
    holder: str
    """The service that GC waits for; empty = none."""
    held_seconds: float
    services: tuple[GcService, ...]
    """The oldest safe point first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs attention."""

    text: str
    section: str
    """Of the page."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All that is shown."""

    version: str
    storages: tuple[Storage, ...]
    archives: tuple[Archive, ...]
    status_pages: tuple[StatusPage, ...]
    drills: tuple[Drills, ...]
    gc: tuple[Gc, ...]
    findings: tuple[Finding, ...]

    @property
    def backups(self) -> tuple[Backup, ...]:
        """Of all storages."""
        return tuple(each for storage in self.storages for each in storage.backups)


Windows = Mapping[tuple[str, str], tuple[Window, ...]]
"""By URL of the storage and id of the backup."""


def make_overview(states: States, windows: Windows, max_lag: float) -> Overview:
    """The overview; `max_lag` is in seconds, for log archives."""
    archives = tuple(Archive(_source(each), each.value.status if each.value else None) for each in states.logs)
    pages = tuple(StatusPage(_source(each), each.value or ()) for each in states.syncs)
    drills = tuple(Drills(_source(each), tuple(reversed(each.value or ()))) for each in states.drills)
    gc = tuple(_gc(each) for each in states.gc)
    findings = [
        *_unread(states),
        *(Finding(text, "logs") for each in archives if each.status for text in log_problems(each.status, max_lag)),
        *(Finding(text, "syncs") for page in pages for each in page.syncs for text in _sync_problems(each)),
        *(Finding(text, "drills") for each in drills for text in _drill_problems(each)),
        *(Finding(text, "gc") for each in gc for text in _gc_problems(each)),
    ]
    storages = tuple(_storage(each, windows) for each in states.backups)
    return Overview(__version__, storages, archives, pages, drills, gc, tuple(findings))


def _unread(states: States) -> Iterator[Finding]:
    groups: tuple[tuple[str, Sequence[State[Any]]], ...] = (
        ("backups", states.backups),
        ("logs", states.logs),
        ("syncs", states.syncs),
        ("drills", states.drills),
        ("gc", states.gc),
    )
    for section, group in groups:
        yield from (Finding(f"cannot read {each.place}: {each.error}", section) for each in group if each.error)


def find_windows(states: States) -> Windows:
    """The restorable windows of all backups with all log archives of their clusters."""
    logs = [each.value for each in states.logs if each.value is not None]
    return {
        (state.place, name): tuple(
            window for log in logs if (window := _window(baseline, log, _finished_ms(state.value, name))) is not None
        )
        for state in states.backups
        if state.value is not None
        for name, baseline in state.value.baselines.items()
    }


def _finished_ms(found: Backups, name: str) -> int:
    return next(each.entry.finished_ms for each in found.listed if each.entry.id == name)


def _window(baseline: Baseline | str, log: Log, finished_ms: int) -> Window | None:
    """None for a log of another cluster, of other keys or that starts later."""
    archive, status = log.archive, log.status
    if isinstance(baseline, str):
        is_older = physical_ms(archive.start_ts) > finished_ms
        return None if is_older else Window(status.log_id, status.storage, 0, 0, 0, 0, baseline)
    if baseline.cluster_id != archive.description.cluster_id:
        return None
    try:
        archive.check(baseline.ranges, baseline.backup_ts, baseline.backup_ts)
    except (UsageError, LogDamaged):
        return None
    end = archive.end_ts(baseline.backup_ts, baseline.ranges)
    first, last = baseline.scanned_ts, archive.inexact_around(baseline.ranges, end)[0]
    if last < first:
        is_lost = bool(archive.lost(baseline.ranges, baseline.backup_ts))
        reason = "the log lacks changes after it" if is_lost else "the log has not reached the end of its scan"
        return Window(status.log_id, status.storage, 0, 0, 0, 0, reason)
    return Window(status.log_id, status.storage, first, last, physical_ms(first), physical_ms(last), "")


def log_problems(status: LogStatus, max_lag: float) -> list[str]:
    """What is wrong with a log archive, in one line each."""
    found = [f"log {status.log_id} has no changes of {gap}" for gap in status.gaps]
    found += [f"log {status.log_id}: {each}" for each in status.damage]
    if status.state is LogState.ACTIVE and status.rpo_seconds > max_lag:
        found.append(f"log {status.log_id} is {status.rpo_seconds:,.0f} s behind, which is more than {max_lag:g} s")
    return found


def _sync_problems(sync: Sync) -> list[str]:
    if sync.trouble:
        return [f"{sync.name}: {sync.trouble}"]
    return [f"{sync.name} is degraded: {sync.degraded}"] if sync.degraded else []


_OUTCOMES = {"missed": "missed an objective", "failed": "failed", "interrupted": "was interrupted"}


def _drill_problems(drills: Drills) -> list[str]:
    if not drills.drills or drills.drills[0].verdict == "passed":
        return []
    verdict = drills.drills[0].verdict
    return [f"the last drill {_OUTCOMES.get(verdict, verdict)}"]


def _gc_problems(gc: Gc) -> list[str]:
    if gc.lag is None or gc.lag <= GC_LIMIT:
        return []
    reason = f"{gc.holder} holds it back" if gc.holder else "no GC worker advances it"
    return [f"the GC safe point is {gc.lag / 3600:,.0f} h old: {reason}"]


def _source(state: State[T]) -> Source:
    return Source(state.place, state.read_ms, state.error, state.hint)


def _storage(state: State[Backups], windows: Windows) -> Storage:
    if state.value is None:
        return Storage(_source(state), ())
    root = state.value.root
    urls = {each.entry.id: root.child(each.entry.path).redacted() for each in state.value.listed}
    backups = tuple(
        _backup(each, urls[each.entry.id], depth, windows.get((state.place, each.entry.id), ()))
        for each, depth in _by_chain(state.value.listed, urls)
    )
    return Storage(_source(state), backups)


def _by_chain(listed: Sequence[ListedBackup], urls: Mapping[str, str]) -> list[tuple[ListedBackup, int]]:
    """Backups with their depth: the chain with the newest backup first, each backup before those that continue it."""
    by_url = {urls[each.entry.id]: each for each in listed}
    children: dict[str, list[ListedBackup]] = {}
    roots = []
    for each in listed:
        parent = each.entry.parent
        if parent in by_url and by_url[parent] is not each:
            children.setdefault(parent, []).append(each)
        else:
            roots.append(each)
    chains = [_chain(each, urls, children) for each in roots]
    reached = {each.entry.id for chain in chains for each, _ in chain}
    # Entries that continue each other in a circle, which no backup does, are shown as well.
    chains += [[(each, 0)] for each in listed if each.entry.id not in reached]
    chains.sort(key=lambda chain: -max(each.entry.finished_ms for each, _ in chain))
    return [each for chain in chains for each in chain]


def _chain(
    first: ListedBackup, urls: Mapping[str, str], children: Mapping[str, list[ListedBackup]]
) -> list[tuple[ListedBackup, int]]:
    found: list[tuple[ListedBackup, int]] = []
    waiting = [(first, 0)]
    while waiting:
        each, depth = waiting.pop()
        found.append((each, depth))
        below = sorted(children.get(urls[each.entry.id], ()), key=lambda child: -child.entry.finished_ms)
        waiting += [(child, depth + 1) for child in below]
    return found


def _backup(listed: ListedBackup, url: str, depth: int, windows: tuple[Window, ...]) -> Backup:
    entry: IndexEntry = listed.entry
    return Backup(
        id=entry.id,
        path=entry.path,
        url=url,
        parent=entry.parent,
        depth=depth,
        engine=entry.engine,
        api_version=entry.dst_api_version.label,
        cluster_id=entry.cluster_id,
        backup_ts=entry.backup_ts,
        finished_ms=entry.finished_ms,
        total_kvs=entry.total_kvs,
        total_bytes=entry.total_bytes,
        backup_size=entry.backup_size,
        files=entry.files,
        encryption=entry.encryption,
        pinned=listed.pinned,
        removing=listed.removing,
        windows=windows,
    )


def _gc(state: State[GcReport]) -> Gc:
    report = state.value
    if report is None:
        return Gc(_source(state), 0, None, "", 0.0, ())
    holder = report.holder
    services = tuple(
        GcService(each.service, str(each.owner), each.safe_point, each.lag, each.ttl, each == holder)
        for each in report.services
    )
    return Gc(
        _source(state),
        report.safe_point,
        report.lag,
        "" if holder is None else holder.service,
        report.held_seconds,
        services,
    )
