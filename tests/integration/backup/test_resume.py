"""The same command again goes on from what was done; what cannot be gone on with is said, and can be removed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.api_version import ApiVersion
from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import load, when
from tests.integration.backup.reading import rocksdb_rows
from tests.integration.s3_servers import versitygw_server
from tests.live_cluster import LiveCluster, live_cluster
from tikv_br.backup import backup_ts as backup_ts_module
from tikv_br.backup.abort import abort_backup
from tikv_br.backup.backup_ts import service_id
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import REGION_OVERHEAD, SMALLEST_TASK
from tikv_br.backup.run import BackupSummary, backup
from tikv_br.backupset import lease, run_record
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.ledger import read_entries
from tikv_br.errors import (
    BackupPathInUse,
    CrypterMismatch,
    LeaseHeld,
    LeaseLost,
    RequestRefused,
    ResumeRefused,
    SafePointError,
    TikvBrError,
)
from tikv_br.progress_events import Event, StepFinished, StepStarted, TasksProgress
from tikv_br.storage.crypter import Crypter
from tikv_br.storage.open import open_store
from tikv_br.storage.secret import SecretText
from tikv_br.storage.url import StorageLocation

V1, V2 = ApiVersion.V1, ApiVersion.V2
REGIONS = 4 * SMALLEST_TASK // REGION_OVERHEAD
"""So many small ones make four tasks."""
KEY = b"row%05d"
ROWS = 10 * REGIONS


@pytest.fixture(scope="module")
def v2(clusters: Clusters) -> LiveCluster:
    """Return a V2 cluster with a few tasks' worth of regions."""
    live = clusters(V2)
    fill(live)
    return live


def fill(live: LiveCluster) -> None:
    """Load rows into many small regions."""
    load(live, {KEY % number: b"value %d" % number for number in range(ROWS)})
    codec = live.raw().codec
    bounds = [codec.bound(codec.rpc_key(KEY % number)) for number in range(10, ROWS, 10)]
    live.run("split", keys=[bound.hex() for bound in bounds])


@pytest.fixture(autouse=True)
def healed(v2: LiveCluster) -> Iterator[None]:
    """Leave no failpoint and no safe point behind."""
    yield
    v2.heal()
    for name in safe_points(v2):
        v2.cluster.pd.update_service_safe_point(name, 0, 0)


def safe_points(live: LiveCluster) -> dict[str, int]:
    """Return what PD holds for services of ours."""
    points = live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
    return {point["service_id"]: point["safe_point"] for point in points if point["service_id"] != "gc_worker"}


def files_at(wanted: BackupOptions) -> set[str]:
    """Return all that lies at the path, folders and hidden files too."""
    place = Path(wanted.storage.path)
    return {str(path.relative_to(place)) for path in place.rglob("*")} if place.exists() else set()


def fail_half_way(live: LiveCluster, wanted: BackupOptions) -> TikvBrError:
    """Run a backup, one task after the other, whose third task fails for good."""
    rpc = "backup.region" if wanted.engine == "store" else "RawScan"
    failing = live.fail(
        rpc, {"abort": {"code": "INVALID_ARGUMENT", "details": "on purpose"}}, skip=REGIONS // 2 + 2, count=-1
    )
    with pytest.raises(TikvBrError) as raised:
        backup(wanted)
    assert live.hits(failing) > 0
    live.heal()
    return raised.value


def is_whole(wanted: BackupOptions, summary: BackupSummary, live: LiveCluster, scratch: Path) -> None:
    """Hold a backup against the cluster, by the cluster's own checksum and by RocksDB, and look for leftovers."""
    sums = live.raw().checksum()
    assert (summary.crc64xor, summary.total_kvs, summary.total_bytes) == (
        sums.crc64xor,
        sums.total_kvs,
        sums.total_bytes,
    )
    rows = rocksdb_rows(Path(wanted.storage.path), scratch)
    assert len(rows) == sums.total_kvs
    kept = BackupSet.open(open_store(wanted.storage))
    wanted_files = {"backupmeta", "backup.lock", "tikv-br/manifest.json", *(file.name for file in kept.files)}
    assert {name for name in files_at(wanted) if (Path(wanted.storage.path) / name).is_file()} == wanted_files
    assert not any(not any(Path(wanted.storage.path, name).iterdir()) for name in files_at(wanted) - wanted_files)


