"""The checkpoint of a sync in a real etcd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from tikv_br.cluster.etcd import Etcd
from tikv_br.errors import SyncFenced, SyncStateDamaged, UsageError
from tikv_br.incremental.checkpoint import Checkpoint, EtcdCheckpoints
from tikv_br.incremental.group.model import Keys

CLUSTER = 2002


def at(name: str, ts: int) -> Checkpoint:
    """A checkpoint."""
    return Checkpoint(name, ts, ts + 5, 0, 1000 + ts, "a to b")


def owner(etcd: Etcd, name: str) -> EtcdCheckpoints:
    """One who has claimed that sync."""
    checkpoints = EtcdCheckpoints(etcd, CLUSTER, name)
    checkpoints.claim()
    return checkpoints


def test_a_restart_finds_what_was_saved_last(etcd: Etcd) -> None:
    """None before the first; then the last, from any process; a later owner has a higher epoch."""
    first = owner(etcd, "one")
    assert first.load() is None
    first.save(at("one", 10))
    first.save(at("one", 20))
    second = EtcdCheckpoints(etcd, CLUSTER, "one")
    epoch = second.claim()
    found = second.load()
    assert found is not None
    assert structs.replace(found, epoch=0) == at("one", 20)
    assert 0 < found.epoch < epoch
    second.save(at("one", 30))
    assert owner(etcd, "other").load() is None
    assert EtcdCheckpoints(etcd, CLUSTER + 1, "one").load() is None


def test_a_checkpoint_in_another_s_place_is_none(etcd: Etcd) -> None:
    """Two syncs whose checkpoints were swapped resume from neither."""
    keys = [Keys(CLUSTER).of("sync", f"{name}/checkpoint") for name in ("left", "right")]
    for name, ts in (("left", 10), ("right", 90)):
        owner(etcd, name).save(at(name, ts))
    left, right = (etcd.get(key) for key in keys)
    assert left is not None
    assert right is not None
    etcd.put(keys[0], right.value)
    etcd.put(keys[1], left.value)
    for name in ("left", "right"):
        with pytest.raises(SyncStateDamaged, match=f"sync/{name}/checkpoint"):
            owner(etcd, name).load()


def test_a_fenced_owner_writes_nothing(etcd: Etcd) -> None:
    """Of eight concurrent claims the last can save; the others get an error, as does a process without a claim."""
    several = [EtcdCheckpoints(etcd, CLUSTER, "fenced") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(lambda each: each.claim(), several))
    assert len(set(epochs)) == 8
    several[epochs.index(max(epochs))].save(at("fenced", 50))
    for epoch, each in zip(epochs, several, strict=True):
        if epoch != max(epochs):
            with pytest.raises(SyncFenced, match=str(epoch)):
                each.save(at("fenced", 99))
    with pytest.raises(SyncFenced):
        EtcdCheckpoints(etcd, CLUSTER, "fenced").save(at("fenced", 99))
    found = several[0].load()
    assert found is not None
    assert found.checkpoint_ts == 50


def test_foreign_and_invalid_names_are_refused(etcd: Etcd) -> None:
    """An invalid name, the name of a changefeed, and an altered checkpoint."""
    with pytest.raises(UsageError, match="is not a valid id"):
        EtcdCheckpoints(etcd, CLUSTER, "a/b")
    keys = Keys(CLUSTER)
    etcd.put(keys.of("changefeed", "taken"), b"")
    with pytest.raises(UsageError, match="id taken is in use"):
        owner(etcd, "taken")
    owner(etcd, "damaged").save(at("damaged", 10))
    [item] = [item for item in etcd.range(keys.of("sync", "damaged/")).items if item.key.endswith("checkpoint")]
    etcd.put(item.key, item.value.replace(b'"checkpoint_ts":10', b'"checkpoint_ts":11'))
    with pytest.raises(SyncStateDamaged, match="damaged"):
        owner(etcd, "damaged").load()
