"""The same command resumes; an unfinished run that cannot be resumed is reported, and can be removed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.integration.backup.conftest import Options
from tests.integration.backup.resume.unfinished import (
    KEY,
    ROWS,
    fail_half_way,
    files_at,
    is_whole,
    raising,
)
from tests.integration.s3_servers import versitygw_server
from tests.support.damage import flipped
from tests.support.ledgers import read_entries
from tests.support.live_cluster import LiveCluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.backupset import lease, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.ledger import LedgerEntry, write_entry
from tikv_br.backupset.sealed import write_record
from tikv_br.cluster.safepoint import service_id
from tikv_br.dataflow.run import abort_backup
from tikv_br.errors import BackupPathInUse, CrypterMismatch, LeaseHeld, RequestRefused, ResumeRefused, StorageFull
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Notice, StepStarted
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.options import VerifyOptions
from tikv_br.verify.run import verify


@pytest.mark.parametrize("engine", [pytest.param("store", marks=pytest.mark.core("resume")), "scan"])
def test_failed_run_is_gone_on_with(engine: str, v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Work that was done is kept, with its safe point, and not done again; the backup keeps the first run's backup-ts."""
    wanted = options(v2, engine=engine, concurrency=1)
    whole = backup(structs.replace(wanted, dry_run=True)).plan
    error = fail_half_way(v2, wanted)
    assert "the same command resumes the backup" in error.hint
    store = open_store(wanted.storage)
    done = read_entries(store)
    begun = manifest.read_run(store)
    assert begun is not None
    assert 0 < len(done) < len(whole)
    assert v2.safe_points() == {service_id(begun.run_id, wanted.storage): begun.description.backup_ts - 1}
    assert "tikv-br/lease" not in files_at(wanted)
    plan = backup(structs.replace(wanted, dry_run=True)).plan
    assert (plan[0].span.start, plan[-1].span.end) == (done[-1].end, whole[-1].span.end)
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
    assert v2.safe_points() == {service_id(begun.run_id, wanted.storage): begun.description.backup_ts - 1}


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


def test_a_file_that_was_altered_is_written_again(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """One bit turned over at the end of a file that is taken over: it is named, and its interval done once more."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    done = read_entries(open_store(wanted.storage))
    path, notices = Path(wanted.storage.path) / done[0].files[0].name, list[Event]()
    path.write_bytes(flipped(path.read_bytes(), random.Random(3)))
    summary = backup(wanted, notices.append).summary
    assert summary.resumed_ranges == len(done) - 1
    assert any(
        isinstance(each, Notice) and f"an interval is copied again: {done[0].files[0].name}" in each.message
        for each in notices
    )
    is_whole(wanted, summary, v2, tmp_path)


def test_work_of_a_run_that_was_thrown_away_counts_for_nothing(
    v2: LiveCluster, options: Options, tmp_path: Path
) -> None:
    """A task that outlived its run, and all that the run had left, may end beside the work of the next."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    store = open_store(wanted.storage)
    done = read_entries(store)
    rest = backup(structs.replace(wanted, dry_run=True)).plan
    write_entry(store, LedgerEntry(rest[0].span.start, rest[-1].span.end, "0" * 16, (), run="of-another-time"))
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done)
    is_whole(wanted, summary, v2, tmp_path)


