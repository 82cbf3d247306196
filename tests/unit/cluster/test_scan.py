"""Scans: pages, regions, sizes, errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import FakeCluster, client, region, region_error, with_leader
from tikv_br.cluster import store
from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.rawkv import RawClient
from tikv_br.cluster.region_errors import RegionErrorSeen
from tikv_br.cluster.scan import PAGE_BYTES, PageSizer, measure_with_protobuf
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

SCAN = "/tikvpb.Tikv/RawScan"


Scan = Callable[[bytes], kvrpcpb_pb2.RawScanResponse]


def serve(fake: FakeCluster, rows: dict[bytes, bytes]) -> Scan:
    """Let the store answer scans of these pairs, clipped to the region as real stores do; returns how it does that."""

    def scan(data: bytes) -> kvrpcpb_pb2.RawScanResponse:
        request = kvrpcpb_pb2.RawScanRequest.FromString(data)
        holder = next(each.region for each in fake.regions if each.region.id == request.context.region_id)
        ends = [end for end in (request.end_key, holder.end_key) if end]
        low, high = max(request.start_key, holder.start_key), min(ends, default=None)
        keys = sorted(key for key in rows if key >= low and (high is None or key < high))
        pairs = [kvrpcpb_pb2.KvPair(key=key, value=rows[key]) for key in keys[: request.limit]]
        return kvrpcpb_pb2.RawScanResponse(kvs=pairs)

    fake.kv("RawScan", scan)
    return scan


def split(fake: FakeCluster, *bounds: bytes) -> None:
    """Regions that begin at these keys."""
    pairs = itertools.pairwise([b"", *bounds, b""])
    fake.regions = [with_leader(region(at, start, end)) for at, (start, end) in enumerate(pairs, 1)]


def scanned(raw: RawClient, start: bytes, end: bytes, page_rows: int = 10_240) -> dict[bytes, bytes]:
    """All pairs of a scan; keys ascend strictly and no page is empty or too long."""
    rows: dict[bytes, bytes] = {}
    last = None
    for page in raw.scan_pages(KeyRange(start, end), page_rows):
        assert 0 < len(page.keys) <= page_rows
        for key, value in zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True):
            assert last is None or key > last
            rows[key] = value
            last = key
    return rows


@pytest.mark.parametrize("page_rows", [1, 2, 7, 64, 10_240])
@pytest.mark.parametrize(("start", "end"), [(b"", b""), (b"k0100", b"k0900"), (b"zz", b""), (b"k05", b"k05")])
def test_a_scan_finds_each_row_once(fake: FakeCluster, page_rows: int, start: bytes, end: bytes) -> None:
    """Over regions with rows, with one row and with none, for any page size, the rows are those of the range."""
    rows = {b"k%04d" % at: b"v" * (at % 50) for at in range(1000)} | {b"k0500\0": b"", b"k0500\0\0": b""}
    split(fake, b"a", b"b", b"k0100", b"k0500", b"k0500\0", b"k0999x", b"q")
    serve(fake, rows)
    expected = {key: value for key, value in rows.items() if start <= key and (not end or key < end)}
    if page_rows < 7:
        expected = {key: value for key, value in expected.items() if key < b"k0130"}
        end = min(end or b"k0130", b"k0130")
    assert scanned(client(fake), start, end, page_rows) == expected


def test_region_errors_in_the_middle_are_survived(fake: FakeCluster) -> None:
    """Refusals between pages neither lose nor double a row."""
    rows = {b"%03d" % at: b"x" for at in range(300)}
    good = serve(fake, rows)
    bad = kvrpcpb_pb2.RawScanResponse(
        region_error=region_error(region_not_found=errorpb_pb2.RegionNotFound(region_id=1))
    )
    busy = kvrpcpb_pb2.RawScanResponse(
        region_error=region_error(max_timestamp_not_synced=errorpb_pb2.MaxTimestampNotSynced())
    )
    fake.kv("RawScan", bad, good, busy, bad, good, fail("UNAVAILABLE", "Socket closed"), good, good, bad, good)
    assert scanned(client(fake), b"", b"", 100) == rows


def test_a_split_between_pages_is_survived(fake: FakeCluster) -> None:
    """The region splits behind the cursor; the rest of the scan follows the pieces."""
    rows = {b"%03d" % at: b"x" for at in range(300)}
    inner = serve(fake, rows)
    calls = itertools.count()

    def scan(data: bytes) -> kvrpcpb_pb2.RawScanResponse:
        request = kvrpcpb_pb2.RawScanRequest.FromString(data)
        if next(calls) == 2:
            pieces = [region(7, b"", b"150", version=2), region(1, b"150", b"", version=2)]
            fake.regions = [with_leader(each) for each in pieces]
        current = next((each.region for each in fake.regions if each.region.id == request.context.region_id), None)
        if current is None or current.region_epoch != request.context.region_epoch:
            current_regions = [each.region for each in fake.regions]
            error = region_error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=current_regions))
            return kvrpcpb_pb2.RawScanResponse(region_error=error)
        return inner(data)

    fake.kv("RawScan", scan)
    assert scanned(client(fake), b"", b"", 40) == rows


def test_keys_only_on_request(fake: FakeCluster) -> None:
    """The flag is sent, and values are empty."""
    fake.kv("RawScan", kvrpcpb_pb2.RawScanResponse(kvs=[kvrpcpb_pb2.KvPair(key=b"a")]))
    (page,) = client(fake).scan_pages(KeyRange(b"", b"b"), key_only=True)
    assert (page.keys.to_pylist(), page.values.to_pylist()) == ([b"a"], [b""])
    assert fake.stores[1].seen(SCAN, kvrpcpb_pb2.RawScanRequest)[0].key_only


def test_large_values_make_small_pages(fake: FakeCluster) -> None:
    """A store has no limit by bytes: after the first page, pages stay near the wanted weight."""
    rows = {b"%04d" % at: bytes(200_000) for at in range(150)}
    serve(fake, rows)
    raw = client(fake)
    sizes = [page.values.nbytes for page in raw.scan_pages(EVERY_KEY)]
    assert sum(len(page.keys) for page in raw.scan_pages(EVERY_KEY)) == 150
    assert max(sizes[1:]) <= PAGE_BYTES * 1.1


def test_a_page_too_large_to_be_taken_is_asked_for_in_parts(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are suddenly a thousand times larger would make a page of any size: no more than the limit is taken."""
    monkeypatch.setattr(store, "LARGEST_PAGE", 1 << 20)
    rows = {b"a%05d" % at: b"small" for at in range(20_000)} | {b"b%03d" % at: bytes(20_000) for at in range(400)}
    serve(fake, rows)
    assert scanned(client(fake), b"", b"") == rows


