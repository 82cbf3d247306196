"""Restores of transactional backups into playgrounds, read back by plain scans."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.backup.data import when
from tests.integration.restore.restores import forge_checkpoint, leftovers
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.live_txn_backups import (
    back_up,
    codec_of,
    delete_range,
    hard_txn_rows,
    read_rows,
    split_between,
    write_rows,
)
from tests.support.live_txns import ALIVE, Txns
from tests.support.openssl import crypter
from tests.support.txn_backups import make_backup, make_foreign_backup, recorded_rows
from tikv_br.backup.run import backup_txn
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cli.output import Output
from tikv_br.cli.summaries import restore_figures, show_restore_plan
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.cluster.store import StoreClient
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import (
    ApiVersionMismatch,
    BackupUnsupported,
    ChecksumMismatch,
    ClusterUnfit,
    TargetNotEmpty,
    TimestampAheadOfTso,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Notice, StepStarted
from tikv_br.restore.options import Restamp, RestoreOptions, Via
from tikv_br.restore.plan import RestorePlan
from tikv_br.restore.record import remove_all
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.tasks.executor import ExecutorOptions

ROWS = hard_txn_rows(60)
VERSIONS = pytest.mark.parametrize("version", [ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)


def restored(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreSummary:
    """Restore."""
    summary = restore(RestoreOptions(cluster=live.config, storage=location, key_mode=KeyMode.TXN, **changes))  # type: ignore[arg-type]
    assert summary.verified
    return summary


@pytest.fixture(scope="module", params=[ApiVersion.V1, ApiVersion.V2], ids=lambda version: version.label)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with all rows, in four regions."""
    with live_cluster(tmp_path_factory.mktemp("txn"), request.param, stores=3) as made:
        split_between(made, list(ROWS), 4)
        write_rows(made, ROWS)
        yield made


