"""Retention of drills: what a report says selects no backup that another command made."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.unit.backupset.shelves import index_at, shelve
from tests.unit.drill.samples import DAY_MS, passed
from tikv_br.backupset.index import Index, IndexEntry
from tikv_br.cli.main import run
from tikv_br.drill.history import REPORTS, backup_path, read_past_drills, remove_old_drills, sealed
from tikv_br.drill.report import DrillReport, write_json
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture
def home(tmp_path: Path) -> ObjectStore:
    """The place of the reports."""
    return open_store(parse(str(tmp_path / "home")))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """The index of the backups."""
    return index_at(tmp_path / "backups")


def save(home: ObjectStore, report: DrillReport) -> None:
    """Write a report that says nothing of earlier drills."""
    write_json(home, replace(report, trend=()))


def naming(report: DrillReport, entry: IndexEntry) -> DrillReport:
    """A report whose drill claims to have made a backup."""
    assert report.backup is not None
    return replace(report, backup=structs.replace(report.backup, id=entry.id, made_by_drill=True))


def made_by(index: Index, drill: str) -> IndexEntry:
    """The backup of a drill, at the path and with the place in its manifest that drills write."""
    path = backup_path(drill)
    return shelve(index, path, storage=index.root.location.child(path).redacted())


def remaining(index: Index) -> set[str]:
    """Paths of the backups that are whole."""
    return {each.entry.path for each in index.read() if index.is_backup(each.entry)}


def test_backups_of_old_drills_go_with_their_reports(home: ObjectStore, index: Index) -> None:
    """But for pinned ones, and parents of others."""
    reports = [passed(number) for number in range(1, 6)]
    entries = [made_by(index, report.id) for report in reports]
    for report, entry in zip(reports, entries, strict=True):
        save(home, naming(report, entry))
    index.pin(entries[0])
    shelve(index, "next", parent=index.root.location.child(entries[1].path).redacted())
    (problem,) = remove_old_drills(home, index.root, read_past_drills(home), 1)
    assert "base of incremental backups" in problem
    assert remaining(index) == {"next", *(entries[number].path for number in (0, 1, 4))}
    assert {each.id for each in read_past_drills(home)} == {reports[1].id, reports[4].id}


@pytest.mark.parametrize("path", ["prod-monday", "drill-20260921T000009-abcdef", "drill-20260921T000001-abcdef"])
def test_a_forged_report_removes_no_backup(home: ObjectStore, index: Index, path: str) -> None:
    """Neither one of another command, nor that of another drill, nor one whose manifest names another place."""
    victim = shelve(index, path, storage="local:///elsewhere/prod-monday")
    save(home, naming(passed(1), victim))
    save(home, passed(2))
    (problem,) = remove_old_drills(home, index.root, read_past_drills(home), 1)
    assert f"names {path}, which that drill did not make" in problem
    assert remaining(index) == {path}
    assert len(read_past_drills(home)) == 2


def test_reports_from_the_future_push_out_none(
    home: ObjectStore, index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    """They count for nothing, also as the newest drill that passed."""
    real = passed(1)
    save(home, naming(real, made_by(index, real.id)))
    for number in range(2, 5):
        forged = passed(number)
        save(home, replace(forged, started_ms=forged.started_ms + 100_000 * DAY_MS))
    assert remove_old_drills(home, index.root, read_past_drills(home), 1) == []
    assert remaining(index) == {backup_path(real.id)}
    assert len(read_past_drills(home)) == 4
    assert caplog.text.count("is from the future") == 3


def places(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:  # noqa: ANN401 - any JSON
    """The place of every value in a document, also of objects and arrays."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(each, (*above, key))


@pytest.mark.parametrize("value", ["x", None, [], 10**400], ids=["text", "null", "array", "number"])
def test_a_report_of_other_types_costs_no_other_one(home: ObjectStore, value: object) -> None:
    """Its hash belongs to it, as the hash of whoever writes it does: `list` shows the rest, `show` says what is damaged."""
    save(home, passed(1))
    forged = json.loads(json.dumps({**passed(2).to_json(), "trend": []}))
    for *path, last in list(places(forged)):
        document = copy.deepcopy(forged)
        inside: Any = document
        for step in path:
            inside = inside[step]
        inside[last] = value
        home.put(f"{REPORTS}/{forged['id']}.json", json.dumps(sealed(document)).encode() + b"\n")
        assert passed(1).id in {past.id for past in read_past_drills(home)}
        assert run(["drill", "show", forged["id"], "--reports", home.location.path]) != 1, "an unexpected error"
