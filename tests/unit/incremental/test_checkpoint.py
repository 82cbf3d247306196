from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damage import FLIPS
from tests.support.faulty_store import FaultyStore
from tests.unit.incremental.checkpoint_suite import CheckpointSuite, at, owner
from tikv_br.errors import StorageUnreachable, SyncStateDamaged, UsageError
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A state directory."""
    return open_store(parse(f"local://{tmp_path}"))


class TestDirectory(CheckpointSuite):
    """A state directory."""

    flips = FLIPS

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """See `CheckpointSuite.store`."""
        return open_store(parse(f"local://{tmp_path}"))


def save_all(checkpoints: ObjectCheckpoints, saved: list[int]) -> None:
    """Claim and save, noting what was confirmed."""
    checkpoints.claim()
    for ts in (20, 30, 40, 50):
        checkpoints.save(at(ts))
        saved.append(ts)


@pytest.mark.parametrize("script", [".b", ".a", "..b", "..a", "...b", "...a"])
def test_a_failure_at_any_write_loses_nothing(store: ObjectStore, script: str) -> None:
    """Whichever write fails, before or after its effect, the next owner finds the newest or the one before."""
    owner(store).save(at(10))
    second = ObjectCheckpoints(FaultyStore(store, script), "one")
    saved = [10]
    with pytest.raises(StorageUnreachable):
        save_all(second, saved)
    third = owner(store)
    found = third.load()
    assert found is not None
    assert found.checkpoint_ts in {saved[-1], saved[-1] + 10}
    third.save(at(60))
    left = sorted(info.name.partition("-")[0] for info in store.list())
    assert left == ["one/checkpoint", "one/epoch"]


@pytest.mark.parametrize("sign", ["b", "a"])
def test_a_claim_whose_answer_is_lost_is_repeated(store: ObjectStore, sign: str) -> None:
    """The epoch is there and ours, or is created by the second request."""
    owner(store).save(at(10))
    saved = [10]
    save_all(ObjectCheckpoints(FaultyStore(store, sign), "one"), saved)
    found = owner(store).load()
    assert found is not None
    assert found.checkpoint_ts == saved[-1]


def test_a_listing_during_a_takeover_finds_a_checkpoint(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that looks for the old owner's file after it is gone, and for the new owner's before it is there."""
    owner(store).save(at(10))
    listings = [iter(()), store.list("one")]
    monkeypatch.setattr(type(store), "list", lambda *_: listings.pop(0))
    assert ObjectCheckpoints(store, "one").load() == at(10, epoch=1)


def test_damage_is_said(store: ObjectStore) -> None:
    """A checkpoint that was altered is not believed."""
    owner(store).save(at(10))
    data = store.get("one/checkpoint-0000000001.json")
    store.put("one/checkpoint-0000000001.json", data.replace(b'"checkpoint_ts":10', b'"checkpoint_ts":11'))
    with pytest.raises(SyncStateDamaged, match="checkpoint-0000000001"):
        owner(store).load()


@pytest.mark.parametrize("name", ["", "a b", "-a", "a--b", "a/b", "../x", "x" * 129])
def test_an_id_must_be_one(store: ObjectStore, name: str) -> None:
    """An id names a folder and a safe point: it is plain."""
    with pytest.raises(UsageError):
        ObjectCheckpoints(store, name)
