"""GC stays behind a changefeed, whichever service safe point holds it."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.unit.incremental.group.memory_etcd import MemoryEtcd
from tests.unit.incremental.group.states import SERVICE, SafePointBook, capture, changefeed
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import ChangefeedState
from tikv_br.incremental.group.owner import CaptureOwner
from tikv_br.incremental.group.store import GroupStore
from tikv_br.records import dump

FEED = structs.replace(changefeed("feed"), start_ts=1000)


@pytest.fixture
def pd() -> SafePointBook:
    """One that knows of no safe point."""
    return SafePointBook()


@pytest.fixture
def store() -> GroupStore:
    """A group of one capture, which is the owner."""
    store = GroupStore(MemoryEtcd(), 1)
    store.etcd.put(store.keys.of("owner", "one"), b"")
    store.etcd.put(store.keys.of("capture", "one"), dump(capture("one")))
    return store


@pytest.mark.parametrize(("gc_ttl", "kept"), [(0, 60), (59, 60), (61, 61)])
def test_no_gc_ttl_is_so_short_that_nothing_is_protected(
    store: GroupStore, pd: SafePointBook, gc_ttl: int, kept: int
) -> None:
    """From its creation on, and by its owner, a changefeed has a safe point, which 0 seconds would take away."""
    changefeeds = Changefeeds(store, pd)
    changefeeds.create(structs.replace(FEED, gc_ttl=gc_ttl))
    assert pd.held == {SERVICE: (999, kept)}
    pd.held.clear()
    CaptureOwner("one", store, pd).step()
    assert pd.held == {SERVICE: (999, kept)}
    changefeeds.pause("feed")
    assert pd.held == {SERVICE: (999, kept)}


def test_one_that_follows_a_removed_one_of_its_name_is_protected_at_once(store: GroupStore, pd: SafePointBook) -> None:
    """When the owner last renewed that of the other does not matter."""
    key, owner = store.keys.of("changefeed", "feed"), CaptureOwner("one", store, pd)
    store.etcd.put(key, dump(structs.replace(FEED, state=ChangefeedState.NORMAL)))
    owner.step()
    assert SERVICE in pd.held
    store.etcd.delete(store.keys.of("task", "feed/"), prefix=True)
    store.etcd.put(key, dump(structs.replace(FEED, state=ChangefeedState.REMOVING)))
    owner.step()
    assert (store.snapshot().changefeeds, pd.held) == ({}, {})
    store.etcd.put(key, dump(FEED))
    owner.step()
    assert SERVICE in pd.held


@pytest.mark.parametrize("ahead", [1, 1 << 40])
def test_checkpoint_in_the_future(store: GroupStore, pd: SafePointBook, ahead: int) -> None:
    """A status or start-ts that PD has not reached moves no safe point; the changefeed fails."""
    store.etcd.put(store.keys.of("changefeed", "feed"), dump(structs.replace(FEED, start_ts=pd.tso() + ahead)))
    CaptureOwner("one", store, pd).step()
    assert pd.held == {}
    failed = store.snapshot().changefeeds["feed"]
    assert failed.state is ChangefeedState.FAILED
    assert "in the future" in failed.error
