"""Change feeds of the playground where nothing is recorded: regions that change, faults, slow clients, many writers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

from tests.integration.playground.clients import Client, hold_delays, running
from tests.integration.playground.feeds import Event, Feed, feeding
from tests.support.playground_admin import PlaygroundAdmin
from tests.support.waiting import eventually
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground import cdc_hub
from tikv_br.playground.region import Region

TICK = 0.05


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Return a client of three stores of API V2, each with a replica of every region."""
    folder = tmp_path_factory.mktemp("feeds")
    with running(folder, ApiVersion.V2, resolved_ts_interval=TICK) as opened:
        yield opened


@pytest.fixture
def admin(client: Client) -> Iterator[PlaygroundAdmin]:
    """Return the admin API, with no failpoint left at the end."""
    opened = PlaygroundAdmin(client.playground.state.address)
    yield opened
    opened.disarm()


def cut(client: Client, name: bytes) -> Region:
    """A fresh region for the keys that begin with ``name``."""
    bounds = [codec.encode(client.key(name)), codec.encode(client.key(name + b"\xff"))]
    for bound in bounds:
        client.playground.regions.split(client.playground.regions.locate(bound).id, [bound])
    return client.region(name)


def followers(region: Region) -> list[int]:
    """The stores that hold the region and do not lead it."""
    return [peer.store_id for peer in region.peers if peer.store_id != region.leader_store]


def put(client: Client, key: bytes, value: bytes) -> bool:
    """Return whether the leader accepts a put."""
    answer = client.put(key, value)
    assert not answer.error
    return not answer.HasField("region_error")


def test_splits_merges_and_moves_end_what_was_subscribed(client: Client, admin: PlaygroundAdmin) -> None:
    """A split returns the pieces, a merge nothing, a transfer the new leader; other regions of the stream continue."""
    region, other = cut(client, b"change"), cut(client, b"stay")
    client.playground.regions.transfer_leader(other.id, region.leader_store)
    with feeding(client, region.leader_store) as feed:
        feed.register(client.region(b"stay"))
        feed.register(region)
        feed.await_initialized(2)
        left, right = client.playground.regions.split(region.id, [codec.encode(client.key(b"change5"))])
        pieces = feed.await_error(region.id, "epoch_not_match").error.epoch_not_match.current_regions
        assert list(pieces) == [left.to_pb(), right.to_pb()]
        feed.register(left)
        feed.register(right)
        feed.await_initialized(4)
        admin.run("merge", source=left.id, target=right.id)
        feed.await_(lambda: len(feed.errors()) == 3)
        merges = [event.error.epoch_not_match for event in feed.events() if event.HasField("error")][1:]
        assert [list(each.current_regions) for each in merges] == [[], []]
        merged = client.region(b"change")
        feed.register(merged)
        feed.await_initialized(5)
        target = followers(merged)[0]
        moved = client.playground.regions.transfer_leader(merged.id, target)
        feed.await_(lambda: len(feed.errors()) == 4)
        assert feed.errors()[-1] == (merged.id, "not_leader")
        assert feed.events()[-1].error.not_leader.leader == moved.leader.to_pb()
        before = feed.resolved(other.id)
        feed.await_(lambda: feed.resolved(other.id) > before)
        eventually(lambda: [each["region_id"] for each in admin.get("feeds")] == [other.id])


def test_deregistration_of_a_whole_request(client: Client) -> None:
    """Without a region all regions of the request end, each with its own event; other requests go on."""
    one, other = cut(client, b"dereg1"), cut(client, b"dereg2")
    other = client.playground.regions.transfer_leader(other.id, one.leader_store)
    with feeding(client, one.leader_store) as feed:
        for region, request_id in ((one, 1), (other, 1), (one, 2)):
            feed.register(region, request_id=request_id)
        feed.await_initialized(3)
        feed.deregister(request_id=1)
        feed.await_(lambda: len(feed.errors()) == 2)
        assert sorted(feed.errors()) == sorted([(one.id, "region_not_found"), (other.id, "region_not_found")])
        before = feed.resolved(one.id)
        feed.await_(lambda: feed.resolved(one.id) > before)


