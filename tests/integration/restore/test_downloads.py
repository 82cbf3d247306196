"""How often stores fetch a file: once for each replica that gets rows of it, whatever happens on the way."""

from __future__ import annotations

from collections import Counter

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.live_cluster import LiveCluster
from tikv_br.restore.ingest import CUT_UP
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.url import StorageLocation

STORES = 3


def run(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreSummary:
    """Restore, with a region for every file, unless told otherwise."""
    return restore(RestoreOptions(live.config, location, **{"region_bytes": 1, **changes}))  # type: ignore[arg-type]


def fetched(live: LiveCluster) -> Counter[int]:
    """How many files were fetched how often by a store."""
    return Counter(times for files in live.calls()["downloads"].values() for times in files.values())


def cut(live: LiveCluster, step: int) -> None:
    """Begin a region at every ``step``th row, as often as makes a file of `CUT_UP` regions where all of them are in it."""
    codec = KeyCodec(ApiVersion.V2)
    keys = sorted(ROWS)[step : (CUT_UP + 1) * step + 1 : step]
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
    """A lost connection does not say that the store has stopped: what it fetches meanwhile goes by another name."""
    with target.failing("Download", {"drop": {}}, count=1, skip=7):
        summary = run(target, source)
    assert summary.verified
    assert fetched(target) == {1: STORES * summary.files - STORES + 1, 2: STORES - 1}
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
