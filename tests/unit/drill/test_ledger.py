from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.tools import PREVIOUS
from tests.unit.drill.samples import NoHost
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.ledger import Cleaner, Creation, EntryKind, Ledger, OwnedRows, read_ledgers
from tikv_br.drill.playground import MARK, PlaygroundTarget
from tikv_br.drill.tail import SafePointRemover
from tikv_br.errors import BackupDamaged, ClusterError, DrillRemains, PlaygroundError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.playground.home import Home
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

COPY = Creation(EntryKind.COPY, "copies/one")
FOLDER = Creation(EntryKind.PLAYGROUND, "/somewhere", "a-host")


@pytest.fixture
def home(tmp_path: Path) -> ObjectStore:
    """An empty home of drills."""
    return open_store(parse(str(tmp_path / "home")))


def test_creations_are_read_until_they_are_removed(home: ObjectStore) -> None:
    """Another process reads creations in their order; a ledger without any is removed."""
    ledger = Ledger(home, "one")
    ledger.add(COPY)
    ledger.add(FOLDER)
    [read] = read_ledgers(home)
    assert (read.drill, read.creations) == ("one", (COPY, FOLDER))
    read.remove(COPY)
    assert [page.creations for page in read_ledgers(home)] == [(FOLDER,)]
    read.remove(FOLDER)
    assert read_ledgers(home) == []


def test_a_copy_goes_and_no_other_object(home: ObjectStore) -> None:
    """Only what lies in the drill's own folder is deleted."""
    for name in ("copies/one/backupmeta", "copies/one/sst/a.sst", "copies/two/backupmeta", "reports/one.json"):
        home.put(name, b"x")
    ledger = Ledger(home, "one")
    ledger.add(COPY)
    Cleaner(home, {}).clean(ledger)
    assert {info.name for info in home.list()} == {"copies/two/backupmeta", "reports/one.json"}


@pytest.mark.parametrize(
    "creation", [Creation(EntryKind.COPY, "copies/two"), Creation(EntryKind.COPY, "reports"), FOLDER]
)
def test_foreign_places_stay_in_the_ledger(home: ObjectStore, creation: Creation) -> None:
    """A place that no drill of this name makes is refused, and reported again by the next drill."""
    home.put("copies/two/backupmeta", b"x")
    home.put("reports/two.json", b"x")
    ledger = Ledger(home, "one")
    ledger.add(creation)
    with pytest.raises(DrillRemains):
        Cleaner(home, {}).clean(ledger)
    assert [page.creations for page in read_ledgers(home)] == [(creation,)]
    assert len(Cleaner(home, {}).clean_earlier()) == 1
    assert {info.name for info in home.list()} >= {"copies/two/backupmeta", "reports/two.json"}


def test_a_ledger_of_the_previous_version_is_cleaned(home: ObjectStore) -> None:
    """It had other kinds and fields. What drills no longer make, such as a canary, is reported and stays."""
    for page in (PREVIOUS / "ledger").iterdir():
        home.put(f"ledger/{page.name}", page.read_bytes())
    killed, prefix = read_ledgers(home)
    assert [creation.kind.value for creation in killed.creations] == [
        *("made backup", "copy", "playground", "safe point", "rows", "canary")
    ]
    rows = next(creation.rows for creation in killed.creations if creation.kind is EntryKind.ROWS)
    assert rows == OwnedRows(
        7000000000000000002, ApiVersion.V2, 1, (KeyRange(bytes.fromhex("72000001"), bytes.fromhex("720000017a")),)
    )
    removed = Removed()
    removers = dict.fromkeys((EntryKind.PLAYGROUND, EntryKind.ROWS, EntryKind.SAFE_POINT), removed)
    assert Cleaner(home, removers).clean_earlier() == [
        f"cannot remove all that drill {killed.drill} left: this command cannot remove the canary at 7000000000000000001/0/6b6579",
        f"cannot remove all that drill {prefix.drill} left: this command cannot remove the keys at the prefix 61 of the cluster at 127.0.0.1:2379",
    ]
    assert removed.kinds == [EntryKind.ROWS, EntryKind.SAFE_POINT, EntryKind.PLAYGROUND]
    assert [[creation.kind for creation in page.creations] for page in read_ledgers(home)] == [
        [EntryKind.MADE_BACKUP, EntryKind.OLD_CANARY],
        [EntryKind.OLD_KEYS],
    ]


class Removed:
    """Notes what it removes."""

    def __init__(self) -> None:
        self.kinds: list[EntryKind] = []

    def remove(self, creation: Creation, drill: str) -> None:
        """Note it."""
        self.kinds.append(creation.kind)


class Refusing:
    """Removes nothing."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Refuse it."""
        raise DrillRemains(f"{creation.place} of {drill} stays")


