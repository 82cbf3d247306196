"""Start-ts and safe point, at a playground."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.reading import ts_of
from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.feed_state import FeedState
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.cluster import safepoint
from tikv_br.cluster.safepoint import release
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import ClusterUnfit, SafePointError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.feed.feed import Feed
from tikv_br.incremental.handover import FromBackup, FromNow, FromTs, protect, resolve, service_id
from tikv_br.storage.url import StorageLocation

V2 = ApiVersion.V2
STORES_BEHIND = 3.2
"""Seconds after which a store that writes little hands out its oldest timestamps, 3 s behind PD's."""


@pytest.fixture
def v2(clusters: Clusters) -> Iterator[LiveCluster]:
    """A V2 cluster with rows and without safe points, before and afterwards."""
    live = clusters(V2)
    for name in live.safe_points():
        release(live.cluster.pd, name)
    live.raw().delete_range(EVERY_KEY)
    live.raw().batch_put({b"k%03d" % at: b"v" for at in range(100)})
    yield live
    for name in live.safe_points():
        release(live.cluster.pd, name)


def keyspace(live: LiveCluster, start: bytes = b"", end: bytes = b"") -> KeyRange:
    """RPC keys of keyspace 0."""
    return live.raw().codec.rpc_range(KeyRange(start, end))


def options(live: LiveCluster, place: Path, **changes: object) -> BackupOptions:
    """A backup by scan, here."""
    usual = BackupOptions(cluster=live.config, storage=StorageLocation("local", str(place)), engine="scan")
    return structs.replace(usual, executor="driver", concurrency=1, **changes)


