"""The checkpoint of a task in a real etcd: who may save it, and what a lost answer does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Put, created_at, unchanged
from tikv_br.errors import SyncFenced
from tikv_br.incremental.checkpoint import Checkpoint
from tikv_br.incremental.group.model import CaptureInfo, ChangefeedTask
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.group.worker import TaskCheckpoints
from tikv_br.records import dump

START_TS = 100


class Holder:
    """A capture with a task, as the owner gave it."""

    def __init__(self, store: GroupStore, name: str, epoch: int) -> None:
        self.store = store
        self.task = ChangefeedTask("feed", 0, b"a", b"b", name, epoch)
        self._key = store.keys.of("capture", name)
        self.info = dump(CaptureInfo(name, "", 1, "1"))
        put = [Put(store.keys.of("task", self.task.id), dump(self.task)), Put(self._key, self.info)]
        assert store.etcd.transact([], put).succeeded
        seen = {item.key: item for item in store.etcd.range(store.keys.root).items}
        self.checkpoints = TaskCheckpoints(
            store,
            self.task,
            START_TS,
            present=created_at(self._key, seen[self._key].create_revision),
            assigned=unchanged(seen[store.keys.of("task", self.task.id)]),
        )

    def save(self, ts: int) -> None:
        """A checkpoint."""
        self.checkpoints.save(Checkpoint("feed/0", ts, ts + 5, self.task.epoch, 1))

    def leave(self) -> None:
        """Its lease ends."""
        self.store.etcd.delete(self._key)


@pytest.fixture
def store(etcd: Etcd, request: pytest.FixtureRequest) -> GroupStore:
    """A group of its own for each test."""
    return GroupStore(etcd, abs(hash(request.node.name)) % (1 << 40))


def saved(store: GroupStore) -> tuple[int, int, str]:
    """Checkpoint, epoch and capture."""
    (found,) = store.snapshot().progress.values()
    return found.checkpoint_ts, found.epoch, found.capture


def test_it_begins_at_the_start_and_follows_from_holder_to_holder(store: GroupStore) -> None:
    """The next holder goes on where the last one was; figures and troubles stand beside it."""
    one = Holder(store, "one", 1)
    assert one.checkpoints.claim() == 1
    assert one.checkpoints.load().checkpoint_ts == START_TS
    one.save(200)
    assert saved(store) == (200, 1, "one")
    one.checkpoints.save_error("the sink is away")
    (reported,) = store.snapshot().progress.values()
    assert (reported.checkpoint_ts, reported.error) == (200, "the sink is away")
    two = Holder(store, "two", 2)
    two.checkpoints.claim()
    assert two.checkpoints.load().checkpoint_ts == 200
    two.save(300)
    assert saved(store) == (300, 2, "two")
    with pytest.raises(SyncFenced):
        one.save(250)
    assert saved(store) == (300, 2, "two")


def test_a_capture_without_membership_saves_nothing(store: GroupStore) -> None:
    """Also if nobody else has the task yet, and if the key of the capture was created again."""
    one = Holder(store, "one", 1)
    one.checkpoints.claim()
    one.save(200)
    one.leave()
    for _again in range(2):
        with pytest.raises(SyncFenced):
            one.save(300)
        store.etcd.put(store.keys.of("capture", "one"), one.info)
    assert saved(store) == (200, 1, "one")


def test_a_task_that_has_changed_since_is_not_claimed(store: GroupStore) -> None:
    """The owner wants it back before it was begun."""
    one = Holder(store, "one", 1)
    store.etcd.put(store.keys.of("task", one.task.id), dump(replace(one.task, stopping=True)))
    with pytest.raises(SyncFenced):
        one.checkpoints.claim()
    assert store.snapshot().progress == {}


def test_an_answer_that_got_lost_does_not_fence_its_writer(store: GroupStore) -> None:
    """A save with a lost answer is recognized as ours, and the task continues."""
    one = Holder(store, "one", 1)
    one.checkpoints.claim()
    key = store.keys.of("progress", one.task.id)
    ours = structs.replace(next(iter(store.snapshot().progress.values())), checkpoint_ts=150)
    store.etcd.put(key, dump(ours))
    one.save(200)
    assert saved(store) == (200, 1, "one")
