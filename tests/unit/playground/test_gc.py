"""Twin of tikv_br/playground/pd_gc.py; the plain semantics are also replayed from recordings (tests/golden)."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.pd_gc import FOREVER, GC_WORKER, GcRefusal, GcState, ServiceSafePoint


def test_claims_expire(engine: RocksEngine) -> None:
    """A claim that is not renewed is gone after its TTL, and GC may pass."""
    clock = Clock()
    gc = GcState(engine, clock=clock)
    gc.update_service("br", 10, 100)
    gc.update_service(GC_WORKER, FOREVER, 500)
    clock.now += 9
    assert gc.update_service("x", 0, 0)[0] == "br"
    clock.now += 1
    assert gc.update_service("x", 0, 0) == (GC_WORKER, ServiceSafePoint(500, FOREVER))


def test_the_workers_claim_must_last(engine: RocksEngine) -> None:
    """gc_worker with a TTL is refused in PD's words."""
    with pytest.raises(GcRefusal, match="must be infinity"):
        GcState(engine).update_service(GC_WORKER, 100, 5)


def test_the_safe_point_only_rises_and_is_kept(engine: RocksEngine) -> None:
    """A smaller safe point changes nothing; claims and safe point outlive a restart."""
    gc = GcState(engine)
    assert [gc.advance(50), gc.advance(20), gc.advance(0)] == [50, 50, 50]
    gc.update_service("br", 1000, 70)
    again = GcState(engine)
    assert again.safe_point == 50
    assert again.services()["br"].ts == 70


def test_barriers_of_newer_pds(engine: RocksEngine) -> None:
    """With barriers PD always answers with gc_worker's point, which barriers hold back; sets behind it are refused."""
    gc = GcState(engine, barriers=True)
    gc.set_barrier("b", 100, 300)
    assert gc.update_service("br", 300, 200) == (GC_WORKER, ServiceSafePoint(0, FOREVER))
    assert gc.update_service(GC_WORKER, FOREVER, 500) == (GC_WORKER, ServiceSafePoint(100, FOREVER))
    with pytest.raises(GcRefusal, match="txn safe point 100"):
        gc.advance(101)
    assert gc.advance(100) == 100
    with pytest.raises(GcRefusal, match="behind the txn safe point 100"):
        gc.set_barrier("late", 99, 300)
    removed = gc.delete_barrier("b")
    assert removed is not None
    assert removed.ts == 100
    assert gc.update_service(GC_WORKER, FOREVER, 500)[1].ts == 200
    with pytest.raises(GcRefusal, match="reserved"):
        gc.set_barrier(GC_WORKER, 1000, 10)


def test_global_barriers_and_those_of_keyspaces(engine: RocksEngine) -> None:
    """A global one holds the cluster's GC until it expires, one of a keyspace does not; both outlive a restart."""
    clock = Clock()
    gc = GcState(engine, barriers=True, clock=clock)
    gc.set_other_barrier("audit", 100, 10, None)
    gc.set_other_barrier("job", 50, 300, 7)
    assert gc.update_service(GC_WORKER, FOREVER, 500)[1].ts == 100
    with pytest.raises(GcRefusal, match="behind the txn safe point 100"):
        gc.set_other_barrier("late", 99, 300, None)
    assert set(GcState(engine, barriers=True, clock=clock).other_barriers()) == {("audit", None), ("job", 7)}
    clock.now += 10
    assert gc.update_service(GC_WORKER, FOREVER, 500)[1].ts == 500
    assert set(gc.other_barriers()) == {("job", 7)}
