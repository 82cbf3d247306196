"""The flush of cached timestamps."""

from __future__ import annotations

import threading

import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import CLUSTER_ID, PD, FakeCluster
from tikv_br.cluster.cluster import Cluster, flush_request, flush_stores
from tikv_br.cluster.pb import brpb_pb2, errorpb_pb2, kvrpcpb_pb2, metapb_pb2, pdpb_pb2
from tikv_br.cluster.store import check_backup
from tikv_br.errors import RequestRefused, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion

BACKUP = "/backup.Backup/backup"


def cluster(fake: FakeCluster, version: ApiVersion = ApiVersion.V2) -> Cluster:
    """A cluster whose version is known."""
    found = Cluster.connect(fake.config())
    found.api_version = version
    return found


def test_the_request_reads_one_key_and_writes_nothing() -> None:
    """A range of one key in the default keyspace, to nowhere, in the store's own version; and the guard lets it pass."""
    request = flush_request(CLUSTER_ID)
    assert (request.start_key, request.end_key) == (b"r\0\0\0", b"r\0\0\0\0")
    assert request.storage_backend.WhichOneof("backend") == "noop"
    assert request.is_raw_kv
    assert request.dst_api_version == kvrpcpb_pb2.V2
    check_backup(request)


def test_every_store_that_is_up_is_flushed(fake: FakeCluster) -> None:
    """Also those that lead nothing; not those that are gone or TiFlash."""
    stores = [
        metapb_pb2.Store(id=1, address=fake.stores[1].address),
        metapb_pb2.Store(id=8, state=metapb_pb2.Tombstone),
        metapb_pb2.Store(id=9, labels=[metapb_pb2.StoreLabel(key="engine", value="tiflash")]),
    ]
    fake.pd.script(PD + "GetAllStores", pdpb_pb2.GetAllStoresResponse(stores=stores))
    fake.stores[1].script(BACKUP, [])
    cluster(fake).flush_timestamps()
    assert len(fake.stores[1].requests[BACKUP]) == 1


def test_v1_stores_get_no_request(fake: FakeCluster) -> None:
    """V1 stores have no timestamps; the request would be an error there."""
    cluster(fake, ApiVersion.V1TTL).flush_timestamps()
    assert not fake.stores[1].requests


def test_a_region_in_motion_does_not_matter(fake: FakeCluster) -> None:
    """The store has flushed before it finds that it does not lead the key."""
    error = brpb_pb2.Error(region_error=errorpb_pb2.Error(not_leader=errorpb_pb2.NotLeader()))
    fake.stores[1].script(BACKUP, [brpb_pb2.BackupResponse(error=error)])
    flush_stores([cluster(fake).store(1)], CLUSTER_ID, 1.0)


def test_any_other_error_is_told(fake: FakeCluster) -> None:
    """A store that refuses the request has not flushed."""
    error = brpb_pb2.Error(msg="invalid backup version, cur: V1, dst: V2")
    fake.stores[1].script(BACKUP, [brpb_pb2.BackupResponse(error=error)])
    with pytest.raises(RequestRefused, match="invalid backup version"):
        flush_stores([cluster(fake).store(1)], CLUSTER_ID, 1.0)


def test_a_store_that_has_lost_pds_leader_is_asked_again(fake: FakeCluster) -> None:
    """As some seconds after the leader's death: the store's stream of timestamps has ended, and it opens another."""
    error = brpb_pb2.Error(
        msg='Other("[components/backup/src/endpoint.rs:1155]: fail to flush causal ts, '
        'BatchRenew(\\"Pd unknown error ... TimestampRequest channel is closed\\")")'
    )
    fake.stores[1].script(BACKUP, [brpb_pb2.BackupResponse(error=error)], [])
    flush_stores([cluster(fake).store(1)], CLUSTER_ID, 2.0)
    assert len(fake.stores[1].requests[BACKUP]) == 2
    fake.stores[1].script(BACKUP, [brpb_pb2.BackupResponse(error=error)])
    with pytest.raises(RetryBudgetExhausted, match="TimestampRequest channel is closed"):
        flush_stores([cluster(fake).store(1)], CLUSTER_ID, 0.3)


def test_a_silent_store_that_pd_misses_too_is_left_out(fake: FakeCluster) -> None:
    """A dead store takes no writes and comes back with an empty cache; one that only we do not reach is an error."""
    store = cluster(fake).store(1)
    fake.stores[1].script(BACKUP, fail("UNAVAILABLE"))
    flush_stores([store], CLUSTER_ID, 0.5, lambda: {1})
    with pytest.raises(RetryBudgetExhausted):
        flush_stores([store], CLUSTER_ID, 0.5, lambda: {2})


def test_a_silent_store_is_tried_again_and_then_told(fake: FakeCluster) -> None:
    """One failure is survived; a store that stays silent ends the flush."""
    store = cluster(fake).store(1)
    fake.stores[1].script(BACKUP, fail("UNAVAILABLE"), [])
    flush_stores([store], CLUSTER_ID, 2.0)
    assert len(fake.stores[1].requests[BACKUP]) == 2
    fake.stores[1].script(BACKUP, fail("UNAVAILABLE"))
    with pytest.raises(RetryBudgetExhausted, match=r"flush of store 1 \("):
        flush_stores([store], CLUSTER_ID, 0.5)


def test_a_store_that_takes_the_request_and_never_answers_is_told(fake: FakeCluster) -> None:
    """A stream without a limit would wait for as long as the connection lives."""
    over = threading.Event()

    def answer(_request: bytes) -> list[brpb_pb2.BackupResponse]:
        over.wait(60)
        return []

    fake.stores[1].script(BACKUP, answer)
    try:
        with (
            Cluster.connect(fake.config(request_timeout=0.5)) as found,
            pytest.raises(RetryBudgetExhausted, match="DEADLINE_EXCEEDED"),
        ):
            flush_stores([found.store(1)], CLUSTER_ID, 0.1)
        assert not over.is_set()
    finally:
        over.set()