def test_regions_may_have_changed(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """The rest is planned again: intervals of the two runs need not fit the same regions."""
    wanted = options(v2, engine="store", concurrency=1)
    fail_half_way(v2, wanted)
    done = read_entries(open_store(wanted.storage))
    codec = v2.raw().codec
    inside = [codec.bound(codec.rpc_key(KEY % number)) for number in (5, ROWS // 2 + 5, ROWS - 5)]
    v2.split(*inside)
    summary = backup(wanted).summary
    assert summary.resumed_ranges == len(done) > 0
    is_whole(wanted, summary, v2, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranges": (KeyRange(b"row00005", b""),)}, r"source ranges was .*, is .*726f773030303035"),
        ({"engine": "store"}, "engine was scan, is store"),
        ({"checksum": True}, "checksum was False, is True"),
        ({"assume_no_ttl": True}, "assume no ttl was False, is True"),
        ({"compression_level": 9}, "compression level was the default, is 9"),
    ],
)
def test_other_parameters_are_refused(
    changes: dict[str, Any], sentence: str, v2: LiveCluster, options: Options, tmp_path: Path
) -> None:
    """The error names the difference and nothing changes; --no-resume removes the unfinished run and starts over."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    before = files_at(wanted)
    other = structs.replace(wanted, **changes)
    with pytest.raises(ResumeRefused, match=sentence) as raised:
        backup(other)
    assert "--no-resume" in raised.value.hint
    assert files_at(wanted) == before
    if "engine" in changes:
        summary = backup(structs.replace(other, no_resume=True)).summary
        assert (summary.engine, summary.resumed_ranges) == ("store", 0)
        is_whole(wanted, summary, v2, tmp_path)


def test_key_of_an_encrypted_backup_stays_the_same(v2: LiveCluster, options: Options) -> None:
    """No backup is written with two keys: another key, or none, is refused before any write."""
    plain = options(v2, concurrency=1)
    keys = [Crypter.of("aes128-ctr", SecretText(digit * 32)) for digit in "ab"]
    wanted, other = (structs.replace(plain, storage=replace(plain.storage, crypter=key)) for key in keys)
    fail_half_way(v2, wanted)
    before = files_at(wanted)
    for wrong in (other, plain):
        with pytest.raises(CrypterMismatch):
            backup(wrong)
    assert files_at(wanted) == before
    summary = backup(wanted).summary
    assert summary.resumed_ranges > 0
    assert summary.total_kvs == ROWS


def test_options_without_effect_on_content_may_differ(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Concurrency, file size and the like are free to change."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    said: list[Event] = []
    summary = backup(
        structs.replace(wanted, concurrency=3, file_bytes=1 << 20, safe_interval=10, gc_ttl=600), said.append
    ).summary
    assert summary.resumed_ranges > 0
    noun = "range" if summary.resumed_ranges == 1 else "ranges"
    resumed = [each.message for each in said if isinstance(each, Notice) and each.message.startswith("resuming")]
    assert resumed[0].endswith(f": {summary.resumed_ranges} {noun} finished earlier")
    is_whole(wanted, summary, v2, tmp_path)


def test_abort_removes_an_unfinished_run_and_never_a_backup(v2: LiveCluster, options: Options) -> None:
    """All it left goes, the safe point too; a complete backup is refused, and so is a path that is being written."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    assert v2.safe_points()
    with lease.acquire(open_store(wanted.storage), "backup"), pytest.raises(LeaseHeld):
        abort_backup(wanted.storage, None)
    done = abort_backup(wanted.storage, v2.config)
    assert (done.released, done.removed_objects > 2) == (True, True)
    assert v2.safe_points() == {}
    assert files_at(wanted) == set()
    assert abort_backup(wanted.storage, None).removed_objects == 0
    backup(wanted)
    before = files_at(wanted)
    with pytest.raises(BackupPathInUse, match="complete backup"):
        abort_backup(wanted.storage, v2.config)
    assert files_at(wanted) == before


def test_forged_run_record_names_the_safe_point_of_another_backup(
    v2: LiveCluster, options: Options, tmp_path: Path
) -> None:
    """Neither `abort` nor a resumed run at the path of the record releases or moves it."""
    wanted = options(v2, concurrency=1)
    fail_half_way(v2, wanted)
    held = v2.safe_points()
    theirs = manifest.read_run(open_store(wanted.storage))
    forged = structs.replace(wanted, storage=StorageLocation("local", str(tmp_path / "forged")))
    store = open_store(forged.storage)
    for ours in ("abort", "resume"):
        fail_half_way(v2, forged)
        mine = manifest.read_run(store)
        assert mine is not None
        assert theirs is not None
        write_record(store, "tikv-br/run.json", structs.replace(mine, run_id=theirs.run_id))
        if ours == "abort":
            abort_backup(forged.storage, v2.config)
        else:
            backup(structs.replace(forged, gc_ttl=0))
        assert v2.safe_points().items() >= held.items()


def test_file_that_a_store_finished_late(v2: LiveCluster, options: Options) -> None:
    """The next run removes it with a notice; so does `abort`."""
    wanted = options(v2, engine="store", ranges=(KeyRange(b"", b"row00100"),), gc_ttl=0)
    late = Path(wanted.storage.path) / "sst" / f"{'0a' * 8}_{'1b' * 8}" / "0" / "4" / "17_default.sst"
    said: list[Event] = []
    for clean in (lambda: abort_backup(wanted.storage, None), lambda: backup(wanted, said.append)):
        late.parent.mkdir(parents=True)
        late.write_bytes(b"x")
        clean()
        assert not late.exists()
    notices = [event.message for event in said if isinstance(event, Notice)]
    assert "removed 1 file that stores or tasks finished after their run had failed" in notices


def test_a_full_storage_of_the_stores_is_resumed(v2: LiveCluster, options: Options) -> None:
    """A store leaves half a file behind after the backup has failed; with room again, the same command succeeds."""
    wanted = options(v2, engine="store", gc_ttl=0)
    with v2.failing("storage.write", {"disk_full": {}}, count=1), pytest.raises(StorageFull) as caught:
        backup(wanted)
    assert caught.value.hint == StorageFull.default_hint
    eventually(lambda: any(name.endswith(".sst") for name in files_at(wanted)))
    assert backup(wanted).summary.total_kvs == ROWS
    verify(VerifyOptions(wanted.storage))


def test_backup_that_was_not_tidied_up_is(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """Interrupted right after the commit, the same command cleans up and succeeds; after that the path is in use."""
    wanted = options(v2, concurrency=2)
    with pytest.raises(RequestRefused):
        backup(wanted, raising(StepStarted, "clean up"))
    assert "backupmeta" in files_at(wanted)
    with pytest.raises(BackupPathInUse, match="already holds a backup"):
        backup(structs.replace(wanted, ranges=(KeyRange(b"", b"x"),)))
    summary = backup(wanted).summary
    assert (summary.total_kvs, summary.resumed_ranges) == (ROWS, 0)
    assert summary.ranges > 1
    assert v2.safe_points() == {service_id(summary.resumed_run, wanted.storage): summary.backup_ts - 1}
    is_whole(wanted, summary, v2, tmp_path)
    with pytest.raises(BackupPathInUse, match="already holds a backup"):
        backup(wanted)


def test_run_without_anything_done_leaves_nothing(v2: LiveCluster, options: Options) -> None:
    """Nothing is worth keeping before the first interval is done."""
    wanted = options(v2)
    with pytest.raises(RequestRefused):
        backup(wanted, raising(StepStarted, "copy"))
    assert files_at(wanted) == set()
    assert v2.safe_points() == {}


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    """An abort at a mistyped path leaves no folder behind."""
    place = tmp_path / "mistyped"
    assert abort_backup(StorageLocation("local", str(place)), None).removed_objects == 0
    assert not place.exists()
