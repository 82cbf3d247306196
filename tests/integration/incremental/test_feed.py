"""The feed of a cluster that writes while its regions split, merge, change leaders and stores."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.feed_state import FeedState
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.feed.feed import Feed

STEPS = 12


def now(live: LiveCluster) -> int:
    """A timestamp that every later write is above and every earlier one at or below."""
    ts = live.cluster.pd.tso()
    live.cluster.flush_timestamps()
    return ts


def write(live: LiveCluster, chance: random.Random, step: int) -> None:
    """Put, overwrite and delete."""
    raw = live.raw()
    raw.batch_put({b"%04d" % chance.randrange(300): b"%d-%d" % (step, at) for at in range(40)})
    for _ in range(5):
        raw.delete(b"%04d" % chance.randrange(300))


def move(live: LiveCluster, chance: random.Random) -> None:
    """Split, merge, or change a leader."""
    codec = live.raw().codec
    regions = live.regions()
    match chance.choice(["split", "split", "merge", "transfer-leader"]):
        case "split":
            live.split(codec.bound(codec.rpc_key(b"%04d" % chance.randrange(300))))
        case "merge":
            at = chance.randrange(len(regions) - 1)
            source, target = chance.sample(regions[at : at + 2], 2)
            live.merge(source=source["id"], target=target["id"])
        case _:
            region = chance.choice(regions)
            others = [store_id for store_id in live.store_ids if store_id != region["leader_store"]]
            live.transfer_leader(region_id=region["id"], store_id=chance.choice(others))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_feed_follows_regions_that_move(seed: int, clusters: Clusters) -> None:
    """After splits, merges and leader moves between writes, the feed's events add up to the cluster's rows."""
    live, chance = clusters(ApiVersion.V2), random.Random(seed)
    codec = live.raw().codec
    live.raw().delete_range(EVERY_KEY)
    span = codec.rpc_range()
    with Feed(live.cluster, codec, span, now(live)) as feed:
        progress = FeedState(feed)
        for step in range(STEPS):
            write(live, chance, step)
            move(live, chance)
            while progress.take(0.05):
                pass
        progress.until(now(live))
        assert feed.status.late_rows == 0
    assert progress.state == contents(live)


def test_a_feed_outlives_its_stores(clusters: Clusters) -> None:
    """While a store is down the resolved-ts stands still for its regions; once it is back, all of its changes come."""
    live, chance = clusters(ApiVersion.V2), random.Random(3)
    codec = live.raw().codec
    live.raw().delete_range(EVERY_KEY)
    with Feed(live.cluster, codec, codec.rpc_range(), now(live), FeedOptions(hold_back=3.0)) as feed:
        progress = FeedState(feed)
        write(live, chance, 0)
        progress.until(now(live))
        for store_id in live.store_ids:
            live.kill_store(store_id)
            try:
                for _ in range(5):
                    progress.take(0.2)
            finally:
                live.restart_store(store_id)
            write(live, chance, store_id)
        progress.until(now(live))
        assert feed.status.errors["stream"] >= 1
    assert progress.state == contents(live)


@pytest.mark.parametrize("point", ["cdc.register", "cdc.scan", "cdc.resolved"])
def test_a_feed_goes_on_after_errors_at(point: str, clusters: Clusters) -> None:
    """Errors at a registration, in a scan and before a resolved-ts lose nothing."""
    live, chance = clusters(ApiVersion.V2), random.Random(4)
    codec = live.raw().codec
    live.raw().delete_range(EVERY_KEY)
    start = now(live)
    write(live, chance, 0)
    failpoint = live.fail(point, {"feed_error": {"region_not_found": {"region_id": "1"}}}, count=-1)
    try:
        with Feed(live.cluster, codec, codec.rpc_range(), start, FeedOptions(hold_back=0)) as feed:
            progress = FeedState(feed)
            progress.wait(lambda: feed.status.errors.get("region_not_found", 0) >= 3)
            live.relent(failpoint)
            progress.until(now(live))
    finally:
        live.relent(failpoint)
    assert progress.state == contents(live)


@pytest.mark.parametrize(("hold_back", "overrun", "loses"), [(3.0, 2.0, False), (0.0, 6.0, True)])
def test_the_hold_back_covers_a_new_leaders_older_timestamps(
    hold_back: float, overrun: float, loses: bool, clusters: Clusters
) -> None:
    """Writes of a new leader below the old one's resolved-ts arrive; without hold-back they are lost."""
    live = clusters(ApiVersion.V2)
    codec = live.raw().codec
    live.raw().delete_range(EVERY_KEY)
    options = FeedOptions(hold_back=hold_back)
    with Feed(live.cluster, codec, codec.rpc_range(), now(live), options) as feed:
        progress = FeedState(feed)
        live.raw().put(b"key", b"before")
        progress.until(now(live))
        bound = codec.bound(codec.rpc_key(b"key"))
        region = [each for each in live.regions() if bytes.fromhex(each["start"]) <= bound][-1]
        other = next(store_id for store_id in live.store_ids if store_id != region["leader_store"])
        with live.failing("cdc.transfer", {"overrun": {"seconds": overrun}}, region_id=region["id"]):
            live.transfer_leader(region_id=region["id"], store_id=other)
            live.raw().put(b"key", b"after")
            written = live.cluster.pd.tso()
            if loses:  # the other regions resolve nothing newer while their stores have older timestamps to give
                live.cluster.flush_timestamps()
            progress.wait(lambda: "not_leader" in feed.status.errors)
            assert (progress.resolved > written) is loses
        progress.until(now(live))
        assert feed.status.late_rows == 0
    assert progress.state == {b"key": b"before" if loses else b"after"}
    assert contents(live) == {b"key": b"after"}


def test_a_feed_of_a_thousand_regions(tmp_path: Path) -> None:
    """Each is subscribed to once, at its leader's store, and yields its row."""
    keys = [b"%04d" % number for number in range(1000)]
    with live_cluster(tmp_path, ApiVersion.V2, stores=3) as live:
        codec, start = live.raw().codec, now(live)
        live.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
        live.scatter()
        live.raw().batch_put((key, key) for key in keys)
        span = codec.rpc_range(KeyRange(keys[0], b""))
        with Feed(live.cluster, codec, span, start, FeedOptions(hold_back=0.0)) as feed:
            progress = FeedState(feed)
            progress.until(now(live))
            status = feed.status
    assert (status.regions, status.stores, status.scanning, status.holes) == (1000, 3, 0, 0)
    assert (status.errors, status.rows) == ({}, 1000)
    assert progress.state == {key: key for key in keys}


def test_a_feed_outlives_congestion(tmp_path: Path) -> None:
    """If nobody reads it, a store ends its regions; then the feed resumes them."""
    rows = {b"%03d" % number: bytes([number]) * 100_000 for number in range(250)}
    with live_cluster(tmp_path, ApiVersion.V2, stores=1, regions=2, feed_quota=1 << 20) as live:
        codec = live.raw().codec
        options = FeedOptions(hold_back=0.0, queue_bytes=1 << 16)
        with Feed(live.cluster, codec, codec.rpc_range(), now(live), options) as feed:
            progress = FeedState(feed)
            progress.until(now(live))
            for _ in range(3):  # more than the buffers of a connection may take
                live.raw().batch_put(rows)
            assert feed.status.queued_bytes < 2 << 20
            progress.until(now(live))
            assert feed.status.errors["congested"] >= 1
        assert progress.state == rows
