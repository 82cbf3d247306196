"""Captures that share a changefeed, in threads of the test: what they do in turn, and what they leave in etcd."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.members import member, wait_for_state
from tests.support.clock import move_clock
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.cluster.etcd import Etcd
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import ChangefeedInfo, ChangefeedState, GroupState
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.handover import FromNow, resolve, service_id
from tikv_br.playground.etcd import EtcdServer
from tikv_br.records import dump
from tikv_br.restore.options import Restamp, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

V2 = ApiVersion.V2
PATIENCE = 90.0
"""Seconds that a slow machine may take for anything."""
LEASE, SHORT_LEASE = 60, 4
"""Seconds. The former outlasts whatever a busy machine does; nobody here waits for its end."""


class Group:
    """A source, a target, and an etcd in which the captures of one test meet."""

    def __init__(self, source: LiveCluster, target: LiveCluster, server: EtcdServer, etcd: Etcd, scratch: Path) -> None:
        self.source, self.target, self.server, self.etcd = source, target, server, etcd
        self.store = GroupStore(etcd, source.cluster.cluster_id)
        self._scratch = scratch

    def create(self, name: str, spans: int = 2) -> Changefeeds:
        """A changefeed of all of keyspace 0 to the target, from now on; made as a command does."""
        span = self.source.raw().codec.rpc_range()
        start_ts = resolve(FromNow(), self.source.cluster, span)
        made = Changefeeds(self.store, self.source.cluster.pd)
        made.create(
            ChangefeedInfo(
                name, f"tikv://{self.target.pd}", 0, b"", b"", start_ts, created_ms=1, spans=spans, hold_back_ms=0
            )
        )
        return made

    def safe_point(self, name: str) -> int:
        """Safe point of a changefeed in PD; 0 = none."""
        points = self.source.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
        found = [int(point["safe_point"]) for point in points if point["service_id"] == service_id(name)]
        return found[0] if found else 0

    def capture(self, lease: int = LEASE) -> AbstractContextManager[threading.Event]:
        """A capture that runs for the length of the block; the event ends it."""
        return member(self.etcd, self.source.cluster, self._scratch, lease)

    def wait(self, what: str, is_there: Callable[[GroupState], object]) -> GroupState:
        """Wait for a state."""
        return wait_for_state(self.store, what, is_there, PATIENCE)

    def wait_until_equal(self) -> None:
        """Wait for the target to hold what the source holds."""
        wanted = contents(self.source)
        eventually(lambda: contents(self.target) == wanted, PATIENCE, every=0.1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Target of changes."""
    with live_cluster(tmp_path_factory.mktemp("target"), V2, stores=1, regions=3) as live:
        yield live


@pytest.fixture
def group(clusters: Clusters, target: LiveCluster, tmp_path: Path) -> Iterator[Group]:
    """Nothing in it yet."""
    source = clusters(V2)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    with real_etcd(tmp_path / "etcd") as server, Etcd.connect([server.address]) as etcd:
        yield Group(source, target, server, etcd, tmp_path)


def holders(state: GroupState) -> set[str]:
    """The captures that have tasks."""
    return {task.capture for task in state.tasks.values()}


@pytest.mark.core("changefeed")
def test_captures_share_and_hand_over(group: Group) -> None:
    """One follows all, a second gets its half, the first hands its own back; nothing is lost, and GC follows."""
    group.create("shared")
    raw = group.source.raw()
    raw.batch_put({b"%03d" % at: b"first" for at in range(300)})
    with group.capture() as stop_first:
        one = group.wait("one has both", lambda state: len(state.tasks) == 2 and "" not in holders(state))
        (first,) = holders(one)
        group.wait_until_equal()
        with group.capture():
            both = group.wait("each has one", lambda state: len(holders(state) - {""}) == 2)
            assert max(task.epoch for task in both.tasks.values()) == 2
            raw.batch_put({b"%03d" % at: b"second" for at in range(200)})
            group.wait_until_equal()
            reached = group.store.snapshot().checkpoint_ts("shared")
            began = time.monotonic()
            stop_first.set()
            group.wait(
                "the second has both", lambda state: len(holders(state)) == 1 and not holders(state) & {"", first}
            )
            assert time.monotonic() - began < PATIENCE
            raw.batch_delete([b"%03d" % at for at in range(100)])
            group.wait_until_equal()
            later = group.wait("it goes on", lambda state: state.checkpoint_ts("shared") > reached)
            held = group.safe_point("shared")  # before the checkpoint is looked at, which moves on
            assert one.changefeeds["shared"].start_ts - 1 <= held < group.store.snapshot().checkpoint_ts("shared")
            reported = group.wait(
                "the owner reports it", lambda state: state.statuses["shared"].checkpoint_ts > reached
            )
            assert reported.statuses["shared"].checkpoint_ts <= reported.checkpoint_ts("shared")
            assert first not in later.captures
    left = group.store.snapshot()
    assert (holders(left), dict(left.captures), left.owner) == ({""}, {}, "")


