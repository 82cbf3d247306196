"""RawKV calls: what is sent, how it is cut into regions and batches, and what comes back."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.scripted_grpc import Entry
from tests.support.waiting import eventually
from tests.unit.cluster.fakes import FakeCluster, client, region, region_error, with_leader
from tikv_br import retry
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, kvrpcpb_pb2, metapb_pb2
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.router import BATCH_BYTES, BATCH_ITEMS
from tikv_br.errors import ClusterUnfit, UsageError
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

KV = "/tikvpb.Tikv/"
V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


def split(fake: FakeCluster, codec: KeyCodec, *user_keys: bytes) -> None:
    """Give the fake regions that begin at these user keys."""
    bounds = [b"", *(codec.bound(codec.rpc_key(key)) for key in user_keys), b""]
    pairs = itertools.pairwise(bounds)
    fake.regions = [with_leader(region(at, start, end)) for at, (start, end) in enumerate(pairs, 1)]


def echo(fake: FakeCluster, codec: KeyCodec, stored: dict[bytes, bytes]) -> None:
    """Let the store keep pairs: batches in, batches out, each checked to lie in its region."""

    def put(data: bytes) -> kvrpcpb_pb2.RawBatchPutResponse:
        request = kvrpcpb_pb2.RawBatchPutRequest.FromString(data)
        keys = [pair.key for pair in request.pairs]
        assert keys == sorted(set(keys))
        check_inside(fake, codec, request.context.region_id, keys)
        assert len(keys) <= BATCH_ITEMS
        assert len(keys) == 1 or sum(len(pair.key) + len(pair.value) for pair in request.pairs) <= BATCH_BYTES
        stored.update((pair.key, pair.value) for pair in request.pairs)
        return kvrpcpb_pb2.RawBatchPutResponse()

    def get(data: bytes) -> kvrpcpb_pb2.RawBatchGetResponse:
        request = kvrpcpb_pb2.RawBatchGetRequest.FromString(data)
        check_inside(fake, codec, request.context.region_id, list(request.keys))
        pairs = [kvrpcpb_pb2.KvPair(key=key, value=stored[key]) for key in request.keys if key in stored]
        return kvrpcpb_pb2.RawBatchGetResponse(pairs=pairs)

    def delete(data: bytes) -> kvrpcpb_pb2.RawBatchDeleteResponse:
        request = kvrpcpb_pb2.RawBatchDeleteRequest.FromString(data)
        check_inside(fake, codec, request.context.region_id, list(request.keys))
        for key in request.keys:
            stored.pop(key, None)
        return kvrpcpb_pb2.RawBatchDeleteResponse()

    fake.kv("RawBatchPut", put)
    fake.kv("RawBatchGet", get)
    fake.kv("RawBatchDelete", delete)


def check_inside(fake: FakeCluster, codec: KeyCodec, region_id: int, rpc_keys: list[bytes]) -> None:
    """A store refuses keys outside the region; so does this."""
    holder = next(each.region for each in fake.regions if each.region.id == region_id)
    for key in rpc_keys:
        bound = codec.bound(key)
        assert holder.start_key <= bound
        assert not holder.end_key or bound < holder.end_key


@pytest.mark.parametrize("version", [V1, V2])
def test_batches_follow_regions_and_sizes(fake: FakeCluster, version: ApiVersion) -> None:
    """Thousands of pairs of random sizes over several regions all arrive, each batch within its region."""
    chance = random.Random(1)
    raw = client(fake, version)
    split(fake, raw.codec, b"c", b"k0", b"k05", b"k1", b"t")
    stored: dict[bytes, bytes] = {}
    echo(fake, raw.codec, stored)
    pairs = {b"%c%d" % (chance.randrange(97, 123), at): bytes(chance.randrange(300)) for at in range(4000)}
    pairs |= {b"k%02d" % at: bytes(100_000) for at in range(10)}
    raw.batch_put(pairs)
    assert stored == {raw.codec.rpc_key(key): value for key, value in pairs.items()}
    assert raw.batch_get([*pairs, b"nosuch"]) == pairs
    raw.batch_delete(list(pairs)[:2000])
    assert set(stored) == {raw.codec.rpc_key(key) for key in list(pairs)[2000:]}


@pytest.mark.parametrize("version", [V1, V2])
def test_columns_follow_regions_and_sizes(fake: FakeCluster, version: ApiVersion) -> None:
    """Columns of thousands of rows arrive as pairs do, each batch within its region and no larger than those."""
    chance = random.Random(2)
    raw = client(fake, version)
    split(fake, raw.codec, b"c", b"k0", b"k05", b"k1", b"t")
    stored: dict[bytes, bytes] = {}
    echo(fake, raw.codec, stored)
    pairs = {b"%c%d" % (chance.randrange(97, 123), at): bytes(chance.randrange(300)) for at in range(4000)}
    pairs |= {b"k%02d" % at: bytes(100_000) for at in range(10)}
    rows = sorted(pairs.items())
    keys, values = (columns.from_list([row[at] for row in rows]) for at in (0, 1))
    raw.column_writer().put(keys, values)
    assert stored == {raw.codec.rpc_key(key): value for key, value in rows}
    sent = len(fake.stores[1].requests[KV + "RawBatchPut"])
    raw.batch_put(pairs)
    assert len(fake.stores[1].requests[KV + "RawBatchPut"]) == 2 * sent
    raw.column_writer().delete(keys[:2000])
    assert set(stored) == {raw.codec.rpc_key(key) for key, _ in rows[2000:]}
    raw.column_writer().put(keys[:0], values[:0])
    raw.column_writer(batch_rows=7).put(keys[:100], values[:100])
    small = fake.stores[1].seen(KV + "RawBatchPut", kvrpcpb_pb2.RawBatchPutRequest)[2 * sent :]
    assert [max(len(each.pairs) for each in small), sum(len(each.pairs) for each in small)] == [7, 100]


def test_columns_carry_the_remaining_ttl(fake: FakeCluster) -> None:
    """Rows that have expired are left out, rows of no expiry get the TTL given; a cluster without TTLs gets nothing."""
    fake.kv("RawBatchPut", kvrpcpb_pb2.RawBatchPutResponse())
    keys, now = columns.from_list([b"a", b"b", b"c", b"d"]), int(time.time())
    expire_ts = np.array([0, now + 1000, now - 5, (1 << 64) - 1], np.uint64)
    assert client(fake, V1TTL).column_writer().put(keys, keys, expire_ts).tolist() == [False, False, True, False]
    assert not client(fake, V1).column_writer().put(keys, keys, np.zeros(4, np.uint64)).any()
    with pytest.raises(UsageError, match="does not support TTLs"):
        client(fake, V1).column_writer().put(keys, keys, expire_ts)
    with pytest.raises(UsageError, match="does not support TTLs"):
        client(fake, V1).column_writer().put(keys, keys, ttl=1)
    client(fake, V1TTL).column_writer().put(keys, keys, expire_ts, 60)
    client(fake, V1TTL).column_writer().put(keys[:1], keys[:1], ttl=(1 << 64) - 1)
    assert client(fake, V1TTL).column_writer().put(keys, keys, np.full(4, now - 1, np.uint64)).all()
    first, second, third, fourth = fake.stores[1].seen(KV + "RawBatchPut", kvrpcpb_pb2.RawBatchPutRequest)
    assert [pair.key for pair in first.pairs] == [b"a", b"b", b"d"]
    assert first.ttls[0] == 0
    assert 900 < first.ttls[1] <= 1000
    assert 0 <= (1 << 64) - 1 - now - first.ttls[2] < 100
    assert not second.ttls
    assert third.ttls[0] == 60
    assert list(fourth.ttls) == [(1 << 64) - 1]


def test_puts_keep_to_a_rate(fake: FakeCluster) -> None:
    """Each request waits until all bytes sent to its store are paid for."""
    fake.kv("RawBatchPut", kvrpcpb_pb2.RawBatchPutResponse())
    slept: list[float] = []
    limit = RateLimit(1000, clock=lambda: 0.0, sleep=slept.append)
    keys = columns.from_list([b"%03d" % number for number in range(30)])
    client(fake, V2).column_writer(10, limit).put(keys, keys)
    sizes = [len(each) for each in fake.stores[1].requests[KV + "RawBatchPut"]]
    assert slept == pytest.approx([sum(sizes[:count]) / 1000 for count in (1, 2, 3)])


def test_a_retry_carries_the_ttl_that_remains_then(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """TTLs shrink between a request and its retry, and a row that has expired in between is left out."""
    now, seen = 1_000_000.0, list[kvrpcpb_pb2.RawBatchPutRequest]()
    monkeypatch.setattr("tikv_br.cluster.clock.time", SimpleNamespace(time=lambda: now))

    def put(data: bytes) -> kvrpcpb_pb2.RawBatchPutResponse:
        nonlocal now
        seen.append(kvrpcpb_pb2.RawBatchPutRequest.FromString(data))
        now += 6
        busy = region_error(server_is_busy=errorpb_pb2.ServerIsBusy(reason="slow"))
        return kvrpcpb_pb2.RawBatchPutResponse(region_error=busy if len(seen) == 1 else None)

    fake.kv("RawBatchPut", put)
    keys = columns.from_list([b"a", b"b", b"c"])
    expire_ts = np.array([1_000_100, 1_000_005, 0], np.uint64)
    assert client(fake, V1TTL).column_writer().put(keys, keys, expire_ts).tolist() == [False, True, False]
    assert [[pair.key for pair in each.pairs] for each in seen] == [[b"a", b"b", b"c"], [b"a", b"c"]]
    assert [list(each.ttls) for each in seen] == [[100, 5, 0], [94, 0]]


def test_of_equal_keys_the_last_counts(fake: FakeCluster) -> None:
    """As servers do it in V2."""
    stored: dict[bytes, bytes] = {}
    echo(fake, KeyCodec(V1), stored)
    client(fake).batch_put([(b"k", b"1"), (b"a", b"x"), (b"k", b"2")])
    assert stored == {b"k": b"2", b"a": b"x"}


def test_a_batch_too_large_for_raft_is_halved(fake: FakeCluster) -> None:
    """raft_entry_too_large leads to smaller batches until all is written."""
    stored: dict[bytes, bytes] = {}

    def put(data: bytes) -> kvrpcpb_pb2.RawBatchPutResponse:
        request = kvrpcpb_pb2.RawBatchPutRequest.FromString(data)
        if len(request.pairs) > 3:
            error = region_error(raft_entry_too_large=errorpb_pb2.RaftEntryTooLarge(region_id=1, entry_size=9))
            return kvrpcpb_pb2.RawBatchPutResponse(region_error=error)
        stored.update((pair.key, pair.value) for pair in request.pairs)
        return kvrpcpb_pb2.RawBatchPutResponse()

    fake.kv("RawBatchPut", put)
    pairs = {b"%03d" % at: b"v" for at in range(100)}
    client(fake).batch_put(pairs)
    assert stored == pairs


def test_regions_that_split_between_batches_are_followed(fake: FakeCluster) -> None:
    """The rest of a batch is divided again by the regions that the store sent."""
    pieces = [region(2, b"", b"m", version=2), region(1, b"m", b"", version=2)]
    error = region_error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=pieces))
    batches: list[tuple[int, list[bytes]]] = []

    def put(data: bytes) -> kvrpcpb_pb2.RawBatchPutResponse:
        request = kvrpcpb_pb2.RawBatchPutRequest.FromString(data)
        if request.context.region_epoch.version == 1:
            return kvrpcpb_pb2.RawBatchPutResponse(region_error=error)
        batches.append((request.context.region_id, [pair.key for pair in request.pairs]))
        return kvrpcpb_pb2.RawBatchPutResponse()

    fake.kv("RawBatchPut", put)
    client(fake).batch_put([(b"a", b""), (b"l", b""), (b"m", b""), (b"z", b"")])
    assert batches == [(2, [b"a", b"l"]), (1, [b"m", b"z"])]


def recorded_ranges(fake: FakeCluster, method: str) -> list[tuple[int, bytes, bytes]]:
    """Region and range of each request of a range call."""
    if method == "RawChecksum":
        sums = fake.stores[1].seen(KV + method, kvrpcpb_pb2.RawChecksumRequest)
        return [(each.context.region_id, each.ranges[0].start_key, each.ranges[0].end_key) for each in sums]
    deletes = fake.stores[1].seen(KV + method, kvrpcpb_pb2.RawDeleteRangeRequest)
    return [(each.context.region_id, each.start_key, each.end_key) for each in deletes]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (b"", b"", [(1, b"", b"c"), (2, b"c", b"m"), (3, b"m", b"")]),
        (b"d", b"z", [(2, b"d", b"m"), (3, b"m", b"z")]),
        (b"c", b"m", [(2, b"c", b"m")]),
        (b"", b"b", [(1, b"", b"b")]),
        (b"e", b"f", [(2, b"e", b"f")]),
        (b"x", b"x", []),
        (b"z", b"a", []),
    ],
)
def test_range_calls_go_region_by_region(
    fake: FakeCluster, start: bytes, end: bytes, expected: list[tuple[int, bytes, bytes]]
) -> None:
    """Each region gets its own part, none overlaps, and together they are the range."""
    raw = client(fake)
    split(fake, raw.codec, b"c", b"m")
    fake.kv("RawDeleteRange", kvrpcpb_pb2.RawDeleteRangeResponse())
    fake.kv("RawChecksum", kvrpcpb_pb2.RawChecksumResponse(checksum=5, total_kvs=1, total_bytes=10))
    raw.delete_range(KeyRange(start, end))
    assert recorded_ranges(fake, "RawDeleteRange") == expected
    total = raw.checksum(KeyRange(start, end))
    assert recorded_ranges(fake, "RawChecksum") == expected
    assert total == Checksum(5 if len(expected) % 2 else 0, len(expected), 10 * len(expected))


def test_v2_ranges_stay_in_their_keyspace(fake: FakeCluster) -> None:
    """A whole keyspace is its own bounds, also where regions reach beyond; the last one ends at s."""
    fake.kv("RawChecksum", kvrpcpb_pb2.RawChecksumResponse())
    client(fake, V2, 1).checksum()
    client(fake, V2, 0xFFFFFF).checksum()
    assert recorded_ranges(fake, "RawChecksum") == [
        (1, b"r\x00\x00\x01", b"r\x00\x00\x02"),
        (1, b"r\xff\xff\xff", b"s"),
    ]


def test_v2_regions_are_decoded_for_the_next_part(fake: FakeCluster) -> None:
    """Region bounds are memcomparable; the part's end is not."""
    raw = client(fake, V2)
    split(fake, raw.codec, b"12345678", b"m")
    fake.kv("RawChecksum", kvrpcpb_pb2.RawChecksumResponse())
    raw.checksum(KeyRange(b"", b"z"))
    prefix = b"r\x00\x00\x00"
    assert recorded_ranges(fake, "RawChecksum") == [
        (1, prefix, prefix + b"12345678"),
        (2, prefix + b"12345678", prefix + b"m"),
        (3, prefix + b"m", prefix + b"z"),
    ]


