"""Earlier drills, as trends, lists and the index page show them, and the removal of old ones."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import msgspec

from tikv_br import records
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.backupset.prune import CLOCK_ERROR_MS, check_deletable, remove
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupSetError,
    StorageNotRegular,
    StorageObjectMissing,
    UsageError,
)
from tikv_br.records import MAX_MILLISECONDS, Milliseconds
from tikv_br.storage.base import ObjectStore

REPORTS = "reports"
MAX_TREND = 60
"""Drills in a trend, at most."""
WHOLE_BACKUP = "lost-cluster"
"""The scenario whose RTO is of the whole backup."""
Count = Milliseconds
Figure = Annotated[float, msgspec.Meta(gt=-MAX_MILLISECONDS, lt=MAX_MILLISECONDS)]
SEAL = "content_sha256"
"""A field of each report: the hash of the others. It detects damage, not a forgery."""
_END = b"}\n"
NOT_A_REPORT = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Raised when the figures of a document are read that is no report."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PastDrill:
    """The figures of one drill. Times in seconds, but for ``started_ms``; sizes in bytes; None = not measured."""

    id: str
    verdict: str
    scenario: str
    started_ms: Count
    seconds: Figure
    rpo: Figure | None
    rto: Figure | None
    keys: Count
    """Keys of the backup, as is the size; may include keys that have expired since."""
    data_bytes: Count
    speed: Figure | None
    """Bytes of keys and values per second, over the whole recovery; None also if only a part was restored."""
    made_backup: str
    """Id of the backup that the drill made; ``""`` = none."""
    restored_keys: Count | None = None
    """Counted in the target after the restore; None also in reports of versions up to 1.0.0rc1."""


def past_drill_of(report: Mapping[str, Any]) -> PastDrill:
    """The figures in a report's JSON. Raises `NOT_A_REPORT`."""
    goals = {goal["name"]: goal["value"] for goal in report["goals"]}
    backup = report["backup"] or {}
    size, rto = backup.get("data_bytes", 0), goals.get("RTO")
    return PastDrill(
        id=report["id"],
        verdict=report["verdict"],
        scenario=report["scenario"],
        started_ms=report["started_ms"],
        seconds=report["seconds"],
        rpo=goals.get("RPO"),
        rto=rto,
        keys=backup.get("keys", 0),
        restored_keys=goals.get("keys"),
        data_bytes=size,
        speed=size / rto if rto and report["scenario"] == WHOLE_BACKUP else None,
        made_backup=backup["id"] if backup.get("made_by_drill") else "",
    )


def backup_path(drill: str) -> str:
    """The folder of a drill's backup, below the folder of all backups."""
    return f"drill-{drill}"


def read_past_drills(home: ObjectStore) -> tuple[PastDrill, ...]:
    """All drills that have a report, the oldest first; damaged reports are omitted with a warning.

    Each report also has the figures of the drills before it, so that mostly one object is read.
    """
    names = sorted(info.name for info in home.list(REPORTS) if info.name.endswith(".json"))
    known: dict[str, PastDrill] = {}
    for name in reversed(names):
        drill = _id_in(name)
        if drill in known:
            continue
        report = read_report(home, drill)
        if report is not None:
            known |= {each.id: each for each in _trend_of(report, name)}
    ids = set(map(_id_in, names))
    return tuple(sorted((each for each in known.values() if each.id in ids), key=lambda each: each.started_ms))


def read_report(home: ObjectStore, drill: str) -> dict[str, Any] | None:
    """The report of a drill; None if there is none or, with a warning, if it is damaged."""
    name = f"{REPORTS}/{drill}.json"
    try:
        data = home.get(name)
        found = json.loads(data)
    except StorageObjectMissing:
        return None
    except (ValueError, RecursionError) as error:
        log.warning("%s is not a report: %s", name, error)
        return None
    whole = isinstance(found, dict) and data.endswith(_END) and sealed(found) == found
    if not whole or found.get("id") != drill:
        log.warning("%s is damaged: it is not the report that drill %s wrote", name, drill)
        return None
    return cast("dict[str, Any]", found)


