"""The index on every kind of storage: concurrent writers, kills, and a thousand backups."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment
from tests.integration.s3_servers import SECRET_KEY, moto_server, versitygw_server
from tests.support.faulty_store import FaultyStore
from tests.unit.backupset.shelves import DAY_MS, FIRST_MS, index_entry, make_backup, names, shelve
from tikv_br import records
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, add_to_index, entry_name, rebuild
from tikv_br.backupset.prune import Policy, execute, plan
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROOT = Path(__file__).resolve().parents[2]
Roots = Callable[[], str]
MANY = 1000
CHANGES = 24
"""Writes and deletions of a prune that removes one index_entry backup."""


CORE = pytest.mark.core("index")


@pytest.fixture(
    scope="module", params=[pytest.param("local", marks=CORE), pytest.param("moto", marks=CORE), "versitygw"]
)
def roots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roots]:
    """A function that gives the URL of a fresh folder, for each kind of storage in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    numbers = itertools.count()
    if request.param == "local":
        yield lambda: f"local://{folder}/{next(numbers)}"
    else:
        with moto_server() if request.param == "moto" else versitygw_server(folder) as server:
            yield lambda: server.url(f"roots/{next(numbers)}")


def index_of(url: str) -> Index:
    """An index with a store of its own."""
    return Index(open_store(parse(url)))


def paths(url: str) -> list[str]:
    """Paths of the listed backups."""
    return [each.entry.path for each in index_of(url).read()]


def test_whole_life_in_the_index(roots: Roots) -> None:
    """Entered, listed, pinned, pruned, lost and rebuilt: the same on every storage."""
    url = roots()
    for day, path in enumerate(("a", "b", "c")):
        shelve(index_of(url), path, day)
    assert paths(url) == ["c", "b", "a"]
    index = index_of(url)
    index.pin(index.find(index.read()[2].entry.id[:10]).entry)
    wanted = plan(index, Policy(last=1))
    assert [entry.path for entry in wanted.to_remove] == ["b"]
    assert execute(index, wanted) == []
    assert paths(url) == ["c", "a"]
    assert not any(name.startswith("b/") for name in names(index.root))
    for name in names(index.root):
        if name.startswith("tikv-br-index/entries"):
            index.root.delete(name)
    assert rebuild(index)[:3] == (2, 2, 0)
    assert [each.pinned for each in sorted(index_of(url).read(), key=lambda each: each.entry.path)] == [True, False]


def test_concurrent_backups_never_lose_each_other(roots: Roots) -> None:
    """Many writers finish at once, each with a store of its own, while others prune the snapshot from under them."""
    url = roots()
    writers = 8
    made = {f"b{number}": make_backup(parse(url).child(f"b{number}")) for number in range(writers)}
    start = threading.Barrier(writers + 1)

    def finish(path: str) -> None:
        start.wait()
        add_to_index(parse(url).child(path), made[path])

    def disturb() -> None:
        start.wait()
        for _again in range(5):
            index_of(url).refresh()

    with ThreadPoolExecutor(writers + 1) as pool:
        running = [pool.submit(finish, path) for path in made] + [pool.submit(disturb)]
        for each in running:
            each.result()
    assert sorted(paths(url)) == sorted(made)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(CHANGES + 1))
def test_killed_between_any_two_changes(roots: Roots, step: int) -> None:
    """SIGKILL before each change of a prune: what is kept is whole at once, and the next prune leaves no trace."""
    if "127.0.0.1" in roots() and step % 3:
        pytest.skip("each change is killed on the local storage; servers take every third")
    url = roots()
    shelve(index_of(url), "old", 0)
    shelve(index_of(url), "new", 1)
    killed = subprocess.run(
        [sys.executable, "-m", "tests.integration.killed_prune", str(step)],
        input=url,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert killed.returncode == (-9 if step < CHANGES else 0)
    index = index_of(url)
    new = BackupSet.open(index.store_of("new"))
    for file in new.files:
        new.verify_identity(file)
    if any(name.startswith("old/") for name in names(index.root)):
        assert "old" in paths(url)
    assert execute(index, plan(index, Policy(last=1))) == []
    assert paths(url) == ["new"]
    left = names(index.root)
    assert not any(name.startswith(("old/", "tikv-br-index/removals", "tikv-br-index/pins")) for name in left)
    make_backup(parse(url).child("old"))


class Counted(FaultyStore):
    """Counts the requests to a store."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, "")
        self.requests: list[str] = []

    def get(self, name: str) -> bytes:
        """Note it."""
        self.requests.append("get")
        return super().get(name)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Note it."""
        self.requests.append("list")
        return super().list(folder)


@pytest.mark.slow
def test_a_thousand_backups_are_listed_by_two_requests(roots: Roots) -> None:
    """By the index: one listing of its folder, one object. Also complete through the command line, newest first."""
    url = roots()
    index = index_of(url)
    entries = [index_entry(number) for number in range(MANY)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: index.root.put(entry_name(entry.id), records.dump(entry)), entries))
    index.write_snapshot(entries)
    asked = Counted(index.root)
    assert len(Index(asked).read()) == MANY
    assert sorted(asked.requests) == ["get", "list"]
    done = subprocess.run(
        [str(PROGRAM), "list", "-s", url, "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment(),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"] for line in lines] == [entry.id for entry in reversed(entries)]
    assert SECRET_KEY not in done.stdout


def test_backup_after_the_entry_of_tomorrow(roots: Roots) -> None:
    """Clocks of machines differ: order by what each said, and nothing is lost."""
    url = roots()
    shelve(index_of(url), "tomorrow", 1)
    shelve(index_of(url), "today", 0)
    assert [each.entry.finished_ms for each in index_of(url).read()] == [FIRST_MS + DAY_MS, FIRST_MS]