def test_page_sizes_grow_step_by_step() -> None:
    """Rows yet unseen may be larger: the next page is at most eight times the last."""
    sizer = PageSizer(10_240)
    grown = [sizer.rows]
    for _ in range(5):
        sizer.record_page(sizer.rows, sizer.rows * 100)
        grown.append(sizer.rows)
    assert grown == [64, 512, 4096, 10_240, 10_240, 10_240]
    sizer.record_page(10_240, 10_240 * 1_000_000)
    assert sizer.rows == 4
    sizer.record_page(0, 0)
    assert sizer.rows == 4
    sizer.record_page(1, 1 << 30)
    assert sizer.rows == 1


def test_protobuf_reads_what_the_kernel_does_not() -> None:
    """Unusual but valid answers give the same page; region errors are raised."""
    rows = [kvrpcpb_pb2.KvPair(key=b"%d" % at, value=bytes(at)) for at in range(5)]
    unknown_field = b"\x98\x06\x01"
    page = measure_with_protobuf(kvrpcpb_pb2.RawScanResponse(kvs=rows).SerializeToString() + unknown_field).split()
    assert page.keys.to_pylist() == [row.key for row in rows]
    assert page.values.to_pylist() == [row.value for row in rows]
    with pytest.raises(RegionErrorSeen):
        measure_with_protobuf(
            kvrpcpb_pb2.RawScanResponse(region_error=errorpb_pb2.Error(message="x")).SerializeToString()
        )


def test_random_regions_and_pages(fake: FakeCluster) -> None:
    """For random keys, bounds, ranges and page sizes the scan equals a filter of the rows."""
    chance = random.Random(9)
    raw = client(fake)
    for _ in range(25):
        rows = {bytes(chance.choices(b"ab\0\xff", k=chance.randrange(1, 6))): b"v" for _ in range(200)}
        bounds = sorted({bytes(chance.choices(b"ab\0\xff", k=chance.randrange(1, 4))) for _ in range(6)})
        split(fake, *bounds)
        for each in range(1, 20):
            raw._router.regions.invalidate(each)
        serve(fake, rows)
        start, end = sorted(bytes(chance.choices(b"ab\0\xff", k=2)) for _ in range(2))
        expected = {key: value for key, value in rows.items() if start <= key < end}
        assert scanned(raw, start, end, chance.choice([1, 3, 10, 1000])) == expected
