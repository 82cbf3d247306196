"""Full, incremental and merged backups broken at every boundary of their steps, in every way, and run again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import load
from tests.integration.crash.cells import (
    CODES,
    PD_BUDGET,
    Cell,
    Kind,
    Operation,
    cells,
    end_by_itself,
    end_without_pd,
    ending,
    fail,
    in_turn,
    some,
    without_pd,
)
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.operations import (
    BACKUP,
    BACKUP_STEPS,
    INCREMENT_STEPS,
    MERGE_STEPS,
    TXN_STEPS,
    check_alone,
    check_whole,
    run_backup,
    run_increment,
    run_merge,
    run_txn_backup,
)
from tests.integration.crash.world import Rival, files, forget_safe_points
from tests.integration.incremental import forked_sync
from tests.support import history
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txns import ALIVE, NAMES, Txns, prefix_of
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.log import LogArchive, LogSource
from tikv_br.backup.merge import MergeOptions
from tikv_br.backup.run import backup
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.rows import read_rows
from tikv_br.cli.main import run
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import EngineKind
from tikv_br.errors import BackupPathInUse
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode, encode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

ENGINES = ("scan", "store")
SOURCES = ("increment", "log")
HALVES = (KeyRange(b"", b"row00010"), KeyRange(b"row00010", b""))
"""Two intervals, so that one may be finished and the other not."""


@pytest.mark.parametrize(("cell", "engine"), in_turn(some(cells(BACKUP_STEPS)), ENGINES), ids=str)
def test_a_backup_broken_at_a_boundary(
    cell: Cell, engine: EngineKind, live: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """It ends with its exit code, looks whole only if it is; run again, it is as if nothing had been."""
    place = tmp_path / "backup"
    options = structs.replace(BACKUP, cluster=live.config, storage=StorageLocation("local", str(place)), engine=engine)
    broken = Broken(cell, partial(run_backup, options), place, live, forks)
    broken.check(lambda: check_whole(live, place))


@pytest.fixture(scope="module")
def transactional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Txns]:
    """Committed rows in several regions, and the locks of a transaction that lives."""
    with live_cluster(tmp_path_factory.mktemp("txn"), ApiVersion.V2, stores=1) as running:
        txns = Txns(running, prefix_of(running))
        running.split(*(encode(txns.key(name)) for name in NAMES[5::10]))
        txns.commit(txns.prewrite(*NAMES[:30]), *NAMES[:30])
        txns.prewrite(*NAMES[30:], ttl=ALIVE)
        yield txns


HALVES_OF_NAMES = (KeyRange(b"", NAMES[10]), KeyRange(NAMES[10], b""))


def check_whole_txn(place: Path) -> None:
    """The backup has the committed rows, as its records say and its files hold."""
    location = StorageLocation("local", str(place))
    found = BackupSet.open(open_store(location), KeyMode.TXN)
    assert found.totals.total_kvs == len(NAMES[:30])
    assert verify(VerifyOptions(location, Level.DATA, executor="driver")).rows_checked == len(NAMES[:30])


@pytest.mark.parametrize("cell", some(cells(TXN_STEPS)), ids=str)
def test_a_backup_of_transactions_broken_at_a_boundary(
    cell: Cell, transactional: Txns, forks: Forks, tmp_path: Path
) -> None:
    """As for raw data: it has the rows of two intervals, by both column families."""
    live, place = transactional.live, tmp_path / "backup"
    storage = StorageLocation("local", str(place))
    options = structs.replace(
        BACKUP, cluster=live.config, storage=storage, ranges=HALVES_OF_NAMES, key_mode=KeyMode.TXN
    )
    broken = Broken(cell, partial(run_txn_backup, options), place, live, forks)
    broken.check(partial(check_whole_txn, place))
    forget_safe_points(live)


WITHOUT_PD = without_pd(BACKUP_STEPS, "copy", "commit", "hand over the safe point")
TXN_WITHOUT_PD = without_pd(TXN_STEPS, "resolve locks", "check GC")


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "engine"), in_turn(WITHOUT_PD, ENGINES), ids=str)
def test_a_backup_whose_pd_is_gone_for_good(cell: Cell, engine: EngineKind, live: LiveCluster, tmp_path: Path) -> None:
    """All its calls, clean-up included, share one budget; run again, it is as if nothing had been."""
    place = tmp_path / "backup"
    options = structs.replace(BACKUP, storage=StorageLocation("local", str(place)), engine=engine)
    end_and_repeat(live, place, lambda config: partial(run_backup, structs.replace(options, cluster=config)), cell)
    check_whole(live, place)


@pytest.mark.slow
@pytest.mark.parametrize("cell", TXN_WITHOUT_PD, ids=str)
def test_a_backup_of_transactions_whose_pd_is_gone_for_good(cell: Cell, transactional: Txns, tmp_path: Path) -> None:
    """The same, also where PD is asked about GC."""
    place = tmp_path / "backup"
    options = structs.replace(BACKUP, storage=StorageLocation("local", str(place)), key_mode=KeyMode.TXN)
    live = transactional.live
    end_and_repeat(live, place, lambda config: partial(run_txn_backup, structs.replace(options, cluster=config)), cell)
    check_whole_txn(place)
    forget_safe_points(live)


def end_and_repeat(
    live: LiveCluster, place: Path, operation_with: Callable[[ClusterConfig], Operation], cell: Cell
) -> None:
    """Run an operation whose PD is gone from a step on, and run it again with PD."""
    place.mkdir()
    operation = operation_with(structs.replace(live.config, retry_budget=PD_BUDGET))
    end_without_pd(operation, cell, live)
    whole = (place / layout.META).exists()
    if not whole:
        forget_safe_points(live)  # PD could not be reached, and keeps it until its TTL ends, which the run has reported
    assert ending(operation, lambda _: None) in ({0, BackupPathInUse.exit_code} if whole else {0})
    check_alone(live, place)


@dataclass(frozen=True)
class Changed:
    """A cluster, a full backup of it, the changes since in an increment and a log, and all versions that it held."""

    live: LiveCluster
    base: StorageLocation
    increment: StorageLocation
    log: LogSource
    ts: int
    """At which the log had only a part of the changes."""
    history: history.History


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Changed]:
    """A cluster that nobody writes to any more."""
    folder = tmp_path_factory.mktemp("changed")
    base, increment, logs = (StorageLocation("local", str(folder / name)) for name in ("base", "increment", "logs"))
    log = LogSource(logs, "main")
    with live_cluster(folder / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.1, ts_ahead=0.3) as live:
        asked = structs.replace(BACKUP, cluster=live.config, ranges=HALVES, checksum=False)
        load(live, ROWS)
        backup(structs.replace(asked, storage=base))
        sink = f"local://{logs.path}?flush-interval=100ms"
        command = ["sync", "--id", log.id, "--pd", live.pd, "--sink", sink, "--from-backup", f"local://{base.path}"]
        pid = forks.start(partial(run, [*command, "--hold-back", "0s", "--scratch-dir", str(folder)]))

        def catch_up() -> int:
            live.flush(live.store_ids[0])
            ts = live.cluster.pd.tso()
            eventually((Path(logs.path) / log.id / "log.json").exists, PATIENCE)
            eventually(lambda: LogArchive.open(open_store(logs), log.id).end_ts() > ts, PATIENCE)
            return ts

        catch_up()
        keys = sorted(ROWS)
        live.raw().batch_put(dict.fromkeys(keys[::3], b"overwritten"))
        live.raw().batch_delete(keys[1::3])
        ts = catch_up()
        live.raw().batch_put(dict.fromkeys(keys[::5], b"overwritten again"))
        live.raw().put(b"row-new", b"expires", ttl=5000)
        catch_up()
        os.kill(pid, signal.SIGTERM)
        assert forks.wait() == forked_sync.TOLD_TO_END
        run_increment(structs.replace(asked, storage=increment, ranges=(), safe_interval=0.0), base, lambda _: None)
        yield Changed(live, base, increment, log, ts, history.read(folder / "source", folder / "scratch"))


@pytest.fixture
def changed(unprotected: Changed) -> Changed:
    """The same, and PD knows of no safe point."""
    forget_safe_points(unprotected.live)
    return unprotected


@pytest.mark.parametrize("cell", some(cells(INCREMENT_STEPS), offset=4), ids=str)
def test_an_increment_broken_at_a_boundary(cell: Cell, changed: Changed, forks: Forks, tmp_path: Path) -> None:
    """As for a full backup; it has the newest version of each key that has changed."""
    place = tmp_path / "backup"
    live, storage = changed.live, StorageLocation("local", str(place))
    options = structs.replace(BACKUP, cluster=live.config, storage=storage, checksum=False)
    since = BackupSet.open(open_store(changed.base)).backup_ts
    newest = {key: versions[-1] for key, versions in changed.history.items()}
    expected = {key: (each.ts, each.value) for key, each in newest.items() if each.ts > since}
    broken = Broken(cell, partial(run_increment, options, changed.base), place, live, forks)
    broken.check(lambda: check_rows(place, expected))


@pytest.mark.parametrize(("cell", "source"), in_turn(some(cells(MERGE_STEPS)), SOURCES), ids=str)
def test_a_merge_broken_at_a_boundary(cell: Cell, source: str, changed: Changed, forks: Forks, tmp_path: Path) -> None:
    """As for a full backup, but it leaves no safe point: it has the rows of its time."""
    place = tmp_path / "backup"
    output = structs.replace(BACKUP, storage=StorageLocation("local", str(place)))
    if source == "log":
        options, ts = MergeOptions(output, changed.base, changed.log, changed.ts), changed.ts
    else:
        options, ts = MergeOptions(output, changed.increment), changed.live.cluster.pd.tso()
    expected: dict[bytes, tuple[int, bytes | None]] = {}
    for key, value in history.rows_at(changed.history, ts).items():
        expected[key] = max(each.ts for each in changed.history[key] if each.ts <= ts), value
    broken = Broken(cell, partial(run_merge, options), place, changed.live, forks, protects=False)
    broken.check(lambda: check_rows(place, expected))


def check_rows(place: Path, expected: dict[bytes, tuple[int, bytes | None]]) -> None:
    """The files have these rows and no other: timestamp and value, None for a tombstone."""
    found = BackupSet.open(open_store(StorageLocation("local", str(place))))
    rows = [
        row
        for file in found.files
        for batch in read_rows(found.store, file, codec_of(ApiVersion.V2, file.key_range))
        for row in batch.to_pylist()
    ]
    assert {row["key"]: (row["ts"], None if row["deleted"] else row["value"]) for row in rows} == expected
    assert len(rows) == len(expected)


@dataclass(frozen=True)
class Broken:
    """An operation that makes a backup, and is broken in a cell."""

    cell: Cell
    operation: Operation
    place: Path
    live: LiveCluster
    forks: Forks
    protects: bool = True
    """Whether it registers a safe point."""

    def check(self, check_result: Callable[[], None]) -> None:
        """Break it, run it again, and look at the world both times."""
        self.place.mkdir()
        code, lost = self._break()
        assert code == (CODES[self.cell.kind] if lost is not False else 0)
        whole = (self.place / layout.META).exists()
        if self.cell.kind in {Kind.EXCEPTION, Kind.SIGTERM}:
            self._check_in_order(whole=whole)
        if whole:
            check_result()
        assert ending(self.operation, lambda _: None) in ({0, BackupPathInUse.exit_code} if whole else {0})
        check_result()
        check_alone(self.live, self.place, protected=self.protects)

    def _break(self) -> tuple[int, bool | None]:
        """Run the operation into its cell: the exit code, and whether a lease was lost, if that was to be."""
        if self.cell.kind is Kind.EXCEPTION:
            return ending(self.operation, self.cell.reporter(fail)), None
        if self.cell.kind is not Kind.LOST_LEASE:
            self.forks.start(partial(end_by_itself, self.operation, self.cell))
            return self.forks.wait(), None
        rival = Rival(self.place)
        code = ending(self.operation, self.cell.reporter(rival.take))
        if not rival.has_taken or rival.found_whole:
            rival.leave()
            return code, False
        assert files(self.place.parent) == rival.found
        rival.leave()
        return code, True

    def _check_in_order(self, *, whole: bool) -> None:
        """An orderly end keeps its work under a safe point, or nothing at all."""
        there = files(self.place).keys()
        kept = any(name.startswith(layout.LEDGER) for name in there)
        if not whole and not kept:
            assert not there
        assert len(self.live.safe_points()) == int(self.protects and (whole or kept))