@pytest.mark.parametrize("engine", ["store", "scan"])
def test_failed_run_is_gone_on_with(engine: str, v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Work that was done is kept, with its safe point, and not done again; the backup keeps the first run's backup-ts."""
    wanted = options(v2, engine=engine, concurrency=1)
    whole = backup(replace(wanted, dry_run=True)).plan
    error = fail_half_way(v2, wanted)
    assert "the same command goes on from there" in error.hint
    store = open_store(wanted.storage)
    done = read_entries(store)
    begun = run_record.read(store)
    assert begun is not None
    assert 0 < len(done) < len(whole)
    assert safe_points(v2) == {service_id(begun.run_id): begun.description.backup_ts - 1}
    assert "tikv-br/lease" not in files_at(wanted)
    plan = backup(replace(wanted, dry_run=True)).plan
    assert (plan[0].start, plan[-1].end) == (done[-1].end, whole[-1].end)
    summary = backup(wanted).summary
    assert (summary.resumed_ranges, summary.ranges, summary.resumed_run) == (
        len(done),
        len(done) + len(plan),
        begun.run_id,
    )
    assert summary.backup_ts == begun.description.backup_ts
    names = {file.name for file in BackupSet.open(store).files}
    assert names >= {file.name for entry in done for file in entry.files}
    is_whole(wanted, summary, v2, tmp_path)
    assert safe_points(v2) == {service_id(begun.run_id): begun.description.backup_ts - 1}


def test_failed_run_is_gone_on_with_on_s3(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """A real S3 server: conditional writes hold the lease, what is done stays, and nothing but the backup is left."""
    with versitygw_server(tmp_path) as server:
        wanted = options(v2, storage=server.location("nightly/1"), concurrency=1)
        fail_half_way(v2, wanted)
        store = open_store(wanted.storage)
        done = read_entries(store)
        with lease.acquire(store, "prune"), pytest.raises(LeaseHeld, match="prune by process"):
            backup(wanted)
        summary = backup(wanted).summary
        assert summary.resumed_ranges == len(done) > 0
        sums = v2.raw().checksum()
        assert (summary.crc64xor, summary.total_kvs) == (sums.crc64xor, sums.total_kvs)
        kept = BackupSet.open(store)
        for file in kept.files:
            kept.verify_content(file)
        names = {file.name for file in kept.files}
        assert names >= {file.name for entry in done for file in entry.files}
        assert {info.name for info in store.list()} == {"backupmeta", "backup.lock", "tikv-br/manifest.json"} | names


def test_file_that_is_gone_is_written_again(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """An interval counts as done only as long as all its files are there in their size."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    done = read_entries(open_store(wanted.storage))
    path = Path(wanted.storage.path) / done[0].files[0].name
    path.write_bytes(path.read_bytes()[:-1])
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done) - 1
    is_whole(wanted, summary, v2, tmp_path)


def test_regions_may_have_changed(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """The rest is planned anew: intervals of the two runs need not fit the same regions."""
    wanted = options(v2, engine="store", concurrency=1)
    fail_half_way(v2, wanted)
    done = read_entries(open_store(wanted.storage))
    codec = v2.raw().codec
    inside = [codec.bound(codec.rpc_key(KEY % number)) for number in (5, ROWS // 2 + 5, ROWS - 5)]
    v2.run("split", keys=[key.hex() for key in inside])
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done) > 0
    is_whole(wanted, summary, v2, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranges": ((b"row00005", b""),)}, r"source ranges was .*, is .*726f773030303035"),
        ({"engine": "store"}, "engine was scan, is store"),
        ({"checksum": True}, "checksum was False, is True"),
        ({"assume_no_ttl": True}, "assume no ttl was False, is True"),
    ],
)
def test_other_parameters_are_refused(
    changes: dict[str, Any], sentence: str, v2: LiveCluster, options: Options, tmp_path: Path
) -> None:
    """The difference is named and nothing is touched; --no-resume removes the unfinished run and starts anew."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    before = files_at(wanted)
    other = replace(wanted, **changes)
    with pytest.raises(ResumeRefused, match=sentence) as raised:
        backup(other)
    assert "--no-resume" in raised.value.hint
    assert files_at(wanted) == before
    if "engine" in changes:
        summary = backup(replace(other, no_resume=True)).summary
        assert (summary.engine, summary.resumed_ranges) == ("store", 0)
        is_whole(wanted, summary, v2, tmp_path)


def test_key_of_an_encrypted_backup_stays_the_same(v2: LiveCluster, options: Options) -> None:
    """No backup is written with two keys: another one, or none, is told before anything is written."""
    plain = options(v2, concurrency=1)
    keys = [Crypter.of("aes128-ctr", SecretText(digit * 32)) for digit in "ab"]
    wanted, other = (replace(plain, storage=replace(plain.storage, crypter=key)) for key in keys)
    fail_half_way(v2, wanted)
    before = files_at(wanted)
    for wrong in (other, plain):
        with pytest.raises(CrypterMismatch):
            backup(wrong)
    assert files_at(wanted) == before
    summary = backup(wanted).summary
    assert summary.resumed_ranges > 0
    assert summary.total_kvs == ROWS


def test_what_decides_nothing_may_differ(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Concurrency, file size and the like are free to change."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    summary = backup(replace(wanted, concurrency=3, file_bytes=1 << 20, safe_interval=10, gc_ttl=600)).summary
    assert summary.resumed_ranges > 0
    is_whole(wanted, summary, v2, tmp_path)


def test_abort_removes_an_unfinished_run_and_never_a_backup(v2: LiveCluster, options: Options) -> None:
    """All it left goes, the safe point too; a complete backup is refused, and so is a path that is being written."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    assert safe_points(v2)
    with lease.acquire(open_store(wanted.storage), "backup"), pytest.raises(LeaseHeld):
        abort_backup(wanted.storage, None)
    done = abort_backup(wanted.storage, v2.config)
    assert (done.released, done.removed_objects > 2) == (True, True)
    assert safe_points(v2) == {}
    assert files_at(wanted) == set()
    assert abort_backup(wanted.storage, None).removed_objects == 0
    backup(wanted)
    before = files_at(wanted)
    with pytest.raises(BackupPathInUse, match="complete backup"):
        abort_backup(wanted.storage, v2.config)
    assert files_at(wanted) == before


def test_file_that_a_store_finished_late(v2: LiveCluster, options: Options) -> None:
    """It alone makes a path unfit until it is removed, by `abort` or with --no-resume."""
    wanted = options(v2, engine="store", ranges=((b"", b"row00100"),), gc_ttl=0)
    late = Path(wanted.storage.path) / "sst" / f"{'0a' * 8}_{'1b' * 8}" / "0" / "4" / "17_default.sst"
    for clean in (lambda: abort_backup(wanted.storage, None), lambda: backup(replace(wanted, no_resume=True))):
        late.parent.mkdir(parents=True)
        late.write_bytes(b"x")
        with pytest.raises(BackupPathInUse, match="finished after a run had ended") as raised:
            backup(wanted)
        assert "tikv-br abort" in raised.value.hint
        clean()
        assert not late.exists()


def raising(event: type[StepStarted | StepFinished], step: str) -> Callable[[Event], None]:
    """Return a reporter that breaks the run off at a step."""

    def stop() -> None:
        raise RequestRefused("on purpose")

    return when(event, step, stop)


def test_backup_that_was_not_tidied_up_is(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Broken off right after the commit, the same command tidies up and succeeds; after that the path is in use."""
    wanted = options(v2, concurrency=2)
    with pytest.raises(RequestRefused):
        backup(wanted, raising(StepStarted, "tidy up"))
    assert "backupmeta" in files_at(wanted)
    with pytest.raises(BackupPathInUse, match="holds a backup already"):
        backup(replace(wanted, ranges=((b"", b"x"),)))
    summary = backup(wanted).summary
    assert (summary.total_kvs, summary.resumed_ranges) == (ROWS, 0)
    assert summary.ranges > 1
    assert safe_points(v2) == {service_id(summary.resumed_run): summary.backup_ts - 1}
    is_whole(wanted, summary, v2, tmp_path)
    with pytest.raises(BackupPathInUse, match="holds a backup already"):
        backup(wanted)


def test_run_without_anything_done_leaves_nothing(v2: LiveCluster, options: Options) -> None:
    """Nothing is worth keeping before the first interval is done."""
    wanted = options(v2)
    with pytest.raises(RequestRefused):
        backup(wanted, raising(StepStarted, "copy"))
    assert files_at(wanted) == set()
    assert safe_points(v2) == {}


@pytest.mark.parametrize("renew_every", [0.05, 1000.0], ids=["while it copies", "before it commits"])
def test_lost_lease_stops_the_run_and_leaves_all_to_the_next(
    renew_every: float, v2: LiveCluster, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the path is another's, the run removes nothing of it; the next goes on from there."""
    wanted = options(v2, concurrency=1)
    monkeypatch.setattr(lease, "acquire", functools.partial(lease.acquire, renew_every=renew_every))

    def break_it(event: Event) -> None:
        if isinstance(event, TasksProgress) and event.tasks_done == 2:
            lease.break_lease(open_store(wanted.storage), force=True)

    v2.fail("RawScan", {"delay": {"seconds": 0.05}}, skip=REGIONS // 2, count=-1)
    with pytest.raises(LeaseLost, match="broken by `tikv-br unlock`") as raised:
        backup(wanted, break_it)
    assert "tikv-br unlock" in raised.value.hint
    assert "backupmeta" not in files_at(wanted)
    done = read_entries(open_store(wanted.storage))
    assert len(done) >= 2
    v2.heal()
    monkeypatch.undo()
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done)
    is_whole(wanted, summary, v2, tmp_path)


def let_gc_pass(live: LiveCluster) -> None:
    """Take the safe points of all services away, as time would, and have GC go on to this moment."""
    for name in safe_points(live):
        live.cluster.pd.update_service_safe_point(name, 0, 0)
    live.cluster.pd.update_service_safe_point("gc_worker", 2**63 - 1, live.cluster.pd.tso())


def test_gc_that_passes_fails_the_run(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it copies: nothing stays, for nothing could go on. Between two runs: that is said, with a way out."""
    monkeypatch.setattr(backup_ts_module, "SHORTEST_TTL", 1)
    with live_cluster(tmp_path / "cluster", V2, stores=1) as live:
        fill(live)
        wanted = options(live, concurrency=1, safe_interval=0, gc_ttl=1)
        live.fail("RawScan", {"delay": {"seconds": 0.1}}, count=-1)
        with pytest.raises(SafePointError, match="has passed"):
            backup(wanted, when(StepStarted, "copy", lambda: let_gc_pass(live)))
        live.heal()
        assert files_at(wanted) == set()
        assert safe_points(live) == {}
        fail_half_way(live, wanted)
        let_gc_pass(live)
        with pytest.raises(SafePointError, match="has passed") as raised:
            backup(wanted)
        assert "--no-resume" in raised.value.hint
        assert read_entries(open_store(wanted.storage))
        summary = backup(replace(wanted, no_resume=True)).summary
        is_whole(wanted, summary, live, tmp_path)


def test_lost_lease_leaves_the_safe_point_to_who_has_the_path(
    v2: LiveCluster, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the first interval is done: another run may go on with this one's, under the same safe point."""
    wanted = options(v2)
    monkeypatch.setattr(lease, "acquire", functools.partial(lease.acquire, renew_every=0.05))

    v2.fail("RawScan", {"delay": {"seconds": 0.1}}, count=-1)

    def take_it_away() -> None:
        lease.break_lease(open_store(wanted.storage), force=True)

    with pytest.raises(LeaseLost):
        backup(wanted, when(StepStarted, "copy", take_it_away))
    begun = run_record.read(open_store(wanted.storage))
    assert begun is not None
    assert safe_points(v2) == {service_id(begun.run_id): begun.description.backup_ts - 1}


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    """An abort at a mistyped path leaves no folder behind."""
    place = tmp_path / "mistyped"
    assert abort_backup(StorageLocation("local", str(place)), None).removed_objects == 0
    assert not place.exists()
