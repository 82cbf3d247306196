"""Reads every source in a thread of its own, again and again, so that a page never waits for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Self

from tikv_br.cancellation import Cancellation, TaskCancelled
from tikv_br.errors import TikvBrError
from tikv_br.gc.status import GcReport
from tikv_br.redaction import redact
from tikv_br.serve.findings import OverviewLimits
from tikv_br.serve.model import Overview, ReadState, States
from tikv_br.serve.overview import find_windows, make_overview
from tikv_br.serve.sources import Backups, DrillSource, Log, ShownSource, Sync

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