def find_report(home: ObjectStore, drill: str) -> dict[str, Any]:
    """The report of the drill whose id begins so, the newest for ``""``. Raises `BackupNotFound`, `UsageError`, `BackupDamaged`."""
    ids = [past.id for past in read_past_drills(home) if past.id.startswith(drill)]
    if not ids:
        what = f"no report of a drill {drill!r}" if drill else "no report of a drill"
        raise BackupNotFound(
            f"there is {what} in {home.location}", hint="Run `tikv-br drill list`, and check --reports."
        )
    if drill and len(ids) > 1:
        raise UsageError(f"{drill!r} matches {len(ids)} drills: {', '.join(ids[:4])}")
    report = read_report(home, ids[-1])
    if report is None:
        raise BackupDamaged(
            f"{REPORTS}/{ids[-1]}.json in {home.location} is damaged: it is not what drill {ids[-1]} wrote",
            hint="Its page, the .html beside it, may be intact. Run `tikv-br drill list` for other drills.",
        )
    return report


def sealed(report: Mapping[str, Any]) -> dict[str, Any]:
    content = {name: value for name, value in report.items() if name != SEAL}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, SEAL: hashlib.sha256(canonical.encode()).hexdigest()}


def remove_old_drills(
    home: ObjectStore, backups: ObjectStore, drills: Sequence[PastDrill], keep_last: int
) -> list[str]:
    """Remove reports, and the backups that drills made, and return what could not be removed. ``drills``: the oldest first.

    The newest ``keep_last`` drills stay (0 = all), the newest that passed, and pinned backups. A backup goes before the
    report that names it. Reports from the future count for nothing, and stay.
    """
    if not keep_last:
        return []
    latest_ms = time.time() * 1000 + CLOCK_ERROR_MS
    for drill in drills:
        if drill.started_ms > latest_ms:
            log.warning("the report of drill %s is from the future, and counts for nothing", drill.id)
    drills = [each for each in drills if each.started_ms <= latest_ms]
    passed = [each.id for each in drills if each.verdict == "passed"][-1:]
    problems = []
    for old in drills[:-keep_last]:
        if old.id in passed:
            continue
        try:
            _remove_backup(Index(backups), old)
        except (BackupSetError, StorageNotRegular, UsageError) as error:
            problems.append(f"cannot remove the backup of drill {old.id}: {error.message}")
            log.warning(problems[-1])
            continue
        home.delete(f"{REPORTS}/{old.id}.html")
        home.delete(f"{REPORTS}/{old.id}.json")
    return problems


def _id_in(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".json")


def _trend_of(report: Mapping[str, Any], name: str) -> list[PastDrill]:
    try:
        return records.convert(report["trend"] or [asdict(past_drill_of(report))], list[PastDrill])
    except (*NOT_A_REPORT, msgspec.ValidationError) as error:
        log.warning("%s is not a report of a version that can be read: %s", name, error)
        return []


def _remove_backup(index: Index, drill: PastDrill) -> None:
    """Remove the backup that a drill made unless it is pinned or no longer in the index.

    A report can name any backup: this one's path, and the place in its own manifest, must be where this drill writes its backup.
    """
    found = next((each for each in index.read() if each.entry.id == drill.made_backup), None)
    if found is None or found.pinned:
        return
    path = backup_path(drill.id)
    made = BackupSet.open_any(index.store_of(found.entry.path), key_mode=None).manifest
    if found.entry.path != path or made is None or not made.description.storage.endswith(f"/{path}"):
        raise BackupDamaged(f"{REPORTS}/{drill.id}.json names {found.entry.path}, which that drill did not make")
    check_deletable(index, found)
    remove(index, found.entry)
    index.refresh()
