"""Damage to what drills write down: it is named, and nothing is removed because of what a damaged object says."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.damage import FLIPS, Case, Victim, cases, read_objects
from tests.unit.drill.samples import NoHost, passed
from tikv_br.drill.history import read_past_drills, read_report, remove_old_drills
from tikv_br.drill.ledger import Cleaner, Creation, EntryKind, Ledger
from tikv_br.drill.playground import MARK, PlaygroundTarget
from tikv_br.drill.report import write_json
from tikv_br.errors import BackupDamaged, DrillRemains
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

EVERY = {"missing", "empty", "truncated", "short of a byte", "swapped", "flipped"}
DRILLS = ("one", "two")


class Noting:
    """Notes what it is to remove."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def remove(self, creation: Creation, drill: str) -> None:
        """Note it."""
        self.asked.append(f"{creation.place} of {drill}")


def killed(home: Path, *, further: bool = True) -> None:
    """Remains of two drills killed with rows in a cluster; with a playground, too, if they came ``further``."""
    store = open_store(parse(str(home)))
    for drill in DRILLS:
        page = Ledger(store, drill)
        page.add(Creation(EntryKind.COPY, f"copies/{drill}"))
        page.add(Creation(EntryKind.ROWS, f"keys of {drill}"))
        if further:
            page.add(Creation(EntryKind.PLAYGROUND, f"folder of {drill}"))


def test_by_a_damaged_page_nothing_is_removed(tmp_path: Path) -> None:
    """Not by the sound pages either, until somebody has looked; a page that is gone is of a drill that left nothing."""
    killed(tmp_path / "older", further=False)
    killed(tmp_path / "home")
    objects, home = read_objects(tmp_path / "home"), open_store(parse(str(tmp_path / "home")))
    pages = {name: data for name, data in objects.items() if name.startswith("ledger/")}
    victim, remover, seen = Victim(tmp_path / "home", objects), Noting(), set()
    cleaner = Cleaner(home, {EntryKind.ROWS: remover, EntryKind.PLAYGROUND: remover})
    for case in cases(pages, read_objects(tmp_path / "older"), lambda _kind: FLIPS):
        seen.add(case.damage)
        if case.damage in {"missing", "older"}:
            continue
        victim.damage(case)
        with pytest.raises(BackupDamaged) as caught:
            cleaner.clean_earlier()
        assert any(name in caught.value.message for name in case.change), str(case)
        assert "Remove by hand" in caught.value.hint
        assert (remover.asked, read_objects(tmp_path / "home")) == ([], {**objects, **case.change})
        victim.mend(case)
    assert seen == {*EVERY, "older"}
    home.put("ledger/one.json", read_objects(tmp_path / "older")["ledger/one.json"])
    home.delete("ledger/two.json")
    assert cleaner.clean_earlier() == []
    assert remover.asked == ["keys of one of one"]
    assert read_objects(tmp_path / "home") == {}


def test_by_a_damaged_report_no_newer_backup_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Drills that are still known are unchanged; exactly the removals of intact reports happen."""
    home, backups = open_store(parse(str(tmp_path / "home"))), open_store(parse(str(tmp_path / "backups")))
    for number in range(1, 5):
        write_json(home, passed(number))
    objects = read_objects(tmp_path / "home")
    write_json(home, replace(passed(4), notices=("before it was damaged",)))
    older = {name: data for name, data in read_objects(tmp_path / "home").items() if data != objects[name]}
    victim, seen = Victim(tmp_path / "home", objects), set()
    sound = read_past_drills(home)
    assert len(sound) == 4
    for case in cases(objects, older, lambda _kind: FLIPS):
        seen.add(case.damage)
        victim.damage(case)
        caplog.clear()
        known = read_past_drills(home)
        assert set(known) <= set(sound), str(case)
        if case.damage not in {"missing", "older"}:
            assert_named(case, caplog.text, {each.id for each in known})
            drill = case.name.removeprefix("reports/").removesuffix(".json")
            assert read_report(home, drill) is None, str(case)
        victim.mend(case)
    assert seen == {*EVERY, "older"}
    newest = max(objects)
    home.put(newest, objects[newest].replace(b"1790345600000", b"1790000000000"))
    remove_old_drills(home, backups, read_past_drills(home), 1)
    assert newest in read_objects(tmp_path / "home")


def assert_named(case: Case, warned: str, known: set[str]) -> None:
    """A report that was read and is not sound is named; one that need not be read is known by a newer one's line."""
    for name in case.change:
        drill = name.removeprefix("reports/").removesuffix(".json")
        assert name in warned or drill in known, str(case)


def test_a_damaged_mark_is_no_mark(tmp_path: Path) -> None:
    """A playground's folder whose mark was altered is left alone; one that is empty is as a kill leaves it."""
    target = PlaygroundTarget(NoHost(), tmp_path)
    creation = target.plan("one")
    folder = Path(creation.place)
    assert creation.host == socket.gethostname()
    (folder / "cluster").mkdir(parents=True)
    for mark in (b"on", b"onf", b"\xefne", b"two", None):
        if mark is None:
            (folder / MARK).unlink()
        else:
            (folder / MARK).write_bytes(mark)
        with pytest.raises(DrillRemains, match="was not made by drill one"):
            target.remove(creation, "one")
        assert (folder / "cluster").exists()
    (folder / MARK).write_bytes(b"")
    target.remove(creation, "one")
    assert not folder.exists()
