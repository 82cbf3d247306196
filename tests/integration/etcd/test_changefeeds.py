"""Operations on changefeeds, in a real etcd, with a PD that only has safe points."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.pd import PdClient
from tikv_br.errors import (
    ChangefeedBusy,
    ChangefeedExists,
    ChangefeedNotFound,
    ClusterUnreachable,
    SafePointError,
    SyncStateDamaged,
)
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import (
    MAX_LEASE_SECONDS,
    CaptureInfo,
    ChangefeedInfo,
    ChangefeedState,
    ChangefeedTask,
    Progress,
    TaskId,
)
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.group.worker import CaptureOptions
from tikv_br.records import dump

CLUSTERS = itertools.count(3000)
FEED = ChangefeedInfo("feed", "blackhole://", 0, b"", b"", start_ts=1000, created_ms=5)


class SafePoints(PdClient):
    """PD's book of safe points."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.gc = 0

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """See `PdClient`."""
        if ttl_seconds:
            self.held[service_id] = safe_point
        else:
            self.held.pop(service_id, None)
        return self.gc

    def gc_safe_point(self) -> int:
        """See `PdClient`."""
        return self.gc


@pytest.fixture
def pd() -> SafePoints:
    """A PD."""
    return SafePoints()


@pytest.fixture
def store(etcd: Etcd) -> Iterator[GroupStore]:
    """A group of its own."""
    store = GroupStore(etcd, next(CLUSTERS))
    yield store
    etcd.delete(store.keys.root, prefix=True)


def run_a_task(store: GroupStore, capture: str, checkpoint_ts: int, write_timeout_ms: int = 2000) -> ChangefeedTask:
    """As an owner and a capture leave it: one task, held and on its way."""
    task = ChangefeedTask("feed", 0, FEED.range.start, FEED.range.end, capture, 1, write_timeout_ms=write_timeout_ms)
    store.etcd.put(store.keys.of("capture", capture), dump(CaptureInfo(capture, "", 1, "1")))
    store.etcd.put(store.keys.of("task", task.id), dump(task))
    store.etcd.put(
        store.keys.of("progress", task.id),
        dump(Progress(task.changefeed, task.number, checkpoint_ts, checkpoint_ts, 1, capture, 1)),
    )
    return task


def test_one_that_cannot_be_protected_leaves_nothing(store: GroupStore, pd: SafePoints) -> None:
    """If PD accepts the safe point, and then reports GC past it, both the safe point and the changefeed go."""
    pd.gc = FEED.start_ts + 1
    with pytest.raises(SafePointError):
        Changefeeds(store, pd).create(FEED)
    assert pd.held == {}
    assert store.snapshot().changefeeds == {}


def test_the_life_of_a_changefeed(store: GroupStore, pd: SafePoints) -> None:
    """Made with its safe point, paused and changed, resumed, and removed with all that was known of it."""
    changefeeds = Changefeeds(store, pd)
    changefeeds.create(FEED)
    assert store.snapshot().changefeeds == {"feed": FEED}
    assert pd.held == {"tikv-br-sync-feed": 999}
    with pytest.raises(ChangefeedExists, match="changefeed feed"):
        changefeeds.create(FEED)
    with pytest.raises(ChangefeedBusy, match="running"):
        changefeeds.update("feed", lambda found: structs.replace(found, concurrency=9))
    task = run_a_task(store, "", 2000)
    assert changefeeds.pause("feed").state is ChangefeedState.PAUSED
    assert pd.held == {"tikv-br-sync-feed": 1999}
    assert changefeeds.update("feed", lambda found: structs.replace(found, concurrency=9)).concurrency == 9
    assert changefeeds.resume("feed") == structs.replace(FEED, concurrency=9)
    changefeeds.remove("feed")
    assert store.snapshot().changefeeds == {}
    assert store.etcd.get(store.keys.of("task", task.id)) is None
    assert store.etcd.get(store.keys.of("progress", task.id)) is None
    assert pd.held == {}
    for gone in (changefeeds.pause, changefeeds.resume, changefeeds.remove):
        with pytest.raises(ChangefeedNotFound):
            gone("feed")


