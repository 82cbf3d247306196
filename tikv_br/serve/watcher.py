"""Reads every source in a thread of its own, again and again, so that a page never waits for one.

`make_overview` makes of what they have the values that the page and ``/api/overview.json`` show; it is pure but for the version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from tikv_br import __version__
from tikv_br.backupset.index import IndexEntry, ListedBackup, is_drill_path, shrunk
from tikv_br.cancellation import Cancellation, TaskCancelled
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import LogDamaged, TikvBrError, UsageError
from tikv_br.gc.status import GcReport
from tikv_br.redaction import redact
from tikv_br.serve.findings import OverviewLimits, find_problems, newest_backups
from tikv_br.serve.model import (
    Archive,
    Backup,
    Drills,
    Gc,
    GcService,
    Overview,
    ReadState,
    Source,
    States,
    StatusPage,
    Storage,
    Window,
)
from tikv_br.serve.sources import Backups, Baseline, DrillSource, Log, ShownSource, Sync

T = TypeVar("T")
Windows = Mapping[tuple[str, str], tuple[Window, ...]]
"""Restorable windows by URL of the storage and id of the backup."""


def make_overview(states: States, windows: Windows, limits: OverviewLimits, now_ms: int) -> Overview:
    """Build the overview for a time in milliseconds since the epoch."""
    by_drills = {drill.made_backup for each in states.drills for drill in each.value or ()}
    archives = tuple(Archive(_source(each), each.value.status if each.value else None) for each in states.logs)
    pages = tuple(StatusPage(_source(each), each.value or ()) for each in states.syncs)
    drills = tuple(Drills(_source(each), tuple(reversed(each.value or ()))) for each in states.drills)
    gc = tuple(_gc(each) for each in states.gc)
    storages = tuple(_storage(each, windows, by_drills, limits, now_ms) for each in states.backups)
    shown = Overview(__version__, storages, archives, pages, drills, gc, ())
    return replace(shown, findings=tuple(find_problems(shown, limits)))


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
    first = archive.inexact_around(baseline.ranges, baseline.scanned_ts)[1]
    last = archive.inexact_around(baseline.ranges, end)[0]
    if last < first:
        is_lost = bool(archive.lost(baseline.ranges, baseline.backup_ts))
        scanned = "the end of a scan window" if end > baseline.scanned_ts else "the end of its scan"
        reason = "the log lacks changes after it" if is_lost else f"the log has not reached {scanned}"
        return Window(status.log_id, status.storage, 0, 0, 0, 0, reason)
    return Window(status.log_id, status.storage, first, last, physical_ms(first), physical_ms(last), "")


def _source(state: ReadState[T]) -> Source:
    return Source(state.place, state.read_ms, state.error, state.hint)


def _storage(
    state: ReadState[Backups], windows: Windows, by_drills: Container[str], limits: OverviewLimits, now_ms: int
) -> Storage:
    if state.value is None:
        return Storage(_source(state), (), ())
    root = state.value.root
    urls = {each.entry.id: root.child(each.entry.path).redacted() for each in state.value.listed}
    before = shrunk([each.entry for each in state.value.listed])
    backups = tuple(
        _backup(
            each,
            urls[each.entry.id],
            depth,
            windows.get((state.place, each.entry.id), ()),
            by_drills,
            before.get(each.entry.id, 0),
        )
        for each, depth in _by_chain(state.value.listed, urls)
    )
    return Storage(_source(state), backups, newest_backups(state.place, backups, limits, now_ms))


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


def _backup(
    listed: ListedBackup,
    url: str,
    depth: int,
    windows: tuple[Window, ...],
    by_drills: Container[str],
    rows_before: int,
) -> Backup:
    entry: IndexEntry = listed.entry
    return Backup(
        id=entry.id,
        path=entry.path,
        url=url,
        parent=entry.parent,
        depth=depth,
        engine=entry.engine,
        api_version=entry.dst_api_version.label,
        key_mode=entry.key_mode.value,
        cluster_id=entry.cluster_id,
        scope=entry.scope,
        backup_ts=entry.backup_ts,
        finished_ms=entry.finished_ms,
        keyspaces=entry.shown_keyspaces,
        total_kvs=entry.total_kvs,
        rows_before=rows_before,
        total_bytes=entry.total_bytes,
        backup_size=entry.backup_size,
        files=entry.files,
        encryption=entry.encryption,
        pinned=listed.pinned,
        removing=listed.removing,
        made_by_drill=entry.id in by_drills or is_drill_path(entry.path),
        windows=windows,
    )


def _gc(state: ReadState[GcReport]) -> Gc:
    report = state.value
    if report is None:
        return Gc(_source(state), 0, never_ran=False, lag=None, holder="", held_seconds=0.0, services=())
    holder = report.holder
    services = tuple(
        GcService(each.service, str(each.owner), each.safe_point, each.lag, each.ttl, each == holder)
        for each in report.services
    )
    return Gc(
        _source(state),
        report.safe_point,
        not report.safe_point,
        report.lag,
        "" if holder is None else holder.service,
        report.held_seconds,
        services,
    )


log = logging.getLogger(__name__)
JOIN_SECONDS = 2.0
"""Seconds to wait at shutdown for a running read."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources by section; the fields are as in `States`."""

    backups: tuple[ShownSource[Backups], ...] = ()
    logs: tuple[ShownSource[Log], ...] = ()
    syncs: tuple[ShownSource[tuple[Sync, ...]], ...] = ()
    drills: tuple[DrillSource, ...] = ()
    gc: tuple[ShownSource[GcReport], ...] = ()

    def by_section(self) -> Iterator[tuple[str, tuple[ShownSource[Any], ...]]]:
        return ((each.name, getattr(self, each.name)) for each in fields(self))


