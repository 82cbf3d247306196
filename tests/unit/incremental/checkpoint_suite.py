"""Behaviour of checkpoints in every kind of object store: subclass `CheckpointSuite`, give it `store`, and all of it runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from tests.support.damage import Case, cases
from tikv_br.errors import SyncFenced, SyncStateDamaged
from tikv_br.incremental.checkpoint import Checkpoint, ObjectCheckpoints
from tikv_br.storage.base import ObjectStore


def at(ts: int, epoch: int = 0) -> Checkpoint:
    """A checkpoint of sync ``one``."""
    return Checkpoint("one", ts, ts + 5, epoch, 1000 + ts, "a to b")


def owner(store: ObjectStore) -> ObjectCheckpoints:
    """One who has claimed sync ``one``."""
    checkpoints = ObjectCheckpoints(store, "one")
    checkpoints.claim()
    return checkpoints


def damaged(store: ObjectStore, objects: dict[str, bytes], older: dict[str, bytes], flips: int) -> Iterator[Case]:
    """Every damage to ``objects``, while it is done to the store."""
    for case in cases(objects, older, lambda _kind: flips):
        for name, data in case.change.items():
            if data is None:
                store.delete(name)
            else:
                store.put(name, data)
        yield case
        for name in case.change:
            store.put(name, objects[name])


class CheckpointSuite:
    """Conformance tests, each on an empty store."""

    flips = 5
    """Bits that are turned over in each kind of object."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty place for state."""
        raise NotImplementedError

    def test_a_restart_finds_what_was_saved_last(self, store: ObjectStore) -> None:
        """None before the first; then the last, from any process; syncs of other names have their own."""
        first = owner(store)
        assert first.load() is None
        first.save(at(10))
        first.save(at(20))
        second = owner(store)
        assert second.load() == at(20, epoch=1)
        second.save(at(30))
        assert owner(store).load() == at(30, epoch=2)
        assert ObjectCheckpoints(store, "other").load() is None

    def test_a_fenced_owner_cannot_move_the_checkpoint(self, store: ObjectStore) -> None:
        """After a claim the previous owner gets an error at its next save, and nothing of it is read."""
        first = owner(store)
        first.save(at(10))
        second = owner(store)
        with pytest.raises(SyncFenced, match=r"another process has taken over .*: the epoch is 2, this process had 1"):
            first.save(at(99))
        assert second.load() == at(10, epoch=1)

    def test_a_write_under_way_during_a_takeover_does_not_count(self, store: ObjectStore) -> None:
        """Late writes of the previous owner are not read, not even by the owner after the next."""
        first = owner(store)
        second = owner(store)
        second.save(at(50))
        store.put("one/checkpoint-0000000001.json", b"of the owner before, too late")
        assert owner(store).load() == at(50, epoch=2)
        assert first.load() == at(50, epoch=2)

    def test_saving_without_a_claim_is_refused(self, store: ObjectStore) -> None:
        """Nobody writes who does not own."""
        with pytest.raises(SyncFenced):
            ObjectCheckpoints(store, "one").save(at(1))

    def test_of_many_at_once_each_gets_an_epoch_of_its_own_and_one_is_left(self, store: ObjectStore) -> None:
        """Eight begin together: epochs differ, and exactly the highest can save."""
        several = [ObjectCheckpoints(store, "one") for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            epochs = list(pool.map(lambda each: each.claim(), several))
        assert len(set(epochs)) == 8
        for epoch, each in zip(epochs, several, strict=True):
            if epoch == max(epochs):
                each.save(at(epoch))
            else:
                with pytest.raises(SyncFenced):
                    each.save(at(epoch))

    def test_damage_is_said_and_never_taken_for_a_checkpoint(self, store: ObjectStore) -> None:
        """Swapped, older and missing checkpoints are what they are by content, and marks count by name only."""
        syncs = [ObjectCheckpoints(store, name) for name in ("one", "two")]
        for number, sync in enumerate(syncs):
            sync.claim()
            sync.save(structs.replace(at(10 + number), changefeed_id=("one", "two")[number]))
        older = {info.name: store.get(info.name) for info in list(store.list())}
        for number, sync in enumerate(syncs):
            sync.save(structs.replace(at(20 + number), changefeed_id=("one", "two")[number]))
        objects = {info.name: store.get(info.name) for info in list(store.list())}
        sound, seen = [sync.load() for sync in syncs], set()
        for case in damaged(store, objects, older, self.flips):
            seen.add((case.kind, case.damage))
            if case.kind == "sync epoch":
                assert [sync.load() for sync in syncs] == sound, str(case)
                continue
            number = ("one", "two").index(case.name.partition("/")[0])
            if case.damage == "missing":
                assert syncs[number].load() is None
            elif case.damage == "older":
                assert syncs[number].load() == structs.replace(at(10 + number, 1), changefeed_id=("one", "two")[number])
            else:
                with pytest.raises(SyncStateDamaged, match=case.name) as caught:
                    syncs[number].load()
                assert caught.value.exit_code == 72
        every = {"missing", "empty", "truncated", "short of a byte", "swapped", "flipped"}
        assert {damage for kind, damage in seen if kind == "sync checkpoint"} == {*every, "older"}
        assert {damage for kind, damage in seen if kind == "sync epoch"} == every