@pytest.mark.parametrize("kind", [EntryKind.SAFE_POINT, EntryKind.ROWS])
def test_one_failed_removal_does_not_keep_the_rest(home: ObjectStore, kind: EntryKind) -> None:
    """Earlier creations are removed nevertheless."""
    home.put("copies/one/sync/checkpoint", b"x")
    ledger, stays = Ledger(home, "one"), Creation(kind, "somewhere")
    for creation in (COPY, stays, Creation(EntryKind.MADE_BACKUP, "x")):
        ledger.add(creation)
    with pytest.raises(DrillRemains, match="somewhere of one stays"):
        Cleaner(home, {kind: Refusing()}).clean(ledger)
    assert [each for each in ledger.creations if each.kind is not EntryKind.MADE_BACKUP] == [stays]
    assert list(home.list("copies")) == []


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
    with pytest.raises(DrillRemains, match="contains precious"):
        target.remove(creation, "one")
    (folder / "precious").unlink()
    (folder / "cluster").mkdir()
    (folder / "cluster" / "data").write_text("x")
    target.remove(creation, "one")
    assert not folder.exists()
    folder.mkdir()
    target.remove(creation, "one")
    assert not folder.exists()


def test_inaccessible_creations_are_left_alone(tmp_path: Path) -> None:
    """An error of the kernel is reported as a remaining creation, and ends no drill."""
    place = tmp_path / "drill-one-01234567"
    place.write_text("a file where the folder was")
    creation = Creation(EntryKind.PLAYGROUND, str(place), socket.gethostname())
    with pytest.raises(DrillRemains, match=r"cannot remove .*: Not a directory"):
        PlaygroundTarget(NoHost(), tmp_path).remove(creation, "one")
    assert place.exists()


def test_only_directories_that_this_user_made_are_removed(tmp_path: Path) -> None:
    """Neither a marked directory elsewhere, nor a link, nor one that others can write to: a playground in it is not even stopped."""
    host, parent = NoHost(), tmp_path / "work"
    target = PlaygroundTarget(host, parent)
    parent.mkdir()

    def marked(folder: Path, mode: int = 0o700) -> Path:
        (folder / "cluster").mkdir(parents=True)
        (folder / MARK).write_text("one")
        folder.chmod(mode)
        return folder

    link, linked_mark = parent / "drill-one-00000001", marked(parent / "drill-one-00000002")
    link.symlink_to(marked(tmp_path / "victim"))
    (linked_mark / MARK).rename(tmp_path / "mark")
    (linked_mark / MARK).symlink_to(tmp_path / "mark")
    places = (
        marked(tmp_path / "drill-one-01234567"),
        marked(parent / "other"),
        marked(parent / "drill-one-00000003", 0o770),
        parent / ".." / "drill-one-01234567",
        link,
        linked_mark,
    )
    for place in places:
        with pytest.raises(DrillRemains):
            target.remove(Creation(EntryKind.PLAYGROUND, str(place), socket.gethostname()), "one")
        assert (place / "cluster").is_dir()
    assert host.stopped == []


def test_the_lock_of_a_playground_is_no_link(tmp_path: Path) -> None:
    """A link in its place would have been followed, and the file behind it emptied."""
    (tmp_path / "precious").write_text("x")
    (tmp_path / "playground").mkdir()
    (tmp_path / "playground" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(PlaygroundError, match="cannot use the directory"):
        Home(tmp_path / "playground").locked().__enter__()
    assert (tmp_path / "precious").read_text() == "x"


def test_a_ledger_of_a_foreign_name_is_damaged(home: ObjectStore) -> None:
    """A drill's folders are named after it: no name leads elsewhere, and none is that of the drill that runs."""
    Ledger(home, "now").add(COPY)
    assert "the drill that runs now" in Cleaner(home, {}, "now").clean_earlier()[0]
    Ledger(home, "a/b").add(COPY)
    with pytest.raises(BackupDamaged, match="ledger/a/b"):
        read_ledgers(home)


def test_the_safe_point_of_an_earlier_drill_expires() -> None:
    """Its name is known from the ledger only, and may be that of a drill that runs: PD is not even asked."""
    source = ClusterConfig(pd=("127.0.0.1:1",))
    place = "1/tikv-br-sync-drill-one-0"
    SafePointRemover("now", source).remove(Creation(EntryKind.SAFE_POINT, place), "one")
    with pytest.raises(ClusterError):
        SafePointRemover("one", replace(source, connect_timeout=0.1)).remove(
            Creation(EntryKind.SAFE_POINT, place), "one"
        )


def test_a_folder_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    """The same path may be something else on this one."""
    creation = Creation(EntryKind.PLAYGROUND, str(tmp_path), "another-host")
    with pytest.raises(DrillRemains, match="not on this machine"):
        PlaygroundTarget(NoHost(), tmp_path).remove(creation, "one")
    assert tmp_path.exists()
