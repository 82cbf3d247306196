"""The figures at the top of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tikv_br.report.facts import DrillVerdict, figure
from tikv_br.serve.findings import GC_LIMIT
from tikv_br.serve.model import Gc, Newest, Overview

BAD = "bad"
VERDICTS = frozenset(map(str, DrillVerdict))


def age(seconds: float) -> str:
    """A duration, as exact as its size is worth: ``8 s``, ``12 min``, ``5 h 03 min``, ``3 d 4 h``."""
    if seconds < 0:
        return f"-{age(-seconds)}"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h" if days < 10 else f"{days} d"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the summary."""

    name: str
    value: str
    more: str
    verdict: str = ""
    """A class of the style sheet."""


def make_tiles(shown: Overview, now_ms: int) -> list[Tile]:
    """The most important figures of each section; none of a section that was not read."""
    newest = [each for storage in shown.storages for each in storage.newest]
    ends = [(window.to_ms, window.log_id) for each in shown.backups for window in each.windows if not window.problem]
    found = [_newest(each, now_ms, named=len(newest) > 1) for each in newest]
    if ends:
        last, log = max(ends)
        found.append(Tile("restorable up to", f"{age((now_ms - last) / 1000)} ago", f"with the log {log}"))
    found += [
        *_logs(shown),
        *_syncs(shown),
        *_drills(shown, now_ms),
        *(_gc(each) for each in shown.gc if each.source.read_ms),
    ]
    return found


def _newest(newest: Newest, now_ms: int, *, named: bool) -> Tile:
    where = newest.prefix or newest.storage.partition("?")[0]
    name = f"newest backup in {where}" if named else "newest backup"
    value = f"{age((now_ms - newest.finished_ms) / 1000)} ago" if newest.path else "none"
    more = f"{newest.path}; allowed: {age(newest.max_age)}" if newest.too_old else newest.path
    return Tile(name, value, more, BAD if newest.too_old else "")


def _logs(shown: Overview) -> Iterator[Tile]:
    lags = [(each.status.rpo_seconds, each.status.log_id) for each in shown.archives if each.status]
    if lags:
        lag, name = max(lags)
        is_bad = any(each.section == "logs" for each in shown.findings)
        yield Tile("greatest lag of a log", age(lag), name, BAD if is_bad else "")


def _syncs(shown: Overview) -> Iterator[Tile]:
    """A sync whose process does not answer has no lag: what was last read of it is no longer true."""
    silent = [page.source.place for page in shown.status_pages if page.source.error]
    running = [each for page in shown.status_pages if not page.source.error for each in page.syncs]
    bad = [*silent, *(each.name for each in running if each.trouble)]
    lags = [(each.checkpoint_lag, each.name) for each in running if each.checkpoint_lag is not None]
    if bad:
        yield Tile("syncs in trouble", f"{len(bad)} of {len(silent) + len(running)}", ", ".join(bad[:3]), BAD)
    if lags:
        lag, name = max(lags)
        yield Tile("greatest lag of a sync", figure(lag, "s"), name, BAD if name in bad else "")


def _drills(shown: Overview, now_ms: int) -> Iterator[Tile]:
    for last in (each.drills[0] for each in shown.drills if each.drills):
        verdict = last.verdict if last.verdict in VERDICTS else BAD
        yield Tile("last drill", last.verdict, f"{age((now_ms - last.started_ms) / 1000)} ago", verdict)


def _gc(gc: Gc) -> Tile:
    if gc.never_ran or gc.lag is None:
        return Tile("GC safe point", "never ran", gc.source.place, BAD)
    is_bad = gc.lag > GC_LIMIT
    return Tile("GC safe point", f"{age(gc.lag)} old", gc.holder or "not held back", BAD if is_bad else "")