def test_starts_that_gc_has_passed_are_refused(store: GroupStore, pd: SafePoints) -> None:
    """A start that GC has passed leaves no changefeed behind; a checkpoint that it has passed is not resumed."""
    changefeeds = Changefeeds(store, pd)
    pd.gc = 1000
    with pytest.raises(SafePointError):
        changefeeds.create(FEED)
    assert store.snapshot().changefeeds == {}
    pd.gc = 0
    changefeeds.create(FEED)
    changefeeds.pause("feed")
    pd.gc = 1000
    with pytest.raises(SafePointError):
        changefeeds.resume("feed")
    assert store.snapshot().changefeeds["feed"].state is ChangefeedState.PAUSED


def test_a_failed_one_is_resumed_without_its_error(store: GroupStore, pd: SafePoints) -> None:
    """Resume is another try."""
    failed = structs.replace(FEED, state=ChangefeedState.FAILED, error="the sink is full")
    store.etcd.put(store.keys.of("changefeed", "feed"), dump(failed))
    assert Changefeeds(store, pd).resume("feed") == FEED


def test_a_name_is_of_one(store: GroupStore, pd: SafePoints) -> None:
    """The name of a plain sync is taken: both would move the same safe point."""
    store.etcd.put(store.keys.of("sync", "feed/owner"), b"")
    with pytest.raises(ChangefeedExists, match="sync feed"):
        Changefeeds(store, pd).create(FEED)
    assert pd.held == {}


def test_removal_waits_for_those_who_work(store: GroupStore, pd: SafePoints) -> None:
    """While a live capture holds a task nothing is forgotten; once it has let go, all is."""
    changefeeds = Changefeeds(store, pd)
    changefeeds.create(FEED)
    task = run_a_task(store, "one", 2000)
    with pytest.raises(ChangefeedBusy, match="still being stopped"):
        changefeeds.remove("feed", 0.0)
    state = store.snapshot()
    assert state.changefeeds["feed"].state is ChangefeedState.REMOVING
    assert state.tasks[TaskId("feed", 0)] == task
    assert pd.held
    with pytest.raises(ChangefeedBusy, match="being removed"):
        changefeeds.resume("feed")
    removal = threading.Thread(target=changefeeds.remove, args=("feed",))
    removal.start()
    store.etcd.put(store.keys.of("task", task.id), dump(dataclasses.replace(task, capture="")))
    removal.join(60)
    assert not removal.is_alive()
    assert (store.snapshot().changefeeds, pd.held) == ({}, {})


def test_a_changed_changefeed_is_not_removed(store: GroupStore, pd: SafePoints) -> None:
    """A task that a capture got since the last look keeps its changefeed."""
    Changefeeds(store, pd).create(FEED)
    run_a_task(store, "", 2000)
    seen = store.snapshot()
    run_a_task(store, "one", 2000)
    assert not store.discard(seen, "feed")
    assert store.discard(store.snapshot(), "feed")


def test_a_damaged_one_is_named_and_can_be_removed(store: GroupStore, pd: SafePoints) -> None:
    """No command works with it but its removal, which leaves nothing of it and nothing else undone."""
    slept: list[float] = []
    changefeeds = Changefeeds(store, pd, slept.append)
    for name in ("feed", "other"):
        changefeeds.create(structs.replace(FEED, id=name))
    task = run_a_task(store, "a", 2000)
    store.etcd.put(store.keys.of("task", task.id), b"?")
    for command in (changefeeds.pause, changefeeds.resume):
        with pytest.raises(SyncStateDamaged, match=store.keys.of("task", task.id)):
            command("feed")
    assert changefeeds.pause("other").state is ChangefeedState.PAUSED
    with pytest.raises(ChangefeedBusy, match="may still arrive for 91 s"):
        changefeeds.remove("feed", 5.0)
    changefeeds.remove("feed")
    assert slept == [91.0], (
        "somebody may hold the task whom etcd does not reach, and send something until his lease ends"
    )
    assert list(store.snapshot().changefeeds) == ["other"]
    assert store.etcd.get(store.keys.of("task", task.id)) is None
    assert list(pd.held) == ["tikv-br-sync-other"]


