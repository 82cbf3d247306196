"""The region cache against a plain model."""

from __future__ import annotations

import random

import pytest

from tests.unit.cluster.fakes import region
from tikv_br.cluster.pb import kvrpcpb_pb2, metapb_pb2
from tikv_br.cluster.regions import Peer, Region, RegionCache
from tikv_br.errors import ClusterUnreachable
from tikv_br.formats.api_version import ApiVersion


def make(region_id: int, start: bytes, end: bytes, version: int = 1) -> Region:
    """A region on stores 1 and 2, led by store 1."""
    return Region.of(region(region_id, start, end, (1, 2), version))


def no_fetch(bound: bytes) -> Region:
    """PD that must not be asked."""
    raise ClusterUnreachable(f"asked for {bound!r}")


def test_a_region_is_fetched_once() -> None:
    """Keys of a known region cost no call; a key beyond it costs one."""
    asked: list[bytes] = []

    def fetch(bound: bytes) -> Region:
        asked.append(bound)
        return make(1, b"", b"m") if bound < b"m" else make(2, b"m", b"")

    cache = RegionCache(fetch)
    found = [cache.locate(key).id for key in (b"", b"a", b"lzzz", b"m", b"z", b"\xff" * 20)]
    assert found == [1, 1, 1, 2, 2, 2]
    assert asked == [b"", b"m"]


def test_random_updates_agree_with_a_list() -> None:
    """After any sequence of updates and removals, each key is found where a linear search finds it."""
    chance = random.Random(3)
    cache = RegionCache(no_fetch)
    model: list[Region] = []
    for step in range(500):
        low = chance.randrange(240)
        start = bytes([low]) if chance.random() < 0.95 else b""
        end = bytes([low + chance.randrange(1, 15)]) if chance.random() < 0.95 else b""
        added = make(chance.randrange(40), start, end, step)
        model = [each for each in model if each.id != added.id and not each.overlaps(added)] + [added]
        cache.update([added])
        if chance.random() < 0.2:
            gone = chance.choice(model)
            model.remove(gone)
            cache.invalidate(gone.id)
        for key in (bytes([at]) for at in range(0, 256, 5)):
            expected = [each for each in model if each.contains(key)]
            if expected:
                assert cache.locate(key) == expected[0]
            else:
                with pytest.raises(ClusterUnreachable):
                    cache.locate(key)


def test_a_leader_switch_keeps_the_region() -> None:
    """A known peer becomes the leader; an unknown one means that our picture is too old."""
    cache = RegionCache(no_fetch)
    cache.update([make(1, b"", b"")])
    cache.switch_leader(1, Peer(12, 2))
    assert cache.locate(b"k").leader == Peer(12, 2)
    cache.switch_leader(1, Peer(99, 9))
    with pytest.raises(ClusterUnreachable):
        cache.locate(b"k")


def test_without_a_leader_the_first_voter_is_guessed() -> None:
    """PD may not know the leader of a region; a learner never is one."""
    meta = region(1, b"", b"", (1, 2))
    meta.peers[0].role = metapb_pb2.Learner
    assert Region.of(meta).leader.store_id == 2
    assert Region.of(meta, metapb_pb2.Peer()).leader.store_id == 2


@pytest.mark.parametrize(
    ("version", "sent"),
    [(ApiVersion.V1, kvrpcpb_pb2.V1), (ApiVersion.V1TTL, kvrpcpb_pb2.V1), (ApiVersion.V2, kvrpcpb_pb2.V2)],
)
def test_the_context_names_region_and_version(version: ApiVersion, sent: int) -> None:
    """A V1TTL store wants to be called V1; region, epoch, peer and cluster go along."""
    context = make(4, b"", b"", 7).context(version, 77)
    assert context.api_version == sent
    assert (context.region_id, context.region_epoch.version, context.region_epoch.conf_ver) == (4, 7, 1)
    assert (context.peer.id, context.peer.store_id, context.cluster_id) == (41, 1, 77)
