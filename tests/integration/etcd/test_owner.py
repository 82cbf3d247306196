"""The owner's part, in a real etcd, with a PD that knows safe points and regions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.regions import Peer, Region
from tikv_br.errors import ClusterUnreachable
from tikv_br.formats.keys import codec
from tikv_br.incremental.group.model import CaptureInfo, ChangefeedInfo, ChangefeedState, Progress
from tikv_br.incremental.group.owner import CaptureOwner
from tikv_br.incremental.group.store import GroupStore
from tikv_br.records import dump

CLUSTERS = itertools.count(7000)
FEED = ChangefeedInfo("feed", "blackhole://", 0, b"", b"", start_ts=1000, created_ms=5)


class Pd(PdClient):
    """Four regions, and a book of safe points."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.passed = 0
        self.away = False

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """See `PdClient`."""
        if ttl_seconds:
            self.held[service_id] = safe_point
        else:
            self.held.pop(service_id, None)
        return self.passed

    def gc_safe_point(self) -> int:
        """See `PdClient`."""
        return self.passed

    def tso(self) -> int:
        """See `OwnerPd`."""
        return 1 << 50

    def scan_regions(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """See `PdClient`."""
        if self.away:
            raise ClusterUnreachable("PD is away")
        borders = [b"", *(codec.encode(b"r\0\0\0" + each) for each in (b"b", b"c", b"d")), b""]
        peer = Peer(1, 1)
        return [Region(at, *pair, 1, 1, peer, (peer,)) for at, pair in enumerate(itertools.pairwise(borders))]


@pytest.fixture
def pd() -> Pd:
    """A PD."""
    return Pd()


@pytest.fixture
def store(etcd: Etcd) -> Iterator[GroupStore]:
    """A group with a changefeed, in which captures a and b are, of which a is the owner."""
    store = GroupStore(etcd, next(CLUSTERS))
    for name in ("a", "b"):
        etcd.put(store.keys.of("owner", name), b"")
        etcd.put(store.keys.of("capture", name), dump(CaptureInfo(name, "", 1, "1", write_timeout_ms=7000)))
    etcd.put(store.keys.of("changefeed", "feed"), dump(FEED))
    yield store
    etcd.delete(store.keys.root, prefix=True)


def test_a_changefeed_gets_under_way(store: GroupStore, pd: Pd) -> None:
    """Split, assigned, protected; then the lowest checkpoint is shown, and the safe point follows it in time."""
    owner = CaptureOwner("a", store, pd)
    pd.away = True
    owner.step()
    assert store.snapshot().tasks == {}
    pd.away = False
    owner.step()
    owner.step()
    state = store.snapshot()
    first, second = state.tasks_of("feed")
    assert (first.start, first.end, second.start, second.end) == (b"r\0\0\0", b"r\0\0\0c", b"r\0\0\0c", b"r\0\0\1")
    assert {first.capture, second.capture} == {"a", "b"}
    assert {(task.epoch, task.stopping, task.write_timeout_ms) for task in (first, second)} == {(1, False, 7000)}
    assert (pd.held, state.statuses["feed"].checkpoint_ts) == ({"tikv-br-sync-feed": 999}, 1000)
    for task, ts in ((first, 3000), (second, 2000)):
        store.etcd.put(
            store.keys.of("progress", task.id),
            dump(Progress(task.changefeed, task.number, ts, ts + 10, 1, task.capture, 1)),
        )
    owner.step()
    reported = store.snapshot().statuses["feed"]
    assert (reported.checkpoint_ts, reported.resolved_ts, reported.owner) == (2000, 2010, "a")
    CaptureOwner("a", store, pd).step()
    assert pd.held == {"tikv-br-sync-feed": 1999}


def test_only_the_owner_acts(store: GroupStore, pd: Pd) -> None:
    """The second in line does nothing, until the first is gone; what the first wanted then is refused."""
    second = CaptureOwner("b", store, pd)
    second.step()
    assert store.snapshot().tasks == {}
    first, seen = CaptureOwner("a", store, pd), store.snapshot()
    store.etcd.delete(store.keys.of("owner", "a"))
    first._split(seen, FEED)
    assert store.snapshot().tasks == {}
    second.step()
    assert len(store.snapshot().tasks) == 2


def test_a_dead_captures_tasks_wait_for_what_it_has_sent(store: GroupStore, pd: Pd) -> None:
    """Not before its requests are over, counted from when the owner missed it, goes its task to another, by a new epoch."""
    now = [100.0]
    owner = CaptureOwner("a", store, pd, lambda: now[0])
    for _ in range(2):
        owner.step()
    store.etcd.delete(store.keys.of("capture", "b"))
    for now[0] in (200.0, 206.9):
        owner.step()
        assert {task.capture for task in store.snapshot().tasks.values()} == {"a", "b"}
    now[0] = 207.0
    owner.step()
    assert sorted((task.capture, task.epoch) for task in store.snapshot().tasks.values()) == [("a", 1), ("a", 2)]


def test_a_changefeed_behind_gc_fails(store: GroupStore, pd: Pd) -> None:
    """GC has passed its checkpoint: the changefeed has that error, and its tasks are freed."""
    owner = CaptureOwner("a", store, pd)
    owner.step()
    owner.step()
    pd.passed = 5000
    CaptureOwner("a", store, pd).step()
    failed = store.snapshot().changefeeds["feed"]
    assert failed.state is ChangefeedState.FAILED
    assert "5000" in failed.error
    owner.step()
    assert all(task.stopping for task in store.snapshot().tasks.values())


def test_a_removed_changefeed_leaves_nothing(store: GroupStore, pd: Pd) -> None:
    """Once its tasks are free: the changefeed, its tasks, its progress and its safe point go."""
    owner = CaptureOwner("a", store, pd)
    for _ in range(2):
        owner.step()
    store.etcd.put(store.keys.of("changefeed", "feed"), dump(structs.replace(FEED, state=ChangefeedState.REMOVING)))
    owner.step()
    for task in store.snapshot().tasks.values():
        assert task.stopping
        store.etcd.put(store.keys.of("task", task.id), dump(replace(task, capture="", stopping=False)))
    owner.step()
    left = store.snapshot()
    assert (dict(left.changefeeds), dict(left.tasks), dict(left.statuses), pd.held) == ({}, {}, {}, {})