@pytest.mark.parametrize(
    ("lease", "holder", "wait"), [(2, "", 0.0), (2, "gone", 1.0 + 2 + 2), (MAX_LEASE_SECONDS, "gone", 1.0 + 60 + 30)]
)
def test_a_damaged_one_waits_for_who_holds_its_tasks(
    store: GroupStore, pd: SafePoints, tmp_path: Path, lease: int, holder: str, wait: float
) -> None:
    """They say who does, also when he is a member no more: until his lease has ended, and what he sent has arrived."""
    slept: list[float] = []
    changefeeds = Changefeeds(store, pd, slept.append)
    changefeeds.create(FEED)
    timeout = CaptureOptions(tmp_path, lease=lease).write_timeout
    task = run_a_task(store, holder, 2000, write_timeout_ms=round(1000 * timeout))
    store.etcd.put(store.keys.of("progress", task.id), b"?")
    changefeeds.remove("feed")
    assert slept == [wait]
    assert (store.snapshot().damaged, store.snapshot().changefeeds, pd.held) == ({}, {}, {})


def test_one_that_is_put_right_is_not_removed_as_a_damaged_one(store: GroupStore, pd: SafePoints) -> None:
    """If its task was repaired while the removal waited, the changefeed stays."""
    Changefeeds(store, pd).create(FEED)
    task = run_a_task(store, "one", 2000)
    store.etcd.put(store.keys.of("task", task.id), b"?")

    def put_right(_seconds: float) -> None:
        store.etcd.put(store.keys.of("task", task.id), dump(task))

    changefeeds = Changefeeds(store, pd, put_right)
    with pytest.raises(ChangefeedBusy, match="was changed"):
        changefeeds.remove("feed")
    assert store.snapshot().tasks == {task.id: task}
    assert pd.held


def test_one_that_is_damaged_while_it_is_removed_is_not_said_to_be_gone(store: GroupStore, pd: SafePoints) -> None:
    """An unreadable changefeed is not listed, but exists, as does its safe point."""
    Changefeeds(store, pd).create(FEED)
    task = run_a_task(store, "one", 2000)

    def damage(_seconds: float) -> None:
        store.etcd.put(store.keys.of("task", task.id), b"?")

    with pytest.raises(SyncStateDamaged, match=store.keys.of("task", task.id)):
        Changefeeds(store, pd, damage).remove("feed", 5.0)
    assert list(store.snapshot().damaged) == ["feed"]
    assert pd.held


def test_a_changefeed_can_be_paused_without_pd(
    store: GroupStore, pd: SafePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause does not wait for PD; to resume, PD must confirm that GC has waited."""

    def silent(*_: object) -> int:
        raise ClusterUnreachable("no PD answers")

    changefeeds = Changefeeds(store, pd)
    changefeeds.create(FEED)
    monkeypatch.setattr(pd, "update_service_safe_point", silent)
    assert changefeeds.pause("feed").state is ChangefeedState.PAUSED
    with pytest.raises(ClusterUnreachable):
        changefeeds.resume("feed")
    assert store.snapshot().changefeeds["feed"].state is ChangefeedState.PAUSED


def test_one_with_the_name_of_a_sync_is_removed_alone(store: GroupStore, pd: SafePoints) -> None:
    """No command makes one. Nobody works on it, and its removal keeps the safe point and the checkpoint of the sync."""
    sync = store.keys.of("sync", "feed/checkpoint")
    store.etcd.put(sync, b"of the sync")
    store.etcd.put(store.keys.of("changefeed", "feed"), dump(FEED))
    pd.held["tikv-br-sync-feed"] = 77
    assert "has the name of a sync" in store.snapshot().damaged["feed"]
    changefeeds = Changefeeds(store, pd)
    with pytest.raises(SyncStateDamaged, match="has the name of a sync"):
        changefeeds.resume("feed")
    changefeeds.remove("feed")
    assert (store.snapshot().damaged, pd.held) == ({}, {"tikv-br-sync-feed": 77})
    assert store.etcd.get(sync) is not None
