"""Two clusters compared, and the second repaired."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from tests.integration.diff.conftest import ROWS, Clusters, fill, found, plant
from tests.support.live_cluster import LiveCluster, contents
from tests.support.raw_calls import put_with_ttls
from tikv_br.compare.report import DifferenceKind
from tikv_br.compare.sides import ClusterSide
from tikv_br.diff.places import ClusterChoice, DiffOptions
from tikv_br.diff.run import diff, repair
from tikv_br.errors import ConversionUnsupported, NothingMatched, UsageError
from tikv_br.formats.keys.ranges import KeyRange

PAIRS = [
    ("v1-a", "v1-b"),
    ("v2-a", "v2-b"),
    pytest.param("v1-a", "v2-b", marks=pytest.mark.core("diff")),
    ("v2-a", "v1-b"),
    ("v1ttl-a", "v2-b"),
]
FOREVER: Any = {"count": -1}
NOTHING: Any = {"delay": {"seconds": 0}}


def asked(a: LiveCluster, b: LiveCluster, **changes: Any) -> DiffOptions:  # noqa: ANN401 - any option
    """Compare two clusters whole, and name all keys."""
    options = DiffOptions(ClusterChoice(a.config), ClusterChoice(b.config), keys=10_000, concurrency=2)
    return structs.replace(options, **changes)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_planted_differences_are_found_exactly(one: str, other: str, clusters: Clusters) -> None:
    """Whatever the API versions: nothing where all is equal, every planted key with its kind, and after a repair nothing."""
    a, b = clusters(one), clusters(other)
    fill(a, ROWS)
    fill(b, ROWS)
    equal = diff(asked(a, b))
    assert (equal.keys, equal.ranges) == ([], [])
    assert equal.summary.rows == len(ROWS)
    planted = plant(b, seed=len(one) + len(other))
    different = diff(asked(a, b))
    assert found(different) == planted
    assert different.summary.remaining == len(planted)
    assert contents(b) != ROWS

    kept = repair(diff(asked(a, b)))
    extra = {key for key, kind in planted.items() if kind is DifferenceKind.ONLY_B}
    assert (kept.summary.puts, kept.summary.deletes, kept.summary.remaining) == (9, 0, len(extra))
    assert {key: value for key, value in contents(b).items() if key not in extra} == ROWS
    removed = repair(diff(asked(a, b)), delete=True)
    assert (removed.summary.puts, removed.summary.deletes, removed.summary.remaining) == (0, len(extra), 0)
    assert contents(b) == contents(a) == ROWS
    assert diff(asked(a, b)).summary.remaining == 0


def test_on_spark(clusters: Clusters) -> None:
    """The same tasks find the same keys in Spark's workers, and their counts come back."""
    a, b = clusters("v2-a"), clusters("v2-b")
    fill(a, ROWS)
    fill(b, ROWS)
    planted = plant(b, seed=4)
    result = diff(asked(a, b, executor="spark", spark_master="local[1]"))
    assert found(result) == planted
    assert (result.summary.executor, result.summary.rows) == ("spark", len(ROWS) + 1)
    assert 0 < result.summary.session_seconds < result.summary.seconds
    assert result.summary.scan_requests > 0


def test_equal_clusters_are_not_scanned(clusters: Clusters) -> None:
    """Not one RawScan reaches either cluster; the servers' own count of checksums is one a region of A."""
    a, b = clusters("v1-a"), clusters("v1-b")
    fill(a, ROWS)
    fill(b, ROWS)
    scans = [(live, live.fail("RawScan", NOTHING, **FOREVER)) for live in (a, b)]
    sums = a.fail("RawChecksum", NOTHING, **FOREVER)
    try:
        summary = diff(asked(a, b)).summary
        assert [live.hits(scan) for live, scan in scans] == [0, 0]
        assert a.hits(sums) == summary.ranges == len(a.regions())
    finally:
        a.heal()
        b.heal()
    assert summary.scan_requests == summary.scanned_bytes == 0


def test_one_difference_costs_little(clusters: Clusters) -> None:
    """A small part of the data is scanned, and what the summary counts is what the servers were asked."""
    a, b = clusters("v1-a"), clusters("v1-b")
    many = {b"%08d" % number: b"%d" % (number * 7) for number in range(30_000)}
    fill(a, many)
    fill(b, {**many, b"00012345": b"other"})
    scans = [(live, live.fail("RawScan", NOTHING, **FOREVER)) for live in (a, b)]
    try:
        result = diff(asked(a, b))
        hits = sum(live.hits(scan) for live, scan in scans)
    finally:
        a.heal()
        b.heal()
    assert found(result) == {b"00012345": DifferenceKind.VALUE}
    assert result.summary.scanned_bytes < 0.5 * result.summary.bytes
    assert 0 < hits <= result.summary.scan_requests + 4


