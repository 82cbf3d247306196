"""Restores broken at every boundary of their steps, in every way, and run again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.crash.cells import (
    CODES,
    FULL,
    PD_BUDGET,
    Cell,
    Kind,
    cells,
    end_by_itself,
    end_without_pd,
    ending,
    fail,
    some,
    without_pd,
)
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.operations import INGEST, PUT, TXN_INGEST
from tests.integration.crash.world import Rival, disturbed, files, forget_safe_points
from tests.integration.incremental.feed_state import FeedState
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.live_txn_backups import delete_range, read_rows
from tests.support.txn_backups import make_backup, recorded_rows
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import PREFIX_SIZE
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.feed.feed import Feed
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.options import Restamp, RestoreOptions
from tikv_br.restore.run import restore, restore_steps, txn_restore_steps
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

TXN_KEYSPACE = 1
LAST = restore_steps(INGEST)[-1].name


@pytest.fixture(scope="module")
def made(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup in a few files."""
    place = tmp_path_factory.mktemp("source") / "backup"
    backup(BackupOptions(cluster.config, StorageLocation("local", str(place)), file_bytes=1, executor="driver"))
    forget_safe_points(cluster)
    return place


def run_restore(options: RestoreOptions, reporter: Reporter) -> None:
    """Restore."""
    restore(options, reporter)


