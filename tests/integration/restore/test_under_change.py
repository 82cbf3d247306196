"""Restores into clusters that move, refuse, fall silent or lag behind: the result is whole, or the error is clear."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.backup.data import load, when
from tests.integration.backup.moving import healed_late
from tests.integration.restore.conftest import ROWS, rows_of
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import PATIENCE
from tikv_br.backup.run import backup
from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.region_errors import REACTIONS, Action
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import (
    BackupDamaged,
    ChecksumMismatch,
    RetryBudgetExhausted,
    TargetNotEmpty,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.progress_events import StepStarted, silent
from tikv_br.restore import inspect
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse


def run(live: LiveCluster, location: StorageLocation, reporter: object = silent) -> RestoreSummary:
    """Restore with few tasks at once, so that faults fall between them."""
    return restore(RestoreOptions(cluster=live.config, storage=location, concurrency=2), reporter)  # type: ignore[arg-type]


CURABLE = {reaction.action: kind for kind, reaction in REACTIONS.items() if reaction.action is not Action.FAIL}
"""One kind of region error for each reaction; `tests/unit/cluster/test_router.py` has all kinds."""


@pytest.mark.parametrize("kind", CURABLE.values())
def test_a_restore_gets_over_curable_region_errors(source: StorageLocation, target: LiveCluster, kind: str) -> None:
    """Ingest answers twice with the error, at the second file; all rows arrive and the checksums agree."""
    failpoint = target.fail("Ingest", {"region_error": {kind: {}}}, count=2, skip=1)
    assert run(target, source).verified
    assert target.hits(failpoint) == 2
    assert rows_of(target) == ROWS


@pytest.mark.parametrize("rpc", ["Download", "Ingest"])
def test_a_lost_connection_is_made_again(source: StorageLocation, target: LiveCluster, rpc: str) -> None:
    """A call whose answer never comes is repeated: doing it twice changes nothing."""
    failpoint = target.fail(rpc, {"drop": {}}, count=2, skip=2)
    assert run(target, source).verified
    assert target.hits(failpoint) == 2
    assert rows_of(target) == ROWS


def test_rows_that_come_while_files_are_checked_are_found(
    source: StorageLocation, target: LiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a restore of another backup, which holds another lease: nothing is changed, and nothing claimed as empty."""
    come, look = threading.Event(), inspect.inspect_file

    def look_later(backup: BackupSet, *arguments: object) -> inspect.FileFacts:
        assert come.wait(60)
        return look(backup, *arguments)  # type: ignore[arg-type]

    def put() -> None:
        target.raw().put(b"theirs", b"1")
        come.set()

    monkeypatch.setattr(inspect, "inspect_file", look_later)
    reporter = when(StepStarted, "check every file", put)
    with pytest.raises(TargetNotEmpty, match=b"theirs".hex()):
        run(target, source, reporter)
    assert rows_of(target) == {b"theirs": b"1"}
    assert [info.name for info in open_store(source).list(layout.RESTORE) if "/lease-" not in info.name] == []


def bound(key: bytes) -> str:
    """A split key as the playground wants it."""
    codec = KeyCodec(ApiVersion.V2)
    return codec.bound(codec.rpc_key(key)).hex()