class Watcher:
    """The overview, kept up to date while the context is entered. Thread-safe."""

    def __init__(self, sources: Sources, interval: float, limits: OverviewLimits) -> None:
        """`interval`: seconds between two reads of a source."""
        self._sources, self._interval, self._limits = sources, interval, limits
        self._states = States(
            **{name: tuple(ReadState(each.place) for each in group) for name, group in sources.by_section()}
        )
        self._windows = find_windows(self._states)
        self._lock = threading.Lock()
        self._unread = {(name, at) for name, group in sources.by_section() for at in range(len(group))}
        self._all_read = threading.Event()
        self._stop, self._cancellation = threading.Event(), Cancellation()
        self._threads = [
            threading.Thread(target=self._run, args=(name, at, source), name=f"read {name}", daemon=True)
            for name, group in sources.by_section()
            for at, source in enumerate(group)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._cancellation.cancel()
        until = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def overview(self, patience: float = 0.0) -> Overview:
        """Return the last values with their age; waits at most `patience` seconds until each source was read once."""
        self._all_read.wait(patience)
        with self._lock:
            states, windows = self._states, self._windows
        return make_overview(states, windows, self._limits, time.time_ns() // 1_000_000)

    def report(self, place: int, drill: str) -> bytes | None:
        """The page of a drill of the place with this number; None for a drill that is not in the overview. Raises `TikvBrError`."""
        known = self._states.drills[place].value if place < len(self._states.drills) else None
        if drill not in {each.id for each in known or ()}:
            return None
        return self._sources.drills[place].report(drill)

    def _run(self, section: str, at: int, source: ShownSource[Any]) -> None:
        with self._cancellation.active():
            while not self._stop.is_set():
                self._read(section, at, source)
                self._stop.wait(self._interval)

    def _read(self, section: str, at: int, source: ShownSource[Any]) -> None:
        """Read a source once, and publish what was found."""
        before: ReadState[Any] = getattr(self._states, section)[at]
        try:
            found: ReadState[Any] = ReadState(source.place, source.read(), time.time_ns() // 1_000_000)
        except TaskCancelled:
            return
        except TikvBrError as error:
            found = replace(before, error=redact(error.message), hint=redact(error.hint))
        except Exception as error:
            log.debug("cannot read %s", source.place, exc_info=True)
            found = replace(before, error=redact(f"unexpected {type(error).__name__}: {error}"), hint="")
        if found.error and found.error != before.error:
            log.warning("cannot read %s: %s", source.place, found.error)
        self._publish(section, at, found)

    def _publish(self, section: str, at: int, state: ReadState[Any]) -> None:
        with self._lock:
            group: list[ReadState[Any]] = list(getattr(self._states, section))
            group[at] = state
            changes: dict[str, Any] = {section: tuple(group)}
            self._states = replace(self._states, **changes)
            if section in {"backups", "logs"}:
                self._windows = find_windows(self._states)
            self._unread.discard((section, at))
            if not self._unread:
                self._all_read.set()