def test_ranges_and_limits(clusters: Clusters) -> None:
    """Only the range is compared; all keys are counted, as many as asked for are named, the first ones."""
    a, b = clusters("v1-a"), clusters("v1-b")
    fill(a, ROWS)
    fill(b, {key: value for key, value in ROWS.items() if not key.startswith(b"row001")})
    lost = sorted(key for key in ROWS if key.startswith(b"row001"))
    result = diff(asked(a, b, keys=5))
    assert [difference.key for difference in result.keys] == lost[:5]
    assert result.summary.only_a == len(lost)
    assert result.ranges[0].span.start <= lost[0]
    part = diff(asked(a, b, span=KeyRange(lost[10], lost[20])))
    assert [difference.key for difference in part.keys] == lost[10:20]
    assert diff(asked(a, b, span=KeyRange(b"row002", b""))).keys == []
    with pytest.raises(NothingMatched, match=r'neither side has a row from "nokey" \(hex:6e6f6b6579\)'):
        diff(asked(a, b, span=KeyRange(b"nokey", b"nokez")))
    assert diff(asked(a, b, span=KeyRange(b"nokey", b"nokez"), allow_empty=True)).summary.rows == 0


def test_keys_that_expire_are_told_apart(clusters: Clusters) -> None:
    """One about to expire is no difference; one that lives for an hour is, and a repair gives it the time it has left."""
    a, b = clusters("v2-a"), clusters("v2-b")
    fill(a, ROWS)
    fill(b, ROWS)
    put_with_ttls(a.raw(), [(b"row00100-soon", b"v", 4), (b"row00100-later", b"v", 3600)])
    result = diff(asked(a, b))
    [key] = result.keys
    assert (key.key, key.kind) == (b"row00100-later", DifferenceKind.ONLY_A)
    assert 3000 < key.expires_in <= 3600
    assert result.summary.expiring in {0, 1}  # 0 when it was gone before it was looked at
    assert repair(result).summary.remaining == 0
    ttl = b.raw().get_ttl(b"row00100-later")
    assert ttl is not None
    assert 2000 < ttl <= 3600


def test_expiring_keys_are_not_written_where_they_would_last(clusters: Clusters) -> None:
    """A cluster without TTL is not repaired with rows that expire: nothing of the stretch is written."""
    a, b = clusters("v2-a"), clusters("v1-b")
    fill(a, {b"lasting": b"v"})
    fill(b, {b"lasting": b"v"})
    a.raw().put(b"passing", b"v", ttl=3600)
    with pytest.raises(ConversionUnsupported, match="cannot write 1 keys with a TTL"):
        repair(diff(asked(a, b)))
    assert contents(b) == {b"lasting": b"v"}


def test_keyspaces(clusters: Clusters) -> None:
    """Keyspaces are compared whatever their ids: within one cluster, too; a keyspace with itself is refused."""
    live = clusters("v2-a")
    fill(live, ROWS, live.create_keyspace("ks1"))
    fill(live, {**ROWS, b"row00005": b"other"}, live.create_keyspace("ks4242"))
    options = structs.replace(
        asked(live, live), a=ClusterChoice(live.config, "ks1"), b=ClusterChoice(live.config, "ks4242")
    )
    assert found(diff(options)) == {b"row00005": DifferenceKind.VALUE}
    with pytest.raises(UsageError, match="the same keyspace"):
        diff(structs.replace(options, b=ClusterChoice(live.config)))
    with pytest.raises(UsageError, match="--other-keyspace"):
        diff(structs.replace(options, b=ClusterChoice(clusters("v1-b").config)))


def test_while_regions_split_and_rows_change(clusters: Clusters) -> None:
    """Splits between plan and comparison change nothing; a row that comes and goes is no difference in the end."""
    a, b = clusters("v2-a"), clusters("v2-b")
    fill(a, ROWS)
    fill(b, ROWS)
    planted = plant(b, seed=77)
    codec = b.raw().codec
    bounds = [codec.bound(codec.rpc_key(key)).hex() for key in sorted(ROWS)[100::600]]
    for live in (a, b):
        live.fail("RawChecksum", {"command": {"name": "split", "arguments": {"keys": bounds}}}, skip=2)
    try:
        assert found(diff(asked(a, b))) == planted
    finally:
        a.heal()
        b.heal()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="tikv-client has one wheel: CPython 3.11")
def test_a_row_that_a_deletes_meanwhile_is_not_written(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its scan, and before the request for its TTL, which V2 answers for a deleted row as for one without."""
    a, b, key = clusters("v2-a"), clusters("v2-b"), min(ROWS)
    fill(a, ROWS)
    fill(b, ROWS)
    b.raw().delete(key)
    different = diff(asked(a, b))
    scan = ClusterSide.pages

    def deleting(side: ClusterSide, span: KeyRange) -> Iterator[pa.RecordBatch]:
        pages = list(scan(side, span))
        a.raw().delete(key)
        yield from pages

    monkeypatch.setattr(ClusterSide, "pages", deleting)
    assert repair(different).summary.puts == 0
    assert key not in contents(b)


def test_an_independent_client_sees_the_repair(clusters: Clusters) -> None:
    """The tikv-client wheel, which shares no code with us, reads the same rows from both after a repair."""
    tikv_client = pytest.importorskip("tikv_client")
    a, b = clusters("v1-a"), clusters("v1-b")
    fill(a, ROWS)
    fill(b, ROWS)
    plant(b, seed=5)
    readers = [tikv_client.RawClient.connect([live.pd]) for live in (a, b)]
    before = [reader.scan(b"", b"\xff" * 300, limit=10_240) for reader in readers]
    assert before[0] != before[1]
    repair(diff(asked(a, b)), delete=True)
    after = [reader.scan(b"", b"\xff" * 300, limit=10_240) for reader in readers]
    assert after[0] == after[1] == before[0]
    assert len(after[0]) == len(ROWS)
