"""Stores fetch a file once for each replica that gets rows of it, whatever fails on the way."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.backup.data import load
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import StoreFull
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.restore.ingest import MANY_REGIONS
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.url import StorageLocation, parse

STORES = 3
SECONDS = 120


def run(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreSummary:
    """Restore, by default with a region for every file."""
    return restore(RestoreOptions(live.config, location, **{"region_bytes": 1, **changes}))  # type: ignore[arg-type]


def fetched(live: LiveCluster) -> Counter[int]:
    """Number of files by how often a store fetched them."""
    return Counter(times for files in live.calls()["downloads"].values() for times in files.values())


def cut(live: LiveCluster, step: int) -> None:
    """Begin a region at every ``step``th row, as often as makes a file of `MANY_REGIONS` regions where all of them are in it."""
    codec = KeyCodec(ApiVersion.V2)
    keys = sorted(ROWS)[step : (MANY_REGIONS + 1) * step + 1 : step]
    live.split(*(codec.bound(codec.rpc_key(key)) for key in keys))


def test_each_store_fetches_each_file_once(source: StorageLocation, target: LiveCluster) -> None:
    """Into a target that is split for the restore, and whose new regions have other leaders by then."""
    summary = run(target, source)
    assert summary.regions == summary.files >= FILES
    assert fetched(target) == {1: STORES * summary.files}
    assert target.calls()["rpcs"]["Ingest"]["calls"] == summary.files


def test_refused_ingests_fetch_nothing_again(source: StorageLocation, target: LiveCluster) -> None:
    """Leaders that have moved, or are busy, take in what lies there."""
    busy = {"server_is_busy": {"backoff_ms": "1"}}
    with (
        target.failing("Ingest", {"region_error": {"not_leader": {}}}, count=4, skip=2),
        target.failing("Ingest", {"region_error": busy}, count=1, skip=9),
    ):
        summary = run(target, source)
    assert summary.verified
    assert fetched(target) == {1: STORES * summary.files}
    assert rows_of(target) == ROWS


def test_a_fetch_of_unknown_end_is_begun_anew_at_all(source: StorageLocation, target: LiveCluster) -> None:
    """A lost connection does not mean that the store has stopped: its fetch gets another name."""
    # Until the other replicas of the region have been asked, or they would not be at all.
    target.fail("Download", {"delay": {"seconds": 1}}, count=1, skip=7)
    with target.failing("Download", {"drop": {}}, count=1, skip=7):
        summary = run(target, source)
    assert summary.verified
    assert fetched(target) == {1: STORES * summary.files - STORES + 1, 2: STORES - 1}
    assert rows_of(target) == ROWS


def test_a_store_whose_disk_is_full_is_named_once(source: StorageLocation, target: LiveCluster) -> None:
    """One sentence with the store and what to do, however many tries; with room again the same command resumes."""
    impatient = replace(target.config, retry_budget=1.0)
    with (
        target.failing("storage.read", {"disk_full": {}}, count=-1, store_id=target.store_ids[0]),
        pytest.raises(StoreFull, match=f"store {target.store_ids[0]} .* has no space left") as caught,
    ):
        restore(RestoreOptions(impatient, source))
    assert caught.value.message.count("No space left") == 1
    assert "Free space" in caught.value.hint
    assert restore(RestoreOptions(target.config, source)).verified
    assert rows_of(target) == ROWS


def test_a_limit_changes_nothing(source: StorageLocation, target: LiveCluster) -> None:
    """Downloads that are held back to some 400 KB a second are waited for, not asked for again."""
    summary = run(target, source, rate_limit=400_000)
    assert summary.step_seconds["ingest"] > summary.backup_size / 400_000 * 0.9
    assert fetched(target) == {1: STORES * summary.files}


def test_regions_that_are_there_already_fetch_once_each(source: StorageLocation, target: LiveCluster) -> None:
    """A target with regions of its own, cut elsewhere than the files: one fetch for each replica of each piece."""
    cut(target, step=len(ROWS) // FILES * 2 - 7)
    summary = run(target, source, via=Via.STORES)
    assert summary.regions > summary.files
    downloads = target.calls()["downloads"]
    assert {sum(files.values()) for files in downloads.values()} == {summary.regions}
    assert rows_of(target) == ROWS


def test_a_file_for_very_many_regions_is_sent_in_pieces(source: StorageLocation, target: LiveCluster) -> None:
    """No store fetches a file more than a few times: what more regions are to share is read once, here."""
    cut(target, step=1)
    summary = run(target, source)
    assert summary.uploaded_files == 1
    assert fetched(target) == {1: STORES * (summary.files - 1)}
    assert summary.verified
    assert rows_of(target) == ROWS


def test_regions_that_split_during_a_limited_restore_cost_no_downloads(
    source: StorageLocation, target: LiveCluster
) -> None:
    """Each region of a file is split in three: its store gets the pieces, and downloads no file for each of them."""
    codec, keys = KeyCodec(ApiVersion.V2), sorted(ROWS)
    cuts = [codec.bound(codec.rpc_key(key)).hex() for key in keys[:: len(keys) // FILES // 3]]
    split = {"command": {"name": "split", "arguments": {"keys": cuts}}}
    with target.failing("Download", split, count=1):
        summary = run(target, source, rate_limit=2_000_000)
    downloads = sum(times * files for times, files in fetched(target).items())
    assert summary.verified
    assert summary.downloads == downloads
    assert downloads <= STORES * summary.files  # 255 of 26 files, where each piece was downloaded
    assert rows_of(target) == ROWS


def test_regions_that_split_all_the_time_are_sent_their_pieces(target: LiveCluster, tmp_path: Path) -> None:
    """Under a rate limit a region splits before its download has ended; stores do not fetch whole files again and again."""
    chance = random.Random(9)
    rows = {b"key%05d" % number: chance.randbytes(1000) for number in range(2000)}
    location = parse(f"local://{tmp_path / 'backup'}")
    with live_cluster(tmp_path / "source", ApiVersion.V2, stores=1) as origin:
        load(origin, rows)
        backup(BackupOptions(origin.config, location, executor="driver"))
    codec = KeyCodec(ApiVersion.V2)
    ended = threading.Event()

    def split_all_the_time() -> None:
        # Not before: a file that has many regions already is sent in pieces at once, and no store fetches it.
        eventually(lambda: ended.is_set() or "SetDownloadSpeedLimit" in target.calls()["rpcs"])
        for _split in range(300):
            if ended.wait(0.1):
                return
            target.split(codec.bound(codec.rpc_key(chance.choice(list(rows)))))

    storm = threading.Thread(target=split_all_the_time)
    storm.start()
    began = time.monotonic()
    try:
        summary = run(target, location, region_bytes=1 << 30, rate_limit=500_000)
    finally:
        ended.set()
        storm.join()
    assert time.monotonic() - began < SECONDS
    assert summary.verified
    assert summary.uploaded_files == 1
    assert sum(fetched(target).values()) <= STORES
    assert max(fetched(target)) < MANY_REGIONS
    assert rows_of(target) == rows