@pytest.fixture(scope="module")
def backed_up(live: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> StorageLocation:
    """A backup of all rows."""
    return back_up(live, tmp_path_factory.mktemp("rows") / "backup")


@pytest.fixture
def location(backed_up: StorageLocation) -> Iterator[StorageLocation]:
    """The backup, without the records of restores that failed on purpose."""
    yield backed_up
    remove_all(open_store(backed_up))


@pytest.fixture
def emptied(live: LiveCluster, location: StorageLocation) -> Iterator[LiveCluster]:
    """The cluster after its backup, without rows, tombstones and locks."""
    del location
    delete_range(live)
    yield live
    live.heal()


def test_in_place_after_a_mass_delete(location: StorageLocation, emptied: LiveCluster) -> None:
    """Tombstones hide nothing: all rows have one new commit ts; clients write at once."""
    write_rows(emptied, dict.fromkeys(ROWS))
    assert read_rows(emptied) == {}
    summary = restored(emptied, location)
    assert read_rows(emptied, ts=summary.restamp_ts) == ROWS
    assert read_rows(emptied, ts=summary.restamp_ts - 1) == {}
    assert leftovers(location) == []
    changed = {b"row00001": b"new", b"size0005000": b"short now"}
    write_rows(emptied, {**changed, b"row00002": None})
    assert read_rows(emptied) == {key: value for key, value in (ROWS | changed).items() if key != b"row00002"}


def test_regions_that_split_and_leaders_that_move(location: StorageLocation, emptied: LiveCluster) -> None:
    """Between the two files of a part, and while they are downloaded: both files go to both halves."""
    codec, keys = codec_of(emptied), sorted(ROWS)
    for rpc, step in itertools.product(["Download", "Ingest"], range(1, 8)):
        place = codec.bound(codec.rpc_key(keys[(2 * step + (rpc == "Ingest")) * len(keys) // 17])).hex()
        split = {"command": {"name": "split", "arguments": {"keys": [place]}}}
        emptied.fail(rpc, split, count=1, skip=step)
    for kind in ("not_leader", "epoch_not_match", "server_is_busy", "stale_command"):
        emptied.fail("Ingest", {"region_error": {kind: {}}}, count=2, skip=3)
    emptied.fail("Ingest", {"drop": {}}, count=2, skip=6)
    restored(emptied, location)
    assert read_rows(emptied) == ROWS


def test_killed_between_the_two_files(
    location: StorageLocation, emptied: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values without commits show no reader anything; the same command ingests both again, with the same timestamp."""
    ingest, families = StoreClient.ingest, list[str]()

    def kill(store: StoreClient, request: import_sstpb_pb2.IngestRequest) -> import_sstpb_pb2.IngestResponse:
        if request.sst.cf_name == "write" and "default" in families:
            raise ClusterUnfit("killed")
        families.append(request.sst.cf_name)
        return ingest(store, request)

    before = emptied.cluster.pd.tso()
    with monkeypatch.context() as patched:
        patched.setattr(StoreClient, "ingest", kill)
        with pytest.raises(ClusterUnfit, match="killed"):
            restored(emptied, location, executor=ExecutorOptions(executor="driver", concurrency=1))
    assert len(read_rows(emptied)) < len(ROWS)
    after = emptied.cluster.pd.tso()
    summary = restored(emptied, location)
    assert before < summary.restamp_ts < after
    assert read_rows(emptied, ts=summary.restamp_ts) == ROWS
    assert leftovers(location) == []


def test_a_target_with_rows_or_locks(location: StorageLocation, emptied: LiveCluster) -> None:
    """Rows are refused by key, whatever a checkpoint says, a living transaction by its lock; one that is dead is resolved first."""
    txns = Txns(emptied, codec_of(emptied).prefix)
    alive = txns.prewrite(b"alive", ttl=ALIVE)
    with pytest.raises(TargetNotEmpty, match=f"lock at key .*{b'alive'.hex()}|lock at key alive"):
        restored(emptied, location)
    with pytest.raises(TargetNotEmpty) as raised:
        restored(emptied, location, allow_overwrite=True)
    assert "Stop all clients" in raised.value.hint
    txns.commit(alive, b"alive")
    with pytest.raises(TargetNotEmpty, match=b"alive".hex()) as raised:
        restored(emptied, location)
    assert "the range is then no snapshot" in raised.value.hint
    forge_checkpoint(emptied, location)
    with pytest.raises(TargetNotEmpty, match=b"alive".hex()):
        restored(emptied, location)
    assert set(read_rows(emptied)) == {b"alive"}
    remove_all(open_store(location))
    delete_range(emptied)
    txns.prewrite(b"dead", b"dead2")
    time.sleep(0.01)
    write_rows(emptied, {b"row00001": b"to be replaced", b"row00001-other": b"kept"})
    events: list[Event] = []
    options = RestoreOptions(emptied.config, location, key_mode=KeyMode.TXN, allow_overwrite=True)
    figures = dict(restore_figures(restore(options, events.append)))
    assert figures["other-rows"] == "1 other rows in the range were left alone: the range is no snapshot"
    assert any("is no snapshot" in event.message for event in events if isinstance(event, Notice))
    assert read_rows(emptied) == ROWS | {b"row00001-other": b"kept"}


def test_rows_that_come_before_the_timestamp_is_chosen(location: StorageLocation, emptied: LiveCluster) -> None:
    """They would be hidden by the restored ones: nothing is changed."""
    write = when(StepStarted, "check timestamps", lambda: write_rows(emptied, {b"row00001": b"of a client"}))
    with pytest.raises(TargetNotEmpty, match=b"row00001".hex()):
        restore(RestoreOptions(emptied.config, location, key_mode=KeyMode.TXN), write)
    assert read_rows(emptied) == {b"row00001": b"of a client"}


def test_kept_timestamps(location: StorageLocation, emptied: LiveCluster) -> None:
    """Rows are visible at backup-ts; a cluster whose clock is behind is refused."""
    backup_ts = BackupSet.open(open_store(location), KeyMode.TXN).backup_ts
    summary = restored(emptied, location, restamp=Restamp.NEVER)
    assert summary.restamp_ts == 0
    assert read_rows(emptied, ts=backup_ts) == ROWS


@pytest.mark.parametrize("remedy", ["delete the range", "new timestamps"])
def test_kept_timestamps_below_tombstones(location: StorageLocation, emptied: LiveCluster, remedy: str) -> None:
    """Rows that newer deletes hide are reported, and come back by each of the two ways that the hint names."""
    write_rows(emptied, dict.fromkeys(sorted(ROWS)[::7]))
    with pytest.raises(ChecksumMismatch, match="parts of the backup differ") as raised:
        restored(emptied, location, restamp=Restamp.NEVER)
    assert "KvDeleteRange) and run the same command again, or run it without --keep-timestamps" in raised.value.hint
    with pytest.raises(UsageError, match="--no-checksum"):
        restored(emptied, location, restamp=Restamp.NEVER, checksum=False)
    if remedy == "delete the range":
        delete_range(emptied)
        restored(emptied, location, restamp=Restamp.NEVER)
    else:
        restored(emptied, location)
    assert read_rows(emptied) == ROWS
    assert leftovers(location) == []


def test_rows_that_vanish_during_the_restore(location: StorageLocation, emptied: LiveCluster) -> None:
    """The comparison fails, and the same command restores all rows again, with a timestamp above the deletes."""
    vanish = when(StepStarted, "split and scatter", lambda: write_rows(emptied, dict.fromkeys(sorted(ROWS)[::7])))
    with pytest.raises(ChecksumMismatch) as raised:
        restore(RestoreOptions(cluster=emptied.config, storage=location, key_mode=KeyMode.TXN), vanish)
    assert "The same command restores all rows again" in raised.value.hint
    restored(emptied, location)
    assert read_rows(emptied) == ROWS


def test_kept_timestamps_ahead_of_the_target(location: StorageLocation, tmp_path: Path) -> None:
    """Rows of the future would be hidden from readers and refuse writers."""
    version = BackupSet.open(open_store(location), KeyMode.TXN).api_version
    with live_cluster(tmp_path, version, stores=1, clock_ahead=-3600.0) as behind:
        with pytest.raises(TimestampAheadOfTso, match="ahead of the target"):
            restored(behind, location, restamp=Restamp.NEVER)
        restored(behind, location)
        assert read_rows(behind) == ROWS


@pytest.mark.parametrize("via", [Via.STORES, Via.UPLOAD])
@VERSIONS
def test_other_keyspaces(location: StorageLocation, tmp_path: Path, version: ApiVersion, via: Via) -> None:
    """Between API V1 and keyspaces in either direction, and from one keyspace to another; files are cut at regions."""
    with live_cluster(tmp_path, version, stores=2) as other:
        keyspace = other.create_keyspace("ks5") if version is ApiVersion.V2 else 0
        split_between(other, list(ROWS), 7, keyspace)
        if version is ApiVersion.V2 and BackupSet.open(open_store(location), KeyMode.TXN).api_version is ApiVersion.V1:
            with pytest.raises(UsageError, match="the backup has no keyspaces"):
                restored(other, location)
        summary = restored(other, location, to_keyspace=str(keyspace) if keyspace else "", via=via)
        assert read_rows(other, keyspace, ts=summary.restamp_ts) == ROWS
        assert read_rows(other, keyspace, ts=summary.restamp_ts - 1) == {}
        assert (summary.uploaded_files == summary.files) == (via is Via.UPLOAD)
        write_rows(other, {b"row00001": b"new"}, keyspace)
        with pytest.raises(TargetNotEmpty):
            restored(other, location, to_keyspace=str(keyspace) if keyspace else "")


def test_parts_by_range(location: StorageLocation, emptied: LiveCluster) -> None:
    """Only the rows of the range, from files cut at it."""
    span = KeyRange(b"row00010", b"size0000255")
    restored(emptied, location, span=span)
    assert read_rows(emptied) == {key: value for key, value in ROWS.items() if span.start <= key < span.end}


def test_a_dry_run_writes_no_row(location: StorageLocation, emptied: LiveCluster) -> None:
    """It resolves the lock of a dead transaction, as any reader: so it ends as the restore will."""
    Txns(emptied, codec_of(emptied).prefix).prewrite(b"dead")
    time.sleep(0.01)
    plans: list[RestorePlan] = []
    restore(RestoreOptions(emptied.config, location, key_mode=KeyMode.TXN, dry_run=True), on_plan=plans.append)
    assert plans[0].total_kvs == len(ROWS)
    shown = io.StringIO()
    show_restore_plan(Output(stream=shown), plans[0])
    assert all(file.name in shown.getvalue() for part in plans[0].parts for file in part.files)
    assert "hex:" in shown.getvalue()
    assert read_rows(emptied) == {}


def test_clusters_and_keyspaces_that_do_not_fit(golden: Path, tmp_path: Path) -> None:
    """A cluster without transactions, and a keyspace of a backup that has none."""
    location = recorded_backup(make_backup, golden / "txn" / "v1" / "full", tmp_path)
    with live_cluster(tmp_path / "ttl", ApiVersion.V1TTL, stores=1) as live:
        with pytest.raises(ApiVersionMismatch, match="no transactions") as raised:
            restored(live, location)
        assert "API v1 or v2" in raised.value.hint
    with (
        live_cluster(tmp_path / "v2", ApiVersion.V2, stores=1) as live,
        pytest.raises(UsageError, match="API v1 encoding, which has no keyspaces"),
    ):
        restored(live, location, keyspace=3, to_keyspace="DEFAULT")


def test_raw_rows_in_the_way(tmp_path: Path, golden: Path) -> None:
    """In API V1 a region that begins at a raw key is refused by name before anything is changed."""
    with live_cluster(tmp_path / "cluster", ApiVersion.V1, stores=1) as mixed:
        mixed.raw().put(b"raw-5", b"raw")
        mixed.split(b"raw-5")
        with pytest.raises(ClusterUnfit, match=b"raw-5".hex()):
            restored(mixed, recorded_backup(make_backup, golden / "txn" / "v1" / "full", tmp_path))
        assert mixed.raw().get(b"raw-5") == b"raw"


def test_several_keyspaces_and_encryption(tmp_path: Path) -> None:
    """An encrypted backup by tikv-br is restored: each keyspace, or one of them into another or into API V1."""
    place = StorageLocation("local", str(tmp_path / "backup"), crypter=crypter("aes256-ctr"))
    other = dict(list(ROWS.items())[::3])
    with live_cluster(tmp_path / "source", ApiVersion.V2, stores=1) as live:
        first, second, third = (live.create_keyspace(name) for name in ("ks2", "ks3", "ks4"))
        write_rows(live, ROWS, first)
        write_rows(live, other, second)
        backup_txn(BackupOptions(live.config, place, executor="driver", keyspaces=("ks2", "ks3"), key_mode=KeyMode.TXN))
        write_rows(live, dict.fromkeys(ROWS), first)
        restored(live, place, keyspace=first)
        assert read_rows(live, first) == ROWS
        delete_range(live, first)
        delete_range(live, second)
        restored(live, place)
        assert (read_rows(live, first), read_rows(live, second)) == (ROWS, other)
        with pytest.raises(UsageError, match="several keyspaces"):
            restored(live, place, to_keyspace="ks4")
        restored(live, place, keyspace=second, to_keyspace="ks4", span=KeyRange(b"row00010", b""))
        assert read_rows(live, third) == {key: value for key, value in other.items() if key >= b"row00010"}
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as target:
        with pytest.raises(UsageError, match="several keyspaces"):
            restored(target, place)
        restored(target, place, keyspace=second)
        assert read_rows(target) == other


def recorded_backup(make: Callable[[ObjectStore, Path], object], recorded: Path, place: Path) -> StorageLocation:
    """A recorded backup with records of tikv-br, or of BR."""
    location = parse(f"local://{place / make.__name__ / recorded.name}")
    make(open_store(location), recorded)
    return location


@pytest.mark.parametrize(
    "version",
    [ApiVersion.V1, pytest.param(ApiVersion.V2, marks=pytest.mark.emulator_only("a keyspace of a certain id"))],
    ids=lambda version: version.label,
)
def test_recorded_backups(golden: Path, tmp_path: Path, version: ApiVersion) -> None:
    """Files of real stores are restored with all rows, also those with GC fences, which stores alone cannot restore."""
    recorded = golden / "txn" / f"v{1 if version is ApiVersion.V1 else 2}"
    with live_cluster(tmp_path / "cluster", version, stores=1) as live:
        keyspace = 0 if version is ApiVersion.V1 else 1
        codec = codec_of(live, keyspace)
        rows = {codec.user_key(key): value for key, value in recorded_rows(recorded / "full")}
        for make in (make_backup, make_foreign_backup):
            restored(live, recorded_backup(make, recorded / "full", tmp_path))
            assert read_rows(live, keyspace) == rows
            delete_range(live, keyspace)
        fenced = recorded_backup(make_backup, recorded / "gc-fence", tmp_path)
        with pytest.raises(BackupUnsupported, match=r"_write.sst has 2 rows with a GC fence"):
            restored(live, fenced, via=Via.STORES)
        assert read_rows(live, keyspace) == {}
        for restamp in (Restamp.NEVER, Restamp.AUTO):
            summary = restored(live, fenced, restamp=restamp)
            assert summary.uploaded_files == summary.files == 2
            fenced_rows = recorded_rows(recorded / "gc-fence")
            assert read_rows(live, keyspace) == {codec.user_key(key): value for key, value in fenced_rows}
            delete_range(live, keyspace)