@pytest.mark.parametrize("cell", some(cells(restore_steps(INGEST))), ids=str)
def test_an_ingest_broken_at_a_boundary(
    cell: Cell, made: Path, target: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """It ends with its exit code and leaves the cluster to its users; run again, it is as if nothing had been."""
    check(INGEST, cell, made, target, forks, tmp_path)


WITHOUT_PD = without_pd(restore_steps(INGEST), "ingest", "leave import mode", "compare checksums")


@pytest.mark.slow
@pytest.mark.parametrize("cell", WITHOUT_PD, ids=str)
def test_an_ingest_whose_pd_is_gone_for_good(cell: Cell, made: Path, target: LiveCluster, tmp_path: Path) -> None:
    """All its calls share one budget, and stores are freed without PD; run again, it is as if nothing had been."""
    place = tmp_path / "backup"
    shutil.copytree(made, place)
    untouched = set(files(place))
    config = structs.replace(target.config, retry_budget=PD_BUDGET)
    operation = partial(
        run_restore, structs.replace(INGEST, cluster=config, storage=StorageLocation("local", str(place)))
    )
    end_without_pd(operation, cell, target)
    assert not any("limits" in each or "imports" in each for each in disturbed(target))
    assert ending(operation, lambda _: None) == 0
    assert contents(target) == ROWS
    assert disturbed(target) == []
    assert set(files(place)) == untouched


ANNOUNCED = ("announce the ingest", "ingest", "announce its end")


@pytest.mark.parametrize(
    "cell", some([each for each in cells(restore_steps(INGEST)) if each.step in ANNOUNCED]), ids=str
)
def test_a_followed_ingest_broken_at_a_boundary(
    cell: Cell, made: Path, target: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """A feed that runs all the while has every row once the restore is run again, and no resolved-ts comes before its rows."""
    codec, start = target.raw().codec, target.cluster.pd.tso()
    target.cluster.flush_timestamps()
    span, ingests = codec.rpc_range(), target.cluster.watched_ingests
    with Feed(target.cluster, codec, span, start, FeedOptions(hold_back=0.0), ingests=ingests) as feed:
        progress = FeedState(feed)
        progress.until(target.cluster.pd.tso())
        check(structs.replace(INGEST, restamp=Restamp.ALWAYS), cell, made, target, forks, tmp_path)
        progress.until(target.cluster.pd.tso())
    assert (progress.state, progress.missed) == (ROWS, [])


def of_puts() -> list[Cell]:
    """With `FULL` all; else of the steps that an ingest has not."""
    known = set() if os.environ.get(FULL) else {cell.step for cell in cells(restore_steps(INGEST))}
    return [cell for cell in some(cells(restore_steps(PUT)), each=2, offset=2) if cell.step not in known]


@pytest.mark.parametrize("cell", of_puts(), ids=str)
def test_a_put_broken_at_a_boundary(cell: Cell, made: Path, target: LiveCluster, forks: Forks, tmp_path: Path) -> None:
    """As for an ingest."""
    check(PUT, cell, made, target, forks, tmp_path)


@pytest.fixture(scope="module")
def made_txn(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of transactional data of one region."""
    place = tmp_path_factory.mktemp("txn") / "backup"
    make_backup(open_store(StorageLocation("local", str(place))), golden / "txn" / "v2" / "full")
    return place


@pytest.fixture
def txn_rows(target: LiveCluster, golden: Path) -> Iterator[dict[bytes, bytes]]:
    """Its rows, which are not in the target; afterwards again."""
    yield {key[PREFIX_SIZE:]: value for key, value in recorded_rows(golden / "txn" / "v2" / "full")}
    delete_range(target, TXN_KEYSPACE)


def of_transactions() -> list[Cell]:
    """With `FULL` all; else the ingest, and the steps that a restore of raw data has not."""
    known = set() if os.environ.get(FULL) else {cell.step for cell in cells(restore_steps(INGEST))} - {"ingest"}
    return [cell for cell in some(cells(txn_restore_steps(TXN_INGEST))) if cell.step not in known]


@pytest.mark.parametrize("cell", of_transactions(), ids=str)
def test_an_ingest_of_transactions_broken_at_a_boundary(
    cell: Cell, made_txn: Path, txn_rows: dict[bytes, bytes], target: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """As of raw data."""
    check(TXN_INGEST, cell, made_txn, target, forks, tmp_path, txn_contents, txn_rows)


def test_killed_between_values_and_commits(
    made_txn: Path, txn_rows: dict[bytes, bytes], forks: Forks, tmp_path: Path
) -> None:
    """While the store is about to ingest the second file: no row is there without its value, and the next run finishes."""
    place = tmp_path / "backup"
    shutil.copytree(made_txn, place)
    # A cluster of its own: the store may ingest the second file after the end of the test.
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        options = structs.replace(TXN_INGEST, cluster=target.config, storage=StorageLocation("local", str(place)))
        slow = target.fail("Ingest", {"delay": {"seconds": 2}}, skip=1, count=1)
        pid = forks.start(partial(ending, partial(run_restore, options), silent))
        eventually(lambda: target.hits(slow) == 1)
        os.kill(pid, signal.SIGKILL)
        assert forks.wait() == -signal.SIGKILL
        assert txn_contents(target) in ({}, txn_rows)  # it may have been ingested since
        assert ending(partial(run_restore, options), silent) == 0
        assert txn_contents(target) == txn_rows
        assert disturbed(target) == []


def txn_contents(live: LiveCluster) -> dict[bytes, bytes]:
    """The rows of transactions in the keyspace of the backup."""
    return read_rows(live, TXN_KEYSPACE)


def check(
    example: RestoreOptions,
    cell: Cell,
    made: Path,
    target: LiveCluster,
    forks: Forks,
    tmp_path: Path,
    look: Callable[[LiveCluster], dict[bytes, bytes]] = contents,
    rows: dict[bytes, bytes] = ROWS,
) -> None:
    """Break a restore of a copy of the backup, run it again, and look at the world both times."""
    place = tmp_path / "backup"
    shutil.copytree(made, place)
    untouched = set(files(place))
    options = structs.replace(example, cluster=target.config, storage=StorageLocation("local", str(place)))
    operation = partial(run_restore, options)
    assert break_at(cell, operation, partial(look, target), place, forks)
    if cell.kind in {Kind.EXCEPTION, Kind.SIGTERM}:
        assert disturbed(target) == []
    assert ending(operation, lambda _: None) == 0
    assert look(target) == rows
    assert disturbed(target) == []
    assert all(each.finished_ts for each in target.cluster.ingests.read())
    assert set(files(place)) == untouched


def break_at(
    cell: Cell, operation: partial[None], look: Callable[[], dict[bytes, bytes]], place: Path, forks: Forks
) -> bool:
    """Run the operation into its cell; whether it ended as it should."""
    if cell.kind is Kind.EXCEPTION:
        return ending(operation, cell.reporter(fail)) == CODES[cell.kind]
    if cell.kind is not Kind.LOST_LEASE:
        forks.start(partial(end_by_itself, operation, cell))
        return forks.wait() == CODES[cell.kind]
    rows: list[object] = []
    rival = Rival(place, lambda: lease_place(place))

    def take() -> None:
        rival.take()
        rows.append(look())

    code = ending(operation, cell.reporter(take))
    try:
        if not rival.has_taken:
            return code == 0
        if cell.step == LAST:  # all is done by then
            return code == 0
        assert files(place.parent) == rival.found
        assert rows == [look()]
        return code == CODES[cell.kind]
    finally:
        rival.leave()


def lease_place(place: Path) -> Path | None:
    """Location of the restore's lease; None = nowhere."""
    return next(iter(place.glob("tikv-br/restore/lease-*")), None)
