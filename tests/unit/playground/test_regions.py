"""Twin of tikv_br/playground/regions.py (with region.py and region_errors.py)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tikv_br.cluster.pb import kvrpcpb_pb2, metapb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.request_checks import check_region

KEYS = st.binary(min_size=1, max_size=3)


def table_of(engine: RocksEngine, stores: int = 3) -> RegionTable:
    """A bootstrapped table: stores 1, 4 and 5, region 2."""
    table = RegionTable(engine)
    table.clear()
    first = table.alloc_id()
    table.bootstrap(first)
    for _ in range(1, stores):
        table.add_peer(2, table.alloc_id())
    return table


def context(region: Region, store_id: int, **changes: int) -> kvrpcpb_pb2.Context:
    """A request's context for a region's peer on a store, with changes to peer_id, version and conf_ver."""
    peer = region.peer_on(store_id)
    return kvrpcpb_pb2.Context(
        region_id=region.id,
        peer=metapb_pb2.Peer(id=changes.get("peer_id", peer.id if peer else 0), store_id=store_id),
        region_epoch=metapb_pb2.RegionEpoch(
            conf_ver=changes.get("conf_ver", region.conf_ver), version=changes.get("version", region.version)
        ),
    )


def test_bootstrap_as_pd_does(engine: RocksEngine) -> None:
    """The ids of a new cluster are those of a real one: store 1, region 2, peer 3; each replica adds 2 to conf_ver."""
    [region] = table_of(engine).all()
    assert (region.id, region.leader.id, region.leader_store) == (2, 3, 1)
    assert (region.conf_ver, region.version) == (5, 1)
    assert (region.start, region.end) == (b"", b"")


def test_split_is_right_derived(engine: RocksEngine) -> None:
    """The original id keeps the rightmost piece, all pieces get the version plus the number of new ones, peers ids."""
    table = table_of(engine)
    pieces = table.split(2, [b"m", b"c", b"m"])
    assert [(piece.start, piece.end) for piece in pieces] == [(b"", b"c"), (b"c", b"m"), (b"m", b"")]
    assert [piece.version for piece in pieces] == [3, 3, 3]
    assert pieces[-1].id == 2
    ids = [number for piece in pieces for number in (piece.id, *(peer.id for peer in piece.peers))]
    assert len(set(ids)) == len(ids)
    assert {piece.leader_store for piece in pieces} == {1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(keys=st.lists(KEYS, max_size=20), probes=st.lists(st.binary(max_size=4), max_size=10))
def test_regions_cover_all_keys_once(engine: RocksEngine, keys: list[bytes], probes: list[bytes]) -> None:
    """After any splits the regions join without hole or overlap, and every lookup agrees with a linear search."""
    table = table_of(engine)
    for key in keys:
        table.split(table.locate(key).id, [key])
    regions = table.all()
    assert [region.end for region in regions[:-1]] == [region.start for region in regions[1:]] == sorted(set(keys))
    for probe in probes:
        [holder] = [region for region in regions if region.contains(probe)]
        assert table.locate(probe) == holder
        left = regions[regions.index(holder) - 1] if holder != regions[0] else None
        assert table.previous(probe) == left
    for start, end in itertools.pairwise(probes):
        met = [each for each in regions if (not each.end or start < each.end) and (not end or each.start < end)]
        if not end or start < end:
            assert table.overlapping(start, end) == met
            assert table.overlapping(start, end, 2) == met[:2]
    assert RegionTable(engine).all() == regions


def test_merge_needs_neighbours_and_raises_the_version(engine: RocksEngine) -> None:
    """The target swallows its neighbour from either side; others are refused."""
    table = table_of(engine)
    left, middle, right = table.split(2, [b"c", b"m"])
    with pytest.raises(PlaygroundError, match="no neighbours"):
        table.merge(left.id, right.id)
    merged = table.merge(right.id, middle.id)
    assert (merged.id, merged.start, merged.end, merged.version) == (middle.id, b"c", b"", 4)
    assert table.all() == [left, merged]
    assert RegionTable(engine).all() == [left, merged]


def test_leader_transfer_and_move(engine: RocksEngine) -> None:
    """Any store with a peer may lead; a moved peer gets a new id and adds 2 to conf_ver; listeners hear of leaders."""
    table = table_of(engine)
    heard: list[int] = []
    table.on_new_leader(lambda region: heard.append(region.leader_store))
    assert table.transfer_leader(2, 4).leader_store == 4
    table.transfer_leader(2, 4)
    with pytest.raises(PlaygroundError, match="no peer on store 99"):
        table.transfer_leader(2, 99)
    old = table.all()[0]
    moved = table.move(2, 4, 99)
    assert moved.leader_store == 99
    assert moved.conf_ver == old.conf_ver + 2
    assert moved.peer_on(4) is None
    assert heard == [4, 99]
    with pytest.raises(PlaygroundError, match="cannot move"):
        table.move(2, 1, 99)


def test_a_new_leader_is_not_synced(engine: RocksEngine) -> None:
    """Leader transfers leave a region unsynced until it is marked, and a split hands that on."""
    table = table_of(engine)
    assert table.is_synced(2)
    table.transfer_leader(2, 4)
    assert not table.is_synced(2)
    heard: list[int] = []
    table.on_new_leader(lambda region: heard.append(region.id))
    left, right = table.split(2, [b"m"])
    assert heard == [left.id, right.id]  # each of them is to be synced
    assert not table.is_synced(left.id)
    table.mark_synced(right.id)
    assert table.is_synced(right.id)


def test_order_of_checks(engine: RocksEngine) -> None:
    """Store, region, peer, epoch, leader for reads; the leader comes before peer and epoch for writes."""
    table = table_of(engine)
    [region] = table.all()
    assert check_region(table, context(region, 1), 1) is None

    def kinds(asked: kvrpcpb_pb2.Context, store_id: int, *, read: bool) -> set[str]:
        error = check_region(table, asked, store_id, read=read)
        assert error is not None
        return {field.name for field, _ in error.ListFields()} - {"message"}

    wrong = context(region, 4, peer_id=77, version=9)
    for read in (True, False):
        assert kinds(wrong, 5, read=read) == {"store_not_match"}
        assert kinds(kvrpcpb_pb2.Context(region_id=9, peer=wrong.peer), 4, read=read) == {"region_not_found"}
    assert kinds(wrong, 4, read=True) == {"mismatch_peer_id"}
    assert kinds(wrong, 4, read=False) == {"not_leader"}
    assert kinds(context(region, 4, version=9), 4, read=True) == {"epoch_not_match"}
    assert kinds(context(region, 4), 4, read=True) == {"not_leader"}
    assert kinds(context(region, 1, peer_id=77, version=9), 1, read=False) == {"mismatch_peer_id"}


def test_the_hint_at_a_dead_leader_is_left_out(engine: RocksEngine) -> None:
    """A follower does not send callers to a store that is down."""
    table = table_of(engine)
    [region] = table.all()
    alive = check_region(table, context(region, 4), 4)
    table.set_store_down(1, down=True)
    dead = check_region(table, context(region, 4), 4)
    assert alive is not None
    assert dead is not None
    assert alive.not_leader.leader.store_id == 1
    assert not dead.not_leader.HasField("leader")


def test_ids_are_never_given_twice(engine: RocksEngine) -> None:
    """Ids go on after a restart."""
    table = table_of(engine)
    last = table.alloc_id(10)
    assert RegionTable(engine).alloc_id() == last + 1
