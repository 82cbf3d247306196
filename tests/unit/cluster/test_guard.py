"""Requests that would kill a store are refused, and none of their bytes is sent."""

from __future__ import annotations

import uuid

import pytest

from tests.unit.cluster.fakes import FakeCluster
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2, kvrpcpb_pb2, metapb_pb2
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import DangerousRequest
from tikv_br.formats.api_version import ApiVersion


@pytest.fixture
def store(fake: FakeCluster) -> StoreClient:
    """The client of a scripted store; it answers nothing, so a request that is sent fails otherwise."""
    return Cluster.connect(fake.config()).store(1)


def backup(start: bytes, end: bytes, *, raw: bool = True) -> brpb_pb2.BackupRequest:
    """A Backup to nowhere."""
    return brpb_pb2.BackupRequest(start_key=start, end_key=end, is_raw_kv=raw)


def sst(**changes: object) -> import_sstpb_pb2.SSTMeta:
    """A sound SST's description."""
    values: dict[str, object] = {
        "uuid": uuid.uuid4().bytes,
        "cf_name": "default",
        "region_id": 1,
        "region_epoch": metapb_pb2.RegionEpoch(conf_ver=1, version=1),
        "range": import_sstpb_pb2.Range(start=b"a", end=b"b"),
    }
    return import_sstpb_pb2.SSTMeta(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_",
    [
        backup(b"k", b"k"),
        backup(b"l", b"k"),
        backup(b"a", b"b", raw=False),
        brpb_pb2.BackupRequest(is_raw_kv=True, sub_ranges=[kvrpcpb_pb2.KeyRange(start_key=b"k", end_key=b"k")]),
    ],
)
def test_backups_that_abort_a_store_are_refused(store: StoreClient, request_: brpb_pb2.BackupRequest) -> None:
    """No range, a reversed range, no range in a part, or no is_raw_kv."""
    with pytest.raises(DangerousRequest):
        store.backup(request_)


def test_backups_without_bounds_are_fine(fake: FakeCluster, store: StoreClient) -> None:
    """Both ends empty is the whole of V1, not a range of nothing."""
    fake.stores[1].script("/backup.Backup/backup", [brpb_pb2.BackupResponse(start_key=b"a"), brpb_pb2.BackupResponse()])
    assert [answer.start_key for answer in store.backup(backup(b"", b""))] == [b"a", b""]


def test_get_ttl_is_never_sent_to_a_store_without_ttl(store: StoreClient) -> None:
    """It would panic."""
    with pytest.raises(DangerousRequest):
        store.raw_get_key_ttl(kvrpcpb_pb2.RawGetKeyTTLRequest(key=b"k"), ApiVersion.V1)


@pytest.mark.parametrize(
    "meta",
    [
        sst(cf_name="lock"),
        sst(cf_name=""),
        sst(uuid=b"short"),
        sst(range=import_sstpb_pb2.Range(start=b"b", end=b"a")),
        sst(region_id=0),
        sst(region_epoch=None),
    ],
)
def test_ssts_that_an_importer_trusts_blindly_are_refused(store: StoreClient, meta: import_sstpb_pb2.SSTMeta) -> None:
    """A wrong family, UUID, range or region is refused in every call that carries it."""
    with pytest.raises(DangerousRequest):
        store.download(import_sstpb_pb2.DownloadRequest(sst=meta))
    with pytest.raises(DangerousRequest):
        store.ingest(import_sstpb_pb2.IngestRequest(sst=meta))
    with pytest.raises(DangerousRequest):
        store.upload(meta, [b"data"], verified=True)


def test_unverified_bytes_are_never_uploaded(store: StoreClient) -> None:
    """A store finds a flipped byte only when it dies of it."""
    with pytest.raises(DangerousRequest, match="unverified"):
        store.upload(sst(), [b"data"], verified=False)


def test_an_upload_is_a_description_and_chunks(fake: FakeCluster, store: StoreClient) -> None:
    """The description comes first, then the bytes in order; empty chunks are left out."""
    method = "/import_sstpb.ImportSST/Upload"
    fake.stores[1].script(method, import_sstpb_pb2.UploadResponse())
    meta = sst()
    store.upload(meta, [b"one", b"", b"two"], verified=True)
    seen = fake.stores[1].seen(method, import_sstpb_pb2.UploadRequest)
    assert seen[0].meta == meta
    assert [request.data for request in seen[1:]] == [b"one", b"two"]
