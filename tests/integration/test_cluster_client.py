"""The cluster client against a playground: all API versions, regions in motion, stores that die, TLS."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import msgspec.structs
import pytest

from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.raw_calls import compare_and_swap, starts_of
from tests.support.waiting import eventually
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.safepoint import SafePointKeeper, protect, release
from tikv_br.cluster.timestamps import minus_seconds, physical_ms
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.errors import SafePointError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange


@pytest.fixture(scope="module", params=list(ApiVersion), ids=lambda version: version.label)
def any_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Three stores of each API version in turn."""
    with live_cluster(tmp_path_factory.mktemp(request.param.label), request.param, regions=6) as live:
        yield live


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """One V2 cluster for the tests that break it."""
    with live_cluster(
        tmp_path_factory.mktemp("shared"), ApiVersion.V2, regions=6, election_timeout=0.5, disconnect_delay=2.0
    ) as live:
        yield live


@pytest.fixture
def live(shared: LiveCluster) -> Iterator[LiveCluster]:
    """The V2 cluster, healed afterwards."""
    yield shared
    shared.heal()


@pytest.fixture
def rows(live: LiveCluster) -> dict[bytes, bytes]:
    """Three thousand rows over six regions or more, and nothing else."""
    raw = live.raw()
    raw.delete_range(EVERY_KEY)
    found = {b"%c%05d" % (at % 250, at): b"v%d" % at for at in range(3000)}
    raw.batch_put(found)
    return found


def scanned(raw: RawClient, start: bytes = b"", end: bytes = b"", page_rows: int = 200) -> dict[bytes, bytes]:
    """All rows of a range of user keys."""
    found: dict[bytes, bytes] = {}
    for page in raw.scan_pages(raw.codec.rpc_range(KeyRange(start, end)), page_rows):
        keys = (raw.codec.user_key(key) for key in page.keys.to_pylist())
        found.update(zip(keys, page.values.to_pylist(), strict=True))
    return found


@pytest.mark.emulator_only("the version of a recording")
def test_the_cluster_says_what_it_is(any_version: LiveCluster) -> None:
    """Id, version, API version and stores come from PD and the stores' own configuration."""
    info = any_version.cluster.info()
    assert info.cluster_id == any_version.cluster.cluster_id != 0
    assert info.version == "9.0.0-beta.2"
    assert any_version.cluster.raw().codec.api_version is info.api_version
    assert [store.id for store in info.stores] == sorted(any_version.store_ids)
    assert all(any_version.cluster.store(store.id).store == store for store in info.stores)


@pytest.mark.core("raw")
def test_random_work_agrees_with_a_dictionary(any_version: LiveCluster) -> None:
    """Puts, deletes, swaps and range deletes of random keys leave what a dictionary holds after the same."""
    chance = random.Random(4)
    raw = any_version.raw()
    raw.delete_range(EVERY_KEY)
    model: dict[bytes, bytes] = {}

    def key() -> bytes:
        return bytes(chance.choices(b"\0a\x80\xff", k=chance.randrange(1, 12)))

    for _ in range(40):
        batch = {key(): chance.randbytes(chance.randrange(20)) for _ in range(chance.randrange(30))}
        raw.batch_put(batch)
        model.update(batch)
        one, gone, swapped = key(), key(), key()
        raw.put(one, b"")
        model[one] = b""
        raw.delete(gone)
        model.pop(gone, None)
        assert raw.get(swapped) == model.get(swapped)
        assert compare_and_swap(raw, swapped, model.get(swapped), b"new").succeeded
        model[swapped] = b"new"
        doomed = [key() for _ in range(5)]
        raw.batch_delete(doomed)
        start, end = sorted([key(), key()])
        raw.delete_range(KeyRange(start, end))
        model = {k: v for k, v in model.items() if k not in doomed and not start <= k < end}
    assert scanned(raw) == model
    assert raw.batch_get([*model, b"nosuch"]) == model


def test_rows_deleted_since_the_scan_have_no_ttl(any_version: LiveCluster) -> None:
    """Instead of living for ever: API V2 answers TTL 0 for a tombstone."""
    raw = any_version.raw()
    if not raw.codec.api_version.has_ttl:
        return
    keys = [b"gone%03d" % number for number in range(50)]
    for key in keys:
        raw.put(key, b"v", ttl=1000 if key != keys[7] else 0)
    [page] = raw.scan_pages(raw.codec.rpc_range(KeyRange(keys[0], keys[-1] + b"\0")))
    raw.delete(keys[0])
    raw.delete(keys[-1])
    fetcher = TtlFetcher(any_version.cluster, raw)
    rows, expire_ts = fetcher.live_rows(page)
    assert [raw.codec.user_key(key) for key in rows.keys.to_pylist()] == keys[1:-1]
    assert [row for row, ts in enumerate(expire_ts) if not ts] == [6]
    assert fetcher.vanished == 2