CODEC = KeyCodec(V2)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (CODEC.rpc_key(b"k"), "which is not a valid key"),
        (CODEC.storage_key(CODEC.rpc_key(b"k"), 5), "between two versions of a key"),
    ],
)
def test_a_broken_region_bound_is_told(fake: FakeCluster, bound: bytes, words: str) -> None:
    """Raw bytes, and a place between the versions of a key: guessing would lose keys, or walk in a circle."""
    raw = client(fake, V2)
    fake.regions = [with_leader(region(1, b"", bound)), with_leader(region(2, bound, b""))]
    fake.kv("RawChecksum", kvrpcpb_pb2.RawChecksumResponse())
    with pytest.raises(ClusterUnfit, match=words):
        raw.checksum(KeyRange(b"", b"z"))


@pytest.mark.parametrize(
    ("version", "ttl_answer", "get_answer", "expected"),
    [
        (V1TTL, kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=30), None, 30),
        (V1TTL, kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=0), None, 0),
        (V1TTL, kvrpcpb_pb2.RawGetKeyTTLResponse(not_found=True), None, None),
        (V2, kvrpcpb_pb2.RawGetKeyTTLResponse(ttl=30), None, 30),
        (V2, kvrpcpb_pb2.RawGetKeyTTLResponse(), kvrpcpb_pb2.RawGetResponse(value=b"v"), 0),
        (V2, kvrpcpb_pb2.RawGetKeyTTLResponse(), kvrpcpb_pb2.RawGetResponse(not_found=True), None),
    ],
)
def test_ttl_of_a_deleted_key_is_none(
    fake: FakeCluster, version: ApiVersion, ttl_answer: Entry, get_answer: Entry | None, expected: int | None
) -> None:
    """A V2 store answers 0 for a tombstone; a get distinguishes it from a key that never expires."""
    fake.kv("RawGetKeyTTL", ttl_answer)
    if get_answer is not None:
        fake.kv("RawGet", get_answer)
    assert client(fake, version).get_ttl(b"k") == expected