def test_at_every_instant_some_safe_point_holds_backup_ts(v2: LiveCluster, tmp_path: Path) -> None:
    """From the backup's first scan until the sync stands alone, PD always holds a safe point at backup-ts - 1 or below."""
    seen: list[dict[str, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(v2.safe_points())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = backup(options(v2, tmp_path / "b", gc_ttl=600)).summary
        ts = resolve(FromBackup(StorageLocation("local", str(tmp_path / "b"))), v2.cluster, keyspace(v2))
        assert ts == done.backup_ts > 0
        keeper = protect(v2.cluster.pd, "one", ts)
        release(v2.cluster.pd, safepoint.service_id(done.run_id, StorageLocation("local", str(tmp_path / "b"))))
        looks = len(seen)
        eventually(lambda: len(seen) > looks + 1, 60)  # the second of them has begun since
    finally:
        stop.set()
        watcher.join()
    keeper.stop()
    held = [any(point <= ts - 1 for point in points.values()) for points in seen]
    assert held.index(True) < len(held) - 1
    assert all(held[held.index(True) :])
    assert list(seen[-1]) == [service_id("one")]


def test_now_misses_no_write_that_follows(v2: LiveCluster, tmp_path: Path) -> None:
    """The next write has a ts above the start, even with no interval: cached timestamps are flushed."""
    v2.raw().put(b"k000", b"fills the cache of the leader")
    time.sleep(0.3)
    start = resolve(FromNow(safe_interval=0), v2.cluster, keyspace(v2))
    v2.raw().put(b"k000", b"later")
    assert ts_of(v2, b"k000", tmp_path) > start


def test_no_write_after_a_plain_timestamp_is_missed(v2: LiveCluster) -> None:
    """Stores assign timestamps up to 3 s old: rows put right after a ts was taken from PD arrive, also 6 s later."""
    time.sleep(STORES_BEHIND)  # the caches of the stores are full: they hand out their oldest timestamps
    ts = v2.cluster.pd.tso()
    rows = {b"after-%d-%03d" % (second, at): b"v" for second in range(3) for at in range(20)}
    for second in range(3):
        v2.raw().batch_put({key: value for key, value in rows.items() if key.startswith(b"after-%d" % second)})
        time.sleep(1.0)
    time.sleep(STORES_BEHIND)
    start = resolve(FromTs(ts), v2.cluster, keyspace(v2))
    codec = v2.raw().codec
    with Feed(v2.cluster, codec, codec.rpc_range(), start) as feed:
        progress = FeedState(feed)
        progress.until(v2.cluster.pd.tso())
    assert {key: value for key, value in progress.state.items() if key in rows} == rows


def test_a_plain_timestamp_is_started_5_s_lower(v2: LiveCluster) -> None:
    """Also one of this moment; one of the future, or no timestamp at all, is refused."""
    now = v2.cluster.pd.tso()
    assert resolve(FromTs(now), v2.cluster, keyspace(v2)) == minus_seconds(now, 5)
    for ts in (0, now + (60_000 << 18)):
        with pytest.raises(UsageError, match="start-ts"):
            resolve(FromTs(ts), v2.cluster, keyspace(v2))


def test_the_start_follows_the_settings_of_the_stores(tmp_path: Path) -> None:
    """It is 2 s before what stores may still use; what they have cached is dropped, so that no later write is older."""
    with live_cluster(tmp_path / "cluster", V2, stores=1, ts_ahead=10.0) as live:
        live.raw().put(b"key", b"fills the cache")
        time.sleep(0.5)
        now = live.cluster.pd.tso()
        assert resolve(FromTs(now), live.cluster, keyspace(live)) == minus_seconds(now, 12)
        live.raw().put(b"key", b"later")
        assert ts_of(live, b"key", tmp_path) > now


def test_a_backup_ts_is_started_exactly_when_gc_has_passed_what_is_lower(tmp_path: Path) -> None:
    """GC stops at backup-ts - 1 for a backup: a sync from that backup-ts begins there, one from any other ts is refused."""
    with live_cluster(tmp_path, V2, stores=1) as live:  # of its own: GC never goes back
        ts, later = minus_seconds(live.cluster.pd.tso(), 60), minus_seconds(live.cluster.pd.tso(), 58)
        whole = keyspace(live)
        assert resolve(FromTs(ts), live.cluster, whole) == minus_seconds(ts, 5)
        for name in (f"{safepoint.BACKUP_SERVICES}1", "br-0b1c"):
            live.cluster.pd.update_service_safe_point(name, 600, ts - 1)
            live.cluster.pd.update_service_safe_point("gc_worker", (1 << 63) - 1, ts - 1)
            assert resolve(FromTs(ts), live.cluster, whole) == ts
            protect(live.cluster.pd, "one", ts).stop()
            for other in (ts + 1, later):
                with pytest.raises(SafePointError, match="--from-backup-ts") as refused:
                    resolve(FromTs(other), live.cluster, whole)
                assert "--from-backup" in refused.value.hint
            release(live.cluster.pd, name)
        with pytest.raises(SafePointError):
            resolve(FromTs(ts), live.cluster, whole)


def test_a_backup_of_less_or_of_another_cluster_is_refused(v2: LiveCluster, clusters: Clusters, tmp_path: Path) -> None:
    """The span must lie in the backup's; V1 has no ts, neither as source nor in its backup."""
    backup(options(v2, tmp_path / "part", ranges=(KeyRange(b"k010", b"k020"),), gc_ttl=0))
    part = FromBackup(StorageLocation("local", str(tmp_path / "part")))
    assert resolve(part, v2.cluster, keyspace(v2, b"k010", b"k015")) > 0
    with pytest.raises(UsageError, match="does not contain"):
        resolve(part, v2.cluster, keyspace(v2, b"k010", b"k021"))
    v1 = clusters(ApiVersion.V1)
    v1.raw().put(b"a", b"b")
    backup(options(v1, tmp_path / "v1"))
    old = FromBackup(StorageLocation("local", str(tmp_path / "v1")))
    with pytest.raises(UsageError, match="is of cluster"):
        resolve(old, v2.cluster, keyspace(v2))
    with pytest.raises(ClusterUnfit, match="no timestamps") as refused:
        resolve(old, v1.cluster, keyspace(v1))
    assert "--mode diff" in refused.value.hint


def test_a_start_that_gc_has_passed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Behind PD's safe points nothing is registered, and the hint describes a new start."""
    with live_cluster(tmp_path, V2, stores=1) as live:  # of its own: GC never goes back
        passed = live.cluster.pd.tso()
        live.cluster.pd.update_service_safe_point("gc_worker", (1 << 63) - 1, passed)
        with pytest.raises(SafePointError, match="has passed") as refused:
            protect(live.cluster.pd, "late", passed - 10)
        assert "new backup" in refused.value.hint
        assert service_id("late") not in live.safe_points()
        protect(live.cluster.pd, "in-time", passed + 1).stop()
        assert live.safe_points()[service_id("in-time")] == passed