@pytest.mark.parametrize("rpc", ["Download", "Ingest"])
def test_regions_that_split_on_the_way(source: StorageLocation, target: LiveCluster, rpc: str) -> None:
    """Regions split while calls wait: the files that are cut in two go to both halves."""
    keys = sorted(ROWS)
    places = [bound(keys[step * len(keys) // 8]) for step in range(1, 8)]
    for step, place in enumerate(places, 1):
        target.fail(rpc, {"command": {"name": "split", "arguments": {"keys": [place]}}}, count=1, skip=step)
    summary = run(target, source)
    assert {region["start"] for region in target.regions()} >= set(places)
    assert summary.regions > summary.files
    assert rows_of(target) == ROWS


def test_leaders_that_move_and_regions_that_merge_on_the_way(source: StorageLocation, target: LiveCluster) -> None:
    """Leaders change all the while and two regions become one: nothing is lost, nothing is left half."""
    keys = sorted(ROWS)
    target.split(*(bytes.fromhex(bound(keys[place * len(keys) // 3])) for place in (1, 2)))
    regions = [region for region in target.regions() if bound(b"") < region["start"] < bound(b"\xff" * 99)][:2]
    merge = {"name": "merge", "arguments": {"source": regions[0]["id"], "target": regions[1]["id"]}}
    done = threading.Event()

    def shuffle() -> None:
        turn = 0
        while not done.wait(0.02):
            turn += 1
            for region in target.regions():
                with contextlib.suppress(AssertionError):  # the region was merged away between the two calls
                    target.transfer_leader(region_id=region["id"], store_id=target.store_ids[turn % 3])

    target.fail("Ingest", {"command": merge}, count=1, skip=3)
    patient = replace(target.config, retry_budget=PATIENCE)  # a busy machine often comes too late to a leader
    mover = threading.Thread(target=shuffle)
    mover.start()
    try:
        summary = restore(RestoreOptions(cluster=patient, storage=source, concurrency=2))
    finally:
        done.set()
        mover.join()
    assert summary.verified
    assert rows_of(target) == ROWS


def test_a_store_that_dies_and_comes_back(source: StorageLocation, target: LiveCluster) -> None:
    """A store is killed in the middle and is back two seconds later: the restore waits for it and ends well."""
    killing = target.fail("Download", {"kill_store": {}}, count=1, skip=4)
    with healed_late(target, [killing]):
        assert run(target, source).verified
    assert rows_of(target) == ROWS


def test_a_store_that_stays_away_ends_the_restore(source: StorageLocation, target: LiveCluster) -> None:
    """Every replica must have the file: with a store gone for good the restore fails, with the reason."""
    victim = target.store_ids[2]
    reporter = when(StepStarted, "ingest", lambda: target.kill_store(victim))
    with pytest.raises(RetryBudgetExhausted, match=f"store {victim} "):
        run(target, source, reporter)
    target.heal()


def fresh_backup(folder: Path) -> StorageLocation:
    """A V2 backup whose rows carry a timestamp of this very moment."""
    location = parse(f"local://{folder / 'fresh'}")
    with live_cluster(folder / "fresh-source", ApiVersion.V2) as live:
        load(live, {b"key": b"old"})
        backup(
            BackupOptions(cluster=live.config, storage=location, safe_interval=0.0, engine="scan", executor="driver")
        )
    return location


def test_writes_right_after_a_restore_are_seen(target: LiveCluster, tmp_path: Path) -> None:
    """The stores' cached timestamps lie below the restored rows: without the flush a later put would stay invisible."""
    for number in range(3):
        target.raw().put(b"other%d" % number, b"fills the stores' caches of timestamps")
        target.raw().delete(b"other%d" % number)
    assert run(target, fresh_backup(tmp_path)).verified
    target.raw().put(b"key", b"new")
    assert target.raw().get(b"key") == b"new"


@pytest.mark.parametrize("step", ["ingest", "compare checksums"])
def test_a_write_before_its_end_is_not_hidden(target: LiveCluster, tmp_path: Path, step: str) -> None:
    """As above, before and after the rows come, which keep their timestamps. The comparison finds it, unless it has passed by."""
    for number in range(3):
        target.raw().put(b"other%d" % number, b"fills the stores' caches of timestamps")
        target.raw().delete(b"other%d" % number)
    with contextlib.suppress(ChecksumMismatch):
        run(target, fresh_backup(tmp_path), when(StepStarted, step, lambda: target.raw().put(b"key", b"new")))
    assert target.raw().get(b"key") == b"new"


def sst(location: StorageLocation) -> Path:
    """One file of a backup."""
    return max(Path(location.path).rglob("*.sst"))


def test_a_file_damaged_after_the_check_is_reported_by_the_store(target: LiveCluster, tmp_path: Path) -> None:
    """The stores verify block checksums themselves: damage between check and download ends the restore as damage."""
    location = fresh_backup(tmp_path)
    data = bytearray(sst(location).read_bytes())
    data[3] ^= 1
    with pytest.raises(BackupDamaged, match=sst(location).name):
        run(target, location, when(StepStarted, "ingest", lambda: sst(location).write_bytes(data)))
    assert rows_of(target) == {}
