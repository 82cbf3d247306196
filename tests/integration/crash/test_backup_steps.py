"""Backups broken at every boundary of their steps, in every way, and run again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.integration.crash.cells import CODES, Cell, Kind, cells, end_by_itself, ending, fail, in_turn, some
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.world import Rival, files, safe_points
from tests.live_cluster import LiveCluster
from tikv_br.backup.options import BackupOptions, EngineKind
from tikv_br.backup.run import backup
from tikv_br.backup.steps import backup_steps
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import BackupPathInUse
from tikv_br.progress_events import Reporter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.options import Executor, Level, VerifyOptions
from tikv_br.verify.run import verify

EXAMPLE = BackupOptions(
    ClusterConfig(pd=("nobody:1",)),
    StorageLocation("local", "/nowhere"),
    checksum=True,
    executor="driver",
    concurrency=2,
    safe_interval=0,
)
STEPS = backup_steps(EXAMPLE)
ENGINES = ("scan", "store")


def run_backup(options: BackupOptions, reporter: Reporter) -> None:
    """Back up."""
    backup(options, reporter)


@pytest.mark.parametrize(("cell", "engine"), in_turn(some(cells(STEPS)), ENGINES), ids=str)
def test_a_backup_broken_at_a_boundary(
    cell: Cell, engine: EngineKind, live: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """It ends with its exit code, looks whole only if it is; run again, it is as if nothing had been."""
    place = tmp_path / "backup"
    place.mkdir()
    options = replace(EXAMPLE, cluster=live.config, storage=StorageLocation("local", str(place)), engine=engine)
    code, lost = break_at(cell, options, forks)
    assert code == (CODES[cell.kind] if lost is not False else 0)
    whole = (place / layout.META).exists()
    if cell.kind in {Kind.EXCEPTION, Kind.SIGTERM}:
        assert_in_order(live, place, whole=whole)
    if whole:
        check_whole(live, place)
        assert ending(partial(run_backup, options), lambda _: None) in {0, BackupPathInUse.exit_code}
    else:
        assert ending(partial(run_backup, options), lambda _: None) == 0
    check_whole(live, place)
    check_alone(live, place)


def break_at(cell: Cell, options: BackupOptions, forks: Forks) -> tuple[int, bool | None]:
    """Run the operation into its cell: the exit code, and whether a lease was lost, if that was to be."""
    operation = partial(run_backup, options)
    if cell.kind is Kind.EXCEPTION:
        return ending(operation, cell.reporter(fail)), None
    if cell.kind is not Kind.LOST_LEASE:
        forks.start(partial(end_by_itself, operation, cell))
        return forks.wait(), None
    rival = Rival(Path(options.storage.path))
    code = ending(operation, cell.reporter(rival.take))
    if not rival.has_taken or rival.found_whole:
        rival.leave()
        return code, False
    assert files(Path(options.storage.path).parent) == rival.found
    rival.leave()
    return code, True


def assert_in_order(live: LiveCluster, place: Path, *, whole: bool) -> None:
    """What ended in order keeps its work under a safe point, or nothing at all."""
    there = files(place).keys()
    kept = any(name.startswith(layout.LEDGER) for name in there)
    if not whole and not kept:
        assert not there
        assert not safe_points(live)
    else:
        assert len(safe_points(live)) == 1


def check_whole(live: LiveCluster, place: Path) -> None:
    """Every row of the cluster is in the backup, as its records say and its files hold."""
    location = StorageLocation("local", str(place))
    found = BackupSet.open(open_store(location))
    sums = live.raw().checksum()
    assert (found.totals.crc64xor, found.totals.total_kvs) == (sums.crc64xor, len(ROWS))
    assert verify(VerifyOptions(location, Level.DATA, executor=Executor.DRIVER)).rows_checked == len(ROWS)


def check_alone(live: LiveCluster, place: Path) -> None:
    """Nothing else is there: no object, no file of a writer, no empty folder, one entry in the index, one safe point."""
    found = BackupSet.open(open_store(StorageLocation("local", str(place))))
    assert found.manifest is not None
    entry = Index(open_store(StorageLocation("local", str(place.parent)))).read()
    assert [each.entry.path for each in entry] == ["backup"]
    names = {layout.META, layout.LOCK, layout.MANIFEST} | {file.name for file in found.files}
    index = {"snapshot.json", f"entries/{entry[0].entry.id}.json"}
    expected = {f"backup/{name}" for name in names} | {f"tikv-br-index/{name}" for name in index}
    assert set(files(place.parent, but="//")) == expected
    assert list(safe_points(live).values()) == [found.backup_ts - 1]