def test_a_scan_follows_regions_that_move_all_the_while(live: LiveCluster, rows: dict[bytes, bytes]) -> None:
    """Splits, merges and leader moves in the background lose and double no row, scan after scan."""
    raw = live.raw()
    over = threading.Event()
    moves = 0

    def shake() -> None:
        nonlocal moves
        chance = random.Random(8)
        while not over.wait(0.01):
            moves += 1
            live.split(raw.codec.bound(raw.codec.rpc_key(chance.randbytes(2))))
            regions = [
                each for each in live.regions() if each["start"].startswith("72") and each["end"].startswith("72")
            ]
            if len(regions) > 12:
                left = chance.randrange(len(regions) - 1)
                live.merge(source=regions[left]["id"], target=regions[left + 1]["id"])
            live.scatter()

    with ThreadPoolExecutor(1) as pool:
        shaking = pool.submit(shake)
        try:
            scans = 0
            while scans < 10 or moves <= 10:
                assert not shaking.done()
                assert scanned(raw, page_rows=50) == rows
                scans += 1
            assert raw.checksum().total_kvs == len(rows)
        finally:
            over.set()
        shaking.result()


def test_a_store_that_dies_during_a_scan_is_replaced(live: LiveCluster, rows: dict[bytes, bytes]) -> None:
    """The leader of the region under the cursor is killed; after the election the scan goes on and is whole."""
    live.scatter()
    live.fail("RawScan", {"kill_store": {}}, skip=3)
    assert scanned(live.raw()) == rows


def test_writes_survive_a_store_that_dies_and_returns(live: LiveCluster) -> None:
    """A batch put over all regions, with a store killed on the way and back a second later, is whole."""
    raw = live.raw()
    raw.delete_range(EVERY_KEY)
    live.scatter()
    victim = live.store_ids[0]
    live.fail("RawBatchPut", {"kill_store": {}}, store_id=victim)
    back = threading.Timer(1.0, live.run, ["restart-store"], {"store_id": victim})
    back.start()
    rows = {b"%c%d" % (at % 250, at): bytes(2000) for at in range(2000)}
    raw.batch_put(rows)
    back.join()
    assert scanned(raw) == rows


def test_one_dead_store_does_not_stop_the_work(live: LiveCluster, rows: dict[bytes, bytes]) -> None:
    """With a store dead, and PD aware of it in the end, version, flush, scan and checksum work."""
    live.kill_store(live.store_ids[-1])
    with Cluster.connect(msgspec.structs.replace(live.config, retry_budget=60.0)) as cluster:
        assert cluster.info().api_version is ApiVersion.V2
        cluster.flush_timestamps()
        assert scanned(cluster.raw()) == rows
        assert cluster.raw().checksum().total_kvs == len(rows)


def test_timestamps_ascend_across_threads(live: LiveCluster) -> None:
    """Timestamps are unique, of this moment, and ascend for each caller."""
    pd = live.cluster.pd

    def take(_: int) -> list[int]:
        return [pd.tso() for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))
    assert all(own == sorted(set(own)) for own in taken)
    assert len(set(itertools.chain.from_iterable(taken))) == 400
    assert abs(physical_ms(pd.tso()) / 1000 - time.time()) < 60


def test_safe_points_hold_gc_and_losing_one_is_noticed(live: LiveCluster) -> None:
    """Protection of what is new works and is released; of what GC passed it is refused."""
    pd = live.cluster.pd
    now = pd.tso()
    with SafePointKeeper(pd, "keeper", minus_seconds(now, 60), ttl_seconds=60) as keeper:
        keeper.check()
        services = {each["service_id"]: each["safe_point"] for each in live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]}  # fmt: skip
        assert services["keeper"] == minus_seconds(now, 60)
    assert "keeper" not in str(live.get("/pd/api/v1/gc/safepoint"))
    pd.update_service_safe_point("gc_worker", (1 << 63) - 1, minus_seconds(now, 30))
    with pytest.raises(SafePointError):
        protect(pd, "late", minus_seconds(now, 60), 60)
    release(pd, "late")


def test_region_sizes_are_known_for_every_region(live: LiveCluster, rows: dict[bytes, bytes]) -> None:
    """PD's estimates by HTTP have the ids that gRPC has."""
    assert rows
    pd, pd_http = live.cluster.pd, live.cluster.pd_http
    # PD may split a region between the two answers.
    eventually(lambda: starts_of(pd_http.regions(b"", b"")) == [region.start for region in pd.scan_regions(b"", b"")])
