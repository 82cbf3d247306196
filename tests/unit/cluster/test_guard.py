"""Requests that would kill a store are refused, and none of their bytes is sent."""

from __future__ import annotations

import itertools
import uuid

import pytest

from tests.unit.cluster.fakes import FakeCluster, region
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2, kvrpcpb_pb2, metapb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient, check_backup
from tikv_br.errors import ClusterUnfit, DangerousRequest
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import encode


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
    """No range, a reversed range, no range in a part, or one of transactions in regions that are not known."""
    with pytest.raises(DangerousRequest):
        store.backup(request_)


def regions(*bounds: bytes) -> list[Region]:
    """Regions from the first bound to the last one."""
    made = enumerate(itertools.pairwise(bounds), 1)
    return [Region.of(meta, meta.peers[0]) for meta in (region(number, *ends) for number, ends in made)]


RAW = b"raw-5"
A, C, M, Z = (encode(key) for key in (b"a", b"c", b"m", b"z"))


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [
        (b"a", b"m", regions(b"", A, C, M, Z)),
        (b"a", b"m", regions(b"", M, b"")),
        (b"", b"", regions(b"", A, b"")),
        (b"a", b"m", regions(b"", RAW, b"")),
        (b"s", b"", regions(RAW, encode(b"s"), b"")),
    ],
)
def test_transactions_between_bounds_of_transactions(start: bytes, end: bytes, known: list[Region]) -> None:
    """Only bounds within the range matter: the store decodes no other one."""
    check_backup(backup(start, end, raw=False), known)
    for empty in (b"a", b"b"):
        with pytest.raises(DangerousRequest, match="of the empty range"):
            check_backup(backup(b"b", empty, raw=False), known)


@pytest.mark.parametrize(("start", "end"), [(b"a", b"z"), (b"", b""), (b"q", b"rb"), (b"", b"z")])
def test_transactions_around_a_raw_bound(start: bytes, end: bytes) -> None:
    """The bound and a region that has it are named."""
    known = regions(b"", A, RAW, b"")
    with pytest.raises(
        ClusterUnfit, match=r'the bound "raw-5" \(hex:7261772d35\) of region \d is not the key of a transactional row'
    ) as refused:
        check_backup(backup(start, end, raw=False), known)
    assert "raw data" in refused.value.hint
    check_backup(backup(start, end), known)


@pytest.mark.parametrize("known", [[], regions(A, M), regions(C, Z), [*regions(A, C), *regions(M, Z)]])
def test_transactions_in_unknown_regions(known: list[Region]) -> None:
    """A region that PD did not return could have any bounds. Parts of the range count like the range."""
    with pytest.raises(DangerousRequest, match="are unknown"):
        check_backup(backup(b"b", b"y", raw=False), known)
    parts = brpb_pb2.BackupRequest(start_key=b"b", end_key=b"c")
    parts.sub_ranges.add(start_key=b"b", end_key=b"y")
    with pytest.raises(DangerousRequest, match="are unknown"):
        check_backup(parts, known)


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
