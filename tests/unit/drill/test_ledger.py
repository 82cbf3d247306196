from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tikv_br.drill.cleaning import Cleaner
from tikv_br.drill.ledger import Creation, Kind, Ledger, left_behind
from tikv_br.drill.target import MARK, PlaygroundTarget
from tikv_br.errors import DrillRemains
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

COPY = Creation(Kind.COPY, "copies/one")
FOLDER = Creation(Kind.PLAYGROUND, "/somewhere", "a-host")


class NoHost:
    """Runs no playground, and notes which are stopped."""

    def __init__(self) -> None:
        self.stopped: list[Path] = []

    def start(self, folder: Path, api_version: object, stores: int) -> str:
        """Nothing starts here."""
        raise AssertionError

    def stop(self, folder: Path) -> None:
        """Note it."""
        self.stopped.append(folder)


@pytest.fixture
def home(tmp_path: Path) -> ObjectStore:
    """An empty home of drills."""
    return open_store(parse(str(tmp_path / "home")))


def test_what_is_noted_is_read_back_until_it_is_forgotten(home: ObjectStore) -> None:
    """Another process sees what was made, in the order it was made; a page without a line is gone."""
    ledger = Ledger(home, "one")
    ledger.note(COPY)
    ledger.note(FOLDER)
    [read] = left_behind(home)
    assert (read.drill, read.creations) == ("one", (COPY, FOLDER))
    read.forget(COPY)
    assert [page.creations for page in left_behind(home)] == [(FOLDER,)]
    read.forget(FOLDER)
    assert left_behind(home) == []


def test_a_copy_goes_and_no_other_object(home: ObjectStore) -> None:
    """Only what lies in the drill's own folder is deleted."""
    for name in ("copies/one/backupmeta", "copies/one/sst/a.sst", "copies/two/backupmeta", "reports/one.json"):
        home.put(name, b"x")
    ledger = Ledger(home, "one")
    ledger.note(COPY)
    Cleaner(home, {}).clean(ledger)
    assert {info.name for info in home.list()} == {"copies/two/backupmeta", "reports/one.json"}


@pytest.mark.parametrize("creation", [Creation(Kind.COPY, "copies/two"), Creation(Kind.COPY, "reports"), FOLDER])
def test_what_is_not_the_drills_own_stays_in_the_ledger(home: ObjectStore, creation: Creation) -> None:
    """A place that no drill of this name makes is refused, and told once more by the next drill."""
    home.put("copies/two/backupmeta", b"x")
    home.put("reports/two.json", b"x")
    ledger = Ledger(home, "one")
    ledger.note(creation)
    with pytest.raises(DrillRemains):
        Cleaner(home, {}).clean(ledger)
    assert [page.creations for page in left_behind(home)] == [(creation,)]
    assert len(Cleaner(home, {}).clean_earlier()) == 1
    assert {info.name for info in home.list()} >= {"copies/two/backupmeta", "reports/two.json"}


class Refusing:
    """Removes nothing."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Refuse it."""
        raise DrillRemains(f"{creation.place} of {drill} stays")


@pytest.mark.parametrize(("kind", "copy_stays"), [(Kind.CANARY, False), (Kind.KEYS, True)])
def test_what_stays_keeps_nothing_else_but_its_journal(home: ObjectStore, kind: Kind, copy_stays: bool) -> None:
    """What was made before something that cannot be removed goes, but for the journal of rows that stay."""
    home.put("copies/one/journal/00000000", b"x")
    ledger, stays = Ledger(home, "one"), Creation(kind, "somewhere")
    for creation in (COPY, stays, Creation(Kind.MADE_BACKUP, "x")):
        ledger.note(creation)
    with pytest.raises(DrillRemains, match="somewhere of one stays"):
        Cleaner(home, {kind: Refusing()}).clean(ledger)
    expected = [COPY, stays] if copy_stays else [stays]
    assert [each for each in ledger.creations if each.kind is not Kind.MADE_BACKUP] == expected
    assert (list(home.list("copies")) != []) is copy_stays


def test_a_folder_without_the_drills_mark_is_left_alone(tmp_path: Path) -> None:
    """A folder with files and no mark, or the mark of another drill, is refused; an empty one, or with the mark, goes."""
    host = NoHost()
    target = PlaygroundTarget(host, tmp_path)
    creation = target.plan("one")
    folder = Path(creation.place)
    target.remove(creation, "one")  # it was never made
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(DrillRemains, match="was not made by drill one"):
        target.remove(creation, "one")
    (folder / MARK).write_text("two")
    with pytest.raises(DrillRemains):
        target.remove(creation, "one")
    assert (folder / "precious").exists()
    assert host.stopped == []
    (folder / MARK).write_text("one")
    with pytest.raises(DrillRemains, match="holds precious"):
        target.remove(creation, "one")
    (folder / "precious").unlink()
    (folder / "cluster").mkdir()
    (folder / "cluster" / "data").write_text("x")
    target.remove(creation, "one")
    assert not folder.exists()
    folder.mkdir()
    target.remove(creation, "one")
    assert not folder.exists()


def test_what_cannot_be_looked_at_is_left_alone(tmp_path: Path) -> None:
    """What the kernel refuses on the way is told as what stays, and ends no drill."""
    place = tmp_path / "drill-one"
    place.write_text("a file where the folder was")
    creation = Creation(Kind.PLAYGROUND, str(place), socket.gethostname())
    with pytest.raises(DrillRemains, match="cannot be removed: Not a directory"):
        PlaygroundTarget(NoHost(), tmp_path).remove(creation, "one")
    assert place.exists()


def test_a_folder_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    """The same path may be something else on this one."""
    creation = Creation(Kind.PLAYGROUND, str(tmp_path), "another-host")
    with pytest.raises(DrillRemains, match="another machine"):
        PlaygroundTarget(NoHost(), tmp_path).remove(creation, "one")
    assert tmp_path.exists()