@pytest.mark.parametrize("seconds", [7200.0, -7200.0], ids=["ahead", "behind"])
def test_rows_of_a_changefeed_expire_by_the_clock_of_pd(
    group: Group, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Whatever the clock of the capture's machine shows; so do rows that have expired before they arrive."""
    group.target.raw().put(b"gone", b"older value")
    group.create("expiring")
    raw = group.source.raw()
    raw.put(b"gone", b"newer value", 1)
    raw.batch_put({b"%03d" % at: b"value" for at in range(20)}, 3600)
    eventually(lambda: raw.get(b"gone") is None)
    move_clock(monkeypatch, seconds)
    with group.capture():
        group.wait_until_equal()
    assert all(3000 < (group.target.raw().get_ttl(key) or 0) <= 3600 for key in contents(group.source))


def test_a_changefeed_follows_ingests(group: Group, tmp_path: Path) -> None:
    """Its target gets rows with new timestamps. Of those with older ones its tasks keep that they are missing, also when another capture goes on."""
    raw = group.source.raw()
    rows = {b"%03d" % at: b"backed up" for at in range(100)}
    raw.batch_put(rows)
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(group.source.config, place, safe_interval=0.0, executor="driver"))
    group.create("ingests")
    undo = RestoreOptions(group.source.config, place, allow_overwrite=True)
    with group.capture():
        raw.batch_put(dict.fromkeys(rows, b"later"))
        group.wait_until_equal()
        restore(undo)
        assert contents(group.source) == rows
        group.wait_until_equal()
        assert group.store.snapshot().missed("ingests") == ()
        restore(structs.replace(undo, restamp=Restamp.NEVER))
        missed = group.wait("it is degraded", lambda state: state.missed("ingests")).missed("ingests")
        assert "restore raw" in missed[0]
    with group.capture():
        raw.put(b"last", b"one")
        eventually(lambda: contents(group.target).get(b"last") == b"one", PATIENCE)
        assert group.store.snapshot().missed("ingests") == missed


def test_a_changefeed_rests_goes_on_and_is_removed(group: Group) -> None:
    """Paused it writes nothing, resumed it loses no change of the pause, and removed it leaves nothing."""
    feeds = group.create("updates", spans=3)
    raw = group.source.raw()
    with group.capture():
        raw.put(b"one", b"1")
        group.wait_until_equal()
        feeds.pause("updates")
        rested = group.wait("it rests", lambda state: holders(state) == {""})
        raw.put(b"two", b"2")
        time.sleep(1)
        assert group.store.snapshot().checkpoint_ts("updates") == rested.checkpoint_ts("updates")
        assert b"two" not in contents(group.target)
        feeds.resume("updates")
        group.wait_until_equal()
        feeds.remove("updates")
        left = group.store.snapshot()
        assert (dict(left.changefeeds), dict(left.tasks), dict(left.progress), dict(left.statuses)) == ({}, {}, {}, {})
        assert group.safe_point("updates") == 0


def test_a_permanent_error_fails_the_changefeed_until_it_is_resumed(group: Group) -> None:
    """The sink is the source itself: there is no retry, and after the correction it continues."""
    feeds = group.create("bad")
    key = group.store.keys.of("changefeed", "bad")
    wrong = structs.replace(group.store.snapshot().changefeeds["bad"], sink=f"tikv://{group.source.pd}")
    group.etcd.put(key, dump(wrong))
    with group.capture():
        failed = group.wait("it fails", lambda state: state.changefeeds["bad"].state is ChangefeedState.FAILED)
        assert "the same keyspace" in failed.changefeeds["bad"].error
        group.wait("its tasks are free", lambda state: holders(state) == {""})
        feeds.update("bad", lambda found: structs.replace(found, sink=f"tikv://{group.target.pd}"))
        feeds.resume("bad")
        group.source.raw().put(b"key", b"value")
        group.wait_until_equal()
        assert group.store.snapshot().changefeeds["bad"].state is ChangefeedState.NORMAL


def test_a_capture_that_the_group_forgot_joins_under_another_name(group: Group) -> None:
    """Its lease revoked, it ends what it does, and comes back as new; the work goes on."""
    group.create("again")
    raw = group.source.raw()
    with group.capture():
        before = group.wait("it works", lambda state: len(state.tasks) == 2 and "" not in holders(state))
        (name,) = before.captures
        group.etcd.revoke(before.items[group.store.keys.of("capture", name)].lease)
        after = group.wait("another works", lambda state: holders(state) and not holders(state) & {"", name})
        assert min(task.epoch for task in after.tasks.values()) == 2
        raw.put(b"key", b"value")
        group.wait_until_equal()


def test_without_etcd_nothing_is_written_and_nothing_lost(group: Group) -> None:
    """While etcd stands still for longer than the lease no capture writes; killed and started again it is missed by none."""
    group.create("alone")
    raw = group.source.raw()
    with group.capture(SHORT_LEASE):
        raw.put(b"before", b"1")
        group.wait_until_equal()
        group.server.process.send_signal(signal.SIGSTOP)
        time.sleep(SHORT_LEASE + 1)
        raw.put(b"while", b"2")
        time.sleep(2)
        assert b"while" not in contents(group.target)
        group.server.process.send_signal(signal.SIGCONT)
        group.wait_until_equal()
        group.server.kill()
        raw.put(b"between", b"3")
        group.server.start()
        raw.put(b"after", b"4")
        group.wait_until_equal()
        reached = group.store.snapshot().checkpoint_ts("alone")
        group.wait("it goes on", lambda state: state.checkpoint_ts("alone") > reached)