def test_v1_stores_get_no_ttl(fake: FakeCluster) -> None:
    """RawGetKeyTTL kills a V1 store, and a TTL is refused by it: both end here."""
    raw = client(fake)
    calls: list[Callable[[], object]] = [
        lambda: raw.get_ttl(b"k"),
        lambda: raw.put(b"k", b"v", ttl=1),
        lambda: raw.batch_put([(b"k", b"v")], ttl=1),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="does not support TTLs"):
            call()
    assert not fake.stores[1].requests


def test_a_negative_ttl_is_refused(fake: FakeCluster) -> None:
    """Before protobuf would complain."""
    with pytest.raises(UsageError, match="negative"):
        client(fake, V2).put(b"k", b"v", ttl=-1)


def test_a_store_that_hangs_is_logged_though_no_request_has_failed(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it answers again."""
    monkeypatch.setattr(retry, "REPORT_SECONDS", 0.3)
    name = f"store {fake.stores[1].address}"

    def hang(_data: bytes) -> kvrpcpb_pb2.RawGetResponse:
        eventually(lambda: f"{name} has not answered for" in caplog.text)
        return kvrpcpb_pb2.RawGetResponse(value=b"v")

    fake.kv("RawGet", hang)
    assert client(fake).get(b"k") == b"v"
    assert f"{name} answers again" in caplog.text


def test_a_store_that_works_in_silence_is_asked_for_its_health(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows no such call answers, too; one that does not answer is logged, though its work has not failed."""
    for name, seconds in (("REPORT_SECONDS", 0.6), ("PROBE_SECONDS", 0.1), ("WATCH_SECONDS", 0.05)):
        monkeypatch.setattr(retry, name, seconds)
    store, name = fake.stores[1], f"store {fake.stores[1].address}"
    health = "/grpc.health.v1.Health/Check"

    def download(_data: bytes) -> import_sstpb_pb2.DownloadResponse:
        time.sleep(1)
        assert "not answered" not in caplog.text
        store.script(health, hang)
        eventually(lambda: f"{name} has not answered for" in caplog.text)
        return import_sstpb_pb2.DownloadResponse(is_empty=True)

    def hang(_data: bytes) -> bytes:
        eventually(lambda: "not answered" in caplog.text)
        return b""

    store.script("/import_sstpb.ImportSST/Download", download)
    request = import_sstpb_pb2.DownloadRequest(
        sst=import_sstpb_pb2.SSTMeta(
            uuid=b"u" * 16, cf_name="default", region_id=1, region_epoch=metapb_pb2.RegionEpoch(version=1)
        )
    )
    with Cluster.connect(fake.config()) as cluster:
        assert cluster.store(1).download(request).is_empty
    assert f"{name} answers again" in caplog.text
