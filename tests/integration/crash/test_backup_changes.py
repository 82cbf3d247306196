"""Backups, and what removes them, killed around each change that they make to the storage or to PD, and run again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import when
from tests.integration.crash import operations
from tests.integration.crash.cells import ending, fail
from tests.integration.crash.seams import EVERY, moments, with_fuse
from tests.integration.crash.world import Rival, files, forget_safe_points
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.backupset.index import FOLDER, Index
from tikv_br.backupset.prune import Policy, execute, plan
from tikv_br.dataflow.options import BackupOptions, EngineKind
from tikv_br.dataflow.run import abort_backup
from tikv_br.errors import BackupPathInUse, LeaseHeld, LeaseLost, Terminated
from tikv_br.progress_events import StepStarted
from tikv_br.storage.local import TEMPORARY_PREFIX
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


def run_backup(options: BackupOptions) -> int:
    """Back up."""
    return ending(partial(operations.run_backup, options), lambda _: None)


def run_prune(folder: Path) -> int:
    """Remove all backups but one."""

    def prune(_reporter: object) -> None:
        index = Index(open_store(StorageLocation("local", str(folder))))
        for _, error in execute(index, plan(index, Policy(last=1))):
            raise error

    return ending(prune, lambda _: None)


def run_abort(options: BackupOptions) -> int:
    """Remove what is unfinished."""
    return ending(lambda _: abort_backup(options.storage, options.cluster), lambda _: None)


def age(folder: Path) -> None:
    """Let what was being written in an index have lain there for hours."""
    for path in (folder / FOLDER).rglob(f"{TEMPORARY_PREFIX}*"):
        os.utime(path, (0, 0))


def begin(options: BackupOptions) -> None:
    """Leave an unfinished backup that has done all of its work, as SIGTERM does."""

    def end() -> None:
        raise Terminated("for the test")

    with pytest.raises(Terminated):
        backup(options, when(StepStarted, "commit", end))


def at(live: LiveCluster, place: Path, engine: EngineKind = "store") -> BackupOptions:
    """A backup to a place."""
    return structs.replace(
        operations.BACKUP, cluster=live.config, storage=StorageLocation("local", str(place)), engine=engine
    )


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_a_backup_killed_at_each_change(
    engine: EngineKind,
    live: LiveCluster,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """The same command completes it, and nothing remains of an interrupted write."""
    for number in moments(forks, lambda number: partial(run_backup, at(live, tmp_path / f"{number}/backup", engine))):
        place = tmp_path / f"{number}/backup"
        whole = (place / "backupmeta").exists()
        if whole:
            operations.check_whole(live, place)
        age(place.parent)
        assert run_backup(at(live, place, engine)) in ({0, BackupPathInUse.exit_code} if whole else {0})
        operations.check_whole(live, place)
        operations.check_alone(live, place)
        forget_safe_points(live)


def test_an_abort_killed_at_each_change(live: LiveCluster, forks: Forks, tmp_path: Path) -> None:
    """Another one leaves neither an object nor a safe point."""

    def prepared(number: int) -> Callable[[], int]:
        options = at(live, tmp_path / str(number))
        begin(options)
        assert live.safe_points()
        return partial(run_abort, options)

    for number in moments(forks, prepared):
        assert run_abort(at(live, tmp_path / str(number))) == 0
        assert set(files(tmp_path, but="//")) <= {f"{each}/" for each in range(number + 1)}
        assert live.safe_points() == {}


def test_a_prune_killed_at_each_change(live: LiveCluster, forks: Forks, tmp_path: Path) -> None:
    """Another one removes what the first had begun; the newer backup is whole throughout."""

    def prepared(number: int) -> Callable[[], int]:
        folder = tmp_path / str(number)
        for name in ("old", "backup"):
            assert run_backup(at(live, folder / name)) == 0
            forget_safe_points(live)
        return partial(run_prune, folder)

    for number in moments(forks, prepared):
        folder = tmp_path / str(number)
        operations.check_whole(live, folder / "backup")
        age(folder)
        assert run_prune(folder) == 0
        names = {name.partition("/")[0] for name in files(folder, but="//")}
        assert names == {"backup", "tikv-br-index"}
        assert len(list((folder / "tikv-br-index").rglob("*"))) == 3, "a snapshot, a folder, one entry"
        operations.check_whole(live, folder / "backup")


@pytest.mark.parametrize("broken", ["exception", "lost lease"])
@pytest.mark.parametrize("work", ["prune", "abort"])
def test_an_interrupted_removal_can_be_repeated(work: str, broken: str, live: LiveCluster, tmp_path: Path) -> None:
    """It resumes after a failure at any change; once another run owns the path it removes nothing of that run's."""
    for number in itertools.count():
        folder = tmp_path / str(number)
        victim = at(live, folder / "old")
        if work == "abort":
            begin(victim)
            operation = partial(run_abort, victim)
        else:
            for name in ("old", "backup"):
                assert run_backup(at(live, folder / name)) == 0
            operation = partial(run_prune, folder)
        rival, struck = Rival(folder / "old"), list[int]()

        def act(number: int = number, rival: Rival = rival, struck: list[int] = struck) -> None:
            struck.append(number)
            (fail if broken == "exception" else rival.take)()

        code = with_fuse(operation, number * EVERY, act)
        forget_safe_points(live)
        if broken == "lost lease" and rival.has_taken:
            assert code in {0, LeaseLost.exit_code, LeaseHeld.exit_code}  # held: it was about to take it
        rival.leave()
        assert operation() == 0
        assert not (folder / "old" / "backupmeta").exists()
        if not struck:
            return