def test_live_events_may_come_before_the_scan_is_over(
    client: Client, admin: PlaygroundAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write made during the scan is sent at once, ahead of INITIALIZED and ahead of every resolved-ts."""
    region = cut(client, b"early")
    for number in range(3):
        assert put(client, b"early%d" % number, b"old")
    with feeding(client, region.leader_store) as feed:
        over = hold_delays(monkeypatch)
        with admin.failing("cdc.scan", {"delay": {"seconds": 1}}, region_id=region.id) as delay:
            feed.register(region)
            eventually(lambda: admin.hits(delay) == 1)
            assert put(client, b"early1", b"new")
            over.set()
            feed.await_initialized()
        rows = [(bytes(row.key[4:]), bytes(row.value)) for row in feed.rows()]
        scanned = [(b"early%d" % number, b"old") for number in range(3)]
        assert rows == [(b"early1", b"new"), *scanned, (b"", b"")]
        feed.await_(lambda: feed.resolved(region.id))
        kinds = ["resolved" if each.HasField("resolved_ts") else "events" for each in feed.messages()]
        assert kinds == sorted(kinds)


def test_resolved_ts_is_the_stores_cached_time(client: Client) -> None:
    """It is never ahead of PD's TSO, is at most the cache's age behind, and jumps when the cache is flushed."""
    region = cut(client, b"resolved")
    with feeding(client, region.leader_store) as feed:
        feed.register(region)
        feed.await_(lambda: feed.resolved(region.id))
        before = client.playground.tso.next()
        feed.await_(lambda: feed.resolved(region.id))
        assert feed.resolved(region.id) < client.playground.tso.next()
        client.playground.nodes[region.leader_store].causal.flush()
        feed.await_(lambda: feed.resolved(region.id) > before)


def test_a_slow_client_is_told_of_congestion(tmp_path: Path) -> None:
    """Once events that nobody takes fill the quota, the region ends with `congested`; memory stays bounded."""
    with running(tmp_path, ApiVersion.V2, stores=1, resolved_ts_interval=TICK, feed_quota=1 << 20) as client:
        admin = PlaygroundAdmin(client.playground.state.address)
        region = client.region(b"slow")
        with feeding(client, 1, reading=False) as feed:
            feed.register(region)
            eventually(lambda: [each["initialized"] for each in admin.get("feeds")] == [True])
            deadline = time.monotonic() + 60
            while admin.get("feeds"):
                assert time.monotonic() < deadline
                assert put(client, b"slow", bytes(256 << 10))
            feed.start()
            feed.await_error(region.id, "congested")


def test_an_old_leader_may_overrun_the_new_one(
    client: Client, admin: PlaygroundAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On demand it sends resolved-ts above the new leader's writes, unnoticed by a scan from there, then the new leader."""
    region = cut(client, b"overrun")
    target = followers(region)[0]
    now = time.monotonic()
    monkeypatch.setattr(cdc_hub, "time", SimpleNamespace(monotonic=lambda: now))
    began = client.playground.tso.next()
    with feeding(client, region.leader_store) as feed:
        feed.register(region)
        feed.await_initialized()
        with admin.failing("cdc.transfer", {"overrun": {"seconds": 3}}, region_id=region.id):
            client.playground.regions.transfer_leader(region.id, target)
        eventually(lambda: put(client, b"overrun", b"below"))
        before = client.playground.tso.next()
        feed.await_(lambda: feed.resolved(region.id) > before)
        now += 3
        moved = feed.await_error(region.id, "not_leader").error.not_leader
        assert moved.leader == client.region(b"overrun").leader.to_pb()
        overrun = feed.resolved(region.id)
        assert overrun > before
        assert [row for row in feed.rows() if row.key] == []
    with feeding(client, target) as feed:
        feed.register(client.region(b"overrun"), checkpoint_ts=overrun, request_id=1)
        feed.register(client.region(b"overrun"), checkpoint_ts=began, request_id=2)
        feed.await_initialized(2)
        [row] = [row for row in feed.rows() if row.key]
        assert (row.value, row.commit_ts < before) == (b"below", True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_region_changes_lose_no_row(client: Client, seed: int) -> None:
    """Writers, splits, merges and transfers at once: the feeds' events, newest first per key, equal the cluster.

    And no row was sent after a resolved-ts of its region at or above it.
    """
    chance = random.Random(seed)
    cut(client, b"storm")
    over = threading.Event()
    writers = [threading.Thread(target=_write, args=(client, number, over)) for number in range(3)]
    with Follower(client, b"storm", b"storm\xff") as follower:
        for writer in writers:
            writer.start()
        for _ in range(30):
            _change_a_region(client, chance)
            time.sleep(0.03)
        over.set()
        for writer in writers:
            writer.join()
        for node in client.playground.nodes.values():
            node.causal.flush()  # or it takes three seconds
        follower.await_resolved(client.playground.tso.next())
        reported = follower.newest()
    held = _held(client)
    assert held == reported
    assert len(held) > 50


def _write(client: Client, number: int, over: threading.Event) -> None:
    turn = 0
    while turn < 100 or not over.is_set():
        turn += 1
        key = b"storm%03d" % (turn * 7 % 200)
        if turn % 5:
            put(client, key, b"%d of %d" % (turn, number))
        else:
            client.call("RawDelete", key, kv.RawDeleteRequest(key=client.key(key)))
        time.sleep(0.001)


def _change_a_region(client: Client, chance: random.Random) -> None:
    regions = client.playground.regions
    region = client.region(b"storm%03d" % chance.randrange(200))
    match chance.choice(["split", "split", "merge", "transfer", "transfer"]):
        case "split":
            regions.split(region.id, [codec.encode(client.key(b"storm%03d" % chance.randrange(200)))])
        case "transfer":
            regions.transfer_leader(region.id, chance.choice([peer.store_id for peer in region.peers]))
        case "merge" if region.start > codec.encode(client.key(b"storm")):
            left = regions.previous(region.start)
            assert left is not None
            regions.merge(left.id, region.id)


def _held(client: Client) -> dict[bytes, bytes]:
    rows: dict[bytes, bytes] = {}
    first, last = codec.encode(client.key(b"storm")), codec.encode(client.key(b"storm\xff"))
    for region in client.playground.regions.overlapping(first, last):
        start = max(codec.decode(region.start)[0], client.key(b"storm"))
        scan = kv.RawScanRequest(start_key=start, end_key=client.key(b"storm\xff"), limit=10_000)
        answer = client.call("RawScan", b"storm", scan, region=region)
        rows.update((bytes(pair.key), bytes(pair.value)) for pair in answer.kvs)
    return rows


class Follower:
    """Follows a range across all changes, by one stream a store; a bare form of what a replicator does."""

    def __init__(self, client: Client, start: bytes, end: bytes) -> None:
        self._client = client
        self._start, self._end = (codec.encode(client.key(key)) for key in (start, end))
        self._feeds: dict[int, Feed] = {}
        self._open = [feeding(client, store_id) for store_id in client.playground.nodes]
        self._requests = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._current: dict[int, tuple[Region, int]] = {}

    def __enter__(self) -> Self:
        """Open the streams and begin."""
        for store_id, opened in zip(self._client.playground.nodes, self._open, strict=True):
            self._feeds[store_id] = opened.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all streams."""
        self._over.set()
        self._thread.join()
        for opened in self._open:
            opened.__exit__(None, None, None)

    def _follow(self) -> None:
        """Subscribe each region of the range as it is, from 0, whenever it has changed; an error is met at the next look."""
        while not self._over.wait(0.01):
            for region in self._client.playground.regions.overlapping(self._start, self._end):
                known = self._current.get(region.id)
                failed = known is not None and self._has_failed(known)
                if known is None or failed or _place(known[0]) != _place(region):
                    self._requests += 1
                    self._current[region.id] = region, self._requests
                    self._feeds[region.leader_store].register(region, request_id=self._requests)

    def _has_failed(self, known: tuple[Region, int]) -> bool:
        region, request_id = known
        return request_id in self._feeds[region.leader_store].failed

    def await_resolved(self, ts: int) -> None:
        """Return once every region of the range has sent a resolved-ts above ``ts``."""
        regions = self._client.playground.regions

        def resolved() -> bool:
            now = regions.overlapping(self._start, self._end)
            return all(self._feeds[region.leader_store].resolved(region.id) > ts for region in now)

        eventually(resolved, 60)

    def newest(self) -> dict[bytes, bytes]:
        """The newest put of each key, unless it was deleted; checks that resolved-ts were kept."""
        newest: dict[bytes, Event.Row] = {}
        for feed in self._feeds.values():
            reported: dict[int, int] = {}
            for message in feed.messages():
                for event in message.events:
                    for row in event.entries.entries:
                        assert not (event.index and row.commit_ts <= reported.get(event.request_id, 0))
                        if row.key and row.commit_ts >= newest.get(row.key, row).commit_ts:
                            newest[row.key] = row
                if message.HasField("resolved_ts"):
                    reported[message.resolved_ts.request_id] = message.resolved_ts.ts
        return {key: bytes(row.value) for key, row in newest.items() if row.op_type == Event.Row.PUT}


def _place(region: Region) -> tuple[int, int]:
    return region.version, region.leader_store
