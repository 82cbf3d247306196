"""Earlier drills, as much of them as a trend, a list and the index page show."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from tikv_br.errors import StorageObjectMissing
from tikv_br.storage.base import ObjectStore

REPORTS = "reports"
TREND = 60
"""Drills that a trend shows."""
WHOLE = "lost-cluster"
"""The scenario whose RTO is that of the whole backup."""
SEAL = "content_sha256"
"""A field of each report: the hash of the others. Old backups are removed by what reports say."""
_END = b"}\n"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Past:
    """One drill in a line. Times in seconds, but for ``started_ms``; sizes in bytes; None = not measured."""

    id: str
    verdict: str
    scenario: str
    started_ms: int
    seconds: float
    rpo: float | None
    rto: float | None
    keys: int
    data_bytes: int
    speed: float | None
    """Bytes of keys and values a second, over the whole recovery; None also where a part was restored beside the rest."""
    made_backup: str
    """Id of the backup that the drill made; ``""`` = none."""


def past_of(report: Mapping[str, Any]) -> Past:
    """The line of a report's JSON. Raises `KeyError`, `TypeError` for what is no report."""
    goals = {goal["name"]: goal["value"] for goal in report["goals"]}
    backup = report["backup"] or {}
    size, rto = backup.get("data_bytes", 0), goals.get("RTO")
    return Past(
        id=report["id"],
        verdict=report["verdict"],
        scenario=report["scenario"],
        started_ms=report["started_ms"],
        seconds=report["seconds"],
        rpo=goals.get("RPO"),
        rto=rto,
        keys=backup.get("keys", 0),
        data_bytes=size,
        speed=size / rto if rto and report["scenario"] == WHOLE else None,
        made_backup=backup["id"] if backup.get("made_by_drill") else "",
    )


def read_past(home: ObjectStore) -> tuple[Past, ...]:
    """All earlier drills, the oldest first; a report that does not read is left out, with a warning.

    Each report carries the lines of those before it: mostly one object is read, not one a drill.
    """
    names = sorted(info.name for info in home.list(REPORTS) if info.name.endswith(".json"))
    known: dict[str, Past] = {}
    for name in reversed(names):
        drill = name.rpartition("/")[2].removesuffix(".json")
        if drill in known:
            continue
        report = read_report(home, drill)
        if report is not None:
            known |= {each.id: each for each in _lines(report, name)}
    there = {name.rpartition("/")[2].removesuffix(".json") for name in names}
    return tuple(sorted((each for each in known.values() if each.id in there), key=lambda each: each.started_ms))


def read_report(home: ObjectStore, drill: str) -> dict[str, Any] | None:
    """The report of a drill; None when it is gone, or is not as it was written, which is warned of."""
    name = f"{REPORTS}/{drill}.json"
    try:
        data = home.get(name)
        found = json.loads(data)
    except StorageObjectMissing:
        return None
    except (ValueError, RecursionError) as error:
        log.warning("%s is no report: %s", name, error)
        return None
    whole = isinstance(found, dict) and data.endswith(_END) and sealed(found) == found
    if not whole or found.get("id") != drill:
        log.warning("%s is damaged: it is not the report that drill %s has written", name, drill)
        return None
    return cast("dict[str, Any]", found)


def sealed(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report with the hash of what it says."""
    said = {name: value for name, value in report.items() if name != SEAL}
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return {**said, SEAL: hashlib.sha256(canonical.encode()).hexdigest()}


def _lines(report: Mapping[str, Any], name: str) -> list[Past]:
    try:
        wanted = {field.name for field in fields(Past)}
        return [Past(**{key: line[key] for key in wanted}) for line in report["trend"]] or [past_of(report)]
    except (KeyError, TypeError) as error:
        log.warning("%s is no report that this version reads: %s", name, error)
        return []
