"""Every conversion on both engines, read by RocksDB and compared with the rules in this file."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import load, when
from tests.integration.backup.loaded import YEAR, Loaded, Sources, expiring
from tests.integration.backup.reading import Expected, Rows, rocksdb_rows, stored
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.raw_calls import put_with_ttls
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import RegionPart
from tikv_br.dataflow.options import Loss
from tikv_br.errors import ConversionUnsupported
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.values import decode_value
from tikv_br.playground.engine import RocksEngine
from tikv_br.progress_events import StepStarted
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


def take_expiries(found: Rows, at: float, version: ApiVersion, ts: int) -> Expected:
    """Return the expiring rows with the expiry that stands in their stored value, once that is about a year from ``at``."""
    taken: Expected = {}
    for key, value in expiring().items():
        (internal,) = stored({key: (b"", 0)}, version, ts=ts)
        expire = int.from_bytes(found[internal][len(value) :][:8], "big")
        assert abs(expire - at - YEAR) <= 30  # on a busy machine the puts and the questions take their time
        taken[key] = (value, expire)
    return taken


LOSES = {(V1TTL, V1): "ttl", (V2, V1): "ttl ts keyspace", (V2, V1TTL): "ts keyspace"}
"""Losses of the nine pairs that must be allowed."""


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ApiVersion, ApiVersion)))
def test_every_conversion_has_every_row(
    engine: str,
    source: ApiVersion,
    target: ApiVersion,
    sources: Sources,
    options: Options,
    rows: dict[bytes, bytes],
    tmp_path: Path,
) -> None:
    """All live rows and nothing else are in the SSTs, in the target's encoding, with expiries of the right second.

    What is lost is what was allowed, and it is counted.
    """
    live = sources(source).live
    allowed = frozenset(Loss(word) for word in LOSES.get((source, target), "").split())
    wanted = options(live, dst_api_version=target, engine=engine, checksum=True, allow_loss=allowed)
    summary = backup(wanted).summary
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    expected: Expected = {key: (value, 0) for key, value in rows.items()}
    ts = summary.backup_ts if source is V2 else 1
    if (engine, source, target) == ("store", V2, V2):
        found = restamped(found, ts, sources(V2))
    if source.has_ttl and target.has_ttl:
        expected |= take_expiries(found, sources(source).at, target, ts)
    elif source.has_ttl:
        expected |= {key: (value, 0) for key, value in expiring().items()}
    assert found == stored(expected, target, ts=ts)
    assert summary.total_kvs == len(expected)
    assert summary.dropped_ttls == (len(expiring()) if source.has_ttl and not target.has_ttl else 0)
    assert (summary.api_version, summary.dst_api_version, summary.engine) == (source.label, target.label, engine)
    assert summary.files > 1
    kept = BackupSet.open(open_store(wanted.storage))
    check_records(kept, live, source, target, len(expected))
    check_regions(kept, live, {key: value for key, (value, _expiry) in expected.items()})


def test_losses_must_be_allowed_before_anything_is_written(sources: Sources, options: Options) -> None:
    """The error names each loss that is not allowed, and the flag with all of them; the storage is unchanged."""
    wanted = options(sources(V2).live, dst_api_version=V1, allow_loss=frozenset({Loss.TTL}))
    with pytest.raises(ConversionUnsupported, match=r"\(ts\).*\(keyspace\)") as raised:
        backup(wanted)
    assert "(ttl)" not in str(raised.value)
    assert "--allow-loss ttl,ts,keyspace" in raised.value.hint
    assert not Path(wanted.storage.path).exists()


def test_expiries_are_exact_where_the_stores_files_are_rewritten(
    sources: Sources, options: Options, tmp_path: Path
) -> None:
    """To the second as the stores hold them: two conversions of one cluster agree, however long apart."""
    seen = []
    for target, allowed in ((V2, ()), (V1TTL, (Loss.TS, Loss.KEYSPACE))):
        wanted = options(
            sources(V2).live,
            dst_api_version=target,
            engine="store",
            ranges=(KeyRange(b"ttl", b"ttm"),),
            allow_loss=frozenset(allowed),
        )
        backup(wanted)
        kept = BackupSet.open(open_store(wanted.storage))
        seen.append([(file.expiry.earliest, file.expiry.latest, file.expiry.total_kvs) for file in kept.files])
        assert not [path for path in Path(wanted.storage.path, "sst").iterdir() if path.is_dir() and target is V1TTL]
    assert min(seen[0])[0] == min(seen[1])[0]
    assert max(latest for _, latest, _ in seen[0]) == max(latest for _, latest, _ in seen[1])
    assert sum(count for *_, count in seen[0]) == sum(count for *_, count in seen[1]) == len(expiring())


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ApiVersion, ApiVersion)))
def test_every_conversion_restores(
    source: ApiVersion,
    target: ApiVersion,
    sources: Sources,
    targets: Clusters,
    options: Options,
    rows: dict[bytes, bytes],
) -> None:
    """A cluster of the target's version serves every row after a restore, with its TTL where there still is one."""
    allowed = frozenset(Loss(word) for word in LOSES.get((source, target), "").split())
    wanted = options(sources(source).live, dst_api_version=target, engine="auto", allow_loss=allowed)
    backup(wanted)
    live = targets(target)
    live.raw().delete_range(EVERY_KEY)
    restore(RestoreOptions(live.config, wanted.storage))
    expected = rows | (expiring() if source.has_ttl else {})
    prefix = live.raw().codec.prefix
    pages = list(live.raw().scan_pages(live.raw().codec.rpc_range()))
    keys = [key[len(prefix) :] for page in pages for key in page.keys.to_pylist()]
    found = dict(zip(keys, [value for page in pages for value in page.values.to_pylist()], strict=True))
    assert found == expected
    if source.has_ttl and target.has_ttl:
        left = live.raw().get_ttl(b"ttl0007")
        assert left is not None
        assert 0 < left <= YEAR
    elif target.has_ttl:
        assert live.raw().get_ttl(b"row00007") == 0


def restamped(found: Rows, ts: int, loaded: Loaded) -> Rows:
    """Return rows with one ts, once it is shown that each had its own, of when it was put."""
    own = {int.from_bytes(key[-8:], "big") ^ (2**64 - 1) for key in found}
    assert len(own) > 1
    assert loaded.tso[0] < min(own) < max(own) < loaded.tso[1]
    return {key[:-8] + (ts ^ (2**64 - 1)).to_bytes(8, "big"): value for key, value in found.items()}


def check_regions(kept: BackupSet, live: LiveCluster, rows: dict[bytes, bytes]) -> None:
    """Each region of the source that holds rows is in the manifest, with its rows counted as the target has them."""
    assert kept.manifest is not None
    theirs, codec = live.raw().codec, KeyCodec(kept.api_version)
    whole = theirs.rpc_range()
    first, last = theirs.bound(whole.start), theirs.bound(whole.end)
    starts = [region.start for region in live.cluster.pd.scan_regions(first, last) if region.start > first]
    cuts = [theirs.user_key(theirs.from_bound(start)) for start in starts]
    expected = []
    for start, end in itertools.pairwise((b"", *cuts, b"")):
        here = [codec.rpc_key(key) + value for key, value in rows.items() if start <= key and (not end or key < end)]
        if here:
            span = codec.rpc_range(KeyRange(start, end))
            expected.append(RegionPart(span.start, span.end, len(here), sum(map(len, here))))
    assert list(kept.manifest.regions) == expected


def check_records(kept: BackupSet, live: LiveCluster, source: ApiVersion, target: ApiVersion, rows: int) -> None:
    """Hold the records of a whole backup against the cluster and against the files."""
    whole = KeyRange(b"r\0\0\0", b"r\0\0\1") if target is V2 else KeyRange(b"", b"")
    assert kept.ranges == (whole,)
    assert kept.api_version is target
    ranges = [file.key_range for file in kept.files]
    assert ranges[0].start == whole.start
    assert all(left.end <= right.start for left, right in itertools.pairwise(ranges))
    assert kept.totals.total_kvs == rows
    if (source is V2) == (target is V2):
        counted = live.raw().checksum()
        assert (counted.crc64xor, counted.total_bytes) == (kept.totals.crc64xor, kept.totals.total_bytes)
    for file in kept.files:
        kept.verify_identity(file)
        kept.verify_content(file)
    expiring_rows = sum(file.expiry.total_kvs for file in kept.files)
    assert expiring_rows == (len(expiring()) if source.has_ttl and target.has_ttl else 0)


def test_a_range_is_cut_to_the_byte(
    sources: Sources, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Start is inclusive, end exclusive, and neither needs to be a key or a region's bound."""
    wanted = options(sources(V1).live, dst_api_version=V2, ranges=(KeyRange(b"row00007", b"row00500\0"),))
    summary = backup(wanted).summary
    inside = {key: (value, 0) for key, value in rows.items() if b"row00007" <= key < b"row00500\0"}
    assert rocksdb_rows(Path(wanted.storage.path), tmp_path) == stored(inside, V2, ts=1)
    assert summary.total_kvs == len(inside)
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.ranges == (KeyRange(b"r\0\0\0row00007", b"r\0\0\0row00500\0"),)


@pytest.mark.parametrize(
    ("name", "neighbours"),
    [
        ("ks4242", ("ks4241", "ks4243")),
        pytest.param("ks16777215", ("ks16777214",), marks=pytest.mark.emulator_only("a keyspace of a certain id")),
    ],
)
def test_a_keyspace_is_taken_alone(
    name: str, neighbours: tuple[str, ...], sources: Sources, options: Options, tmp_path: Path
) -> None:
    """Rows of other keyspaces stay out, also those of the neighbours; the last keyspace has its odd end."""
    live = sources(V2).live
    ids = [live.create_keyspace(each) for each in sorted((name, *neighbours))]
    own_id = live.create_keyspace(name)
    for keyspace_id in ids:
        load(live, {b"": b"first", b"\xff" * 9: b"last", b"k": b"%d" % keyspace_id}, keyspace_id)
    wanted = options(live, keyspaces=(name,))
    summary = backup(wanted).summary
    own: Expected = {b"": (b"first", 0), b"\xff" * 9: (b"last", 0), b"k": (b"%d" % own_id, 0)}
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    assert found == stored(own, V2, keyspace_id=own_id, ts=summary.backup_ts)


def test_assuming_no_ttl_asks_for_none(sources: Sources, options: Options) -> None:
    """With --assume-no-ttl no RawGetKeyTTL goes out: a store that would refuse them is not noticed."""
    live = sources(V1TTL).live
    refusing = live.fail("RawGetKeyTTL", {"abort": {"code": "UNIMPLEMENTED", "details": "no"}}, count=-1)
    try:
        summary = backup(options(live, assume_no_ttl=True)).summary
        assert live.hits(refusing) == 0
    finally:
        live.heal()
    assert summary.total_kvs == live.raw().checksum().total_kvs


def test_rows_that_go_before_their_ttl_is_known_are_left_out(sources: Sources, options: Options) -> None:
    """A key that expires between the scan and the request for its TTL is neither permanent nor an error."""
    live = sources(V1TTL).live
    # Put at the last moment; a machine that is too slow to scan all before they expire gets more time.
    for ttl in (5, 15, 45):
        live.raw().delete_range(KeyRange(b"zz", b"zz\xff"))
        soon = {b"zz%02d" % number: b"soon" for number in range(20)}
        slow = live.fail("RawGetKeyTTL", {"delay": {"seconds": ttl + 1}}, count=1)
        wanted = options(live, ranges=(KeyRange(b"zz", b"zz\xff"),), concurrency=1, allow_empty=True)
        put = functools.partial(live.raw().batch_put, soon, ttl)
        summary = backup(wanted, when(StepStarted, "copy", put)).summary
        scanned = live.hits(slow)
        live.heal()
        if summary.total_kvs + summary.vanished_kvs == 20:
            break
    assert scanned == 1
    assert summary.total_kvs + summary.vanished_kvs == 20
    assert summary.vanished_kvs > 0


def test_expiries_from_slow_stores_are_exact(tmp_path: Path, options: Options) -> None:
    """Eight tasks ask a store that answers 96 requests a second: expiries are as exact as one request is short."""
    with live_cluster(tmp_path / "cluster", V1TTL, stores=1) as live:
        rows = [(b"%d-%03d" % (row % 8, row // 8), b"value", 1000 + row) for row in range(2400)]
        put_with_ttls(live.raw(), rows)
        live.fail("RawGetKeyTTL", {"delay": {"seconds": 1}}, count=-1)
        wanted = options(live, concurrency=8, ranges=tuple(KeyRange(b"%d-" % part, b"%d." % part) for part in range(8)))
        summary = backup(wanted).summary
        assert summary.ranges == 8
    assert summary.seconds > 10
    engine = RocksEngine.open(tmp_path / "cluster" / "rocksdb")
    recorded = {key: decode_value(V1TTL, value).expire_ts for key, value in engine.iterate(b"", b"")}
    engine.close()
    written = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    early = [recorded[key] - decode_value(V1TTL, value).expire_ts for key, value in written.items()]
    assert len(early) == 2400
    assert min(early) >= 0, "a row lives longer than in the cluster"
    # With 256 requests of each task under way at once it is 14 s and more. A busy machine adds to each request.
    assert max(early) <= 10, f"rows expire up to {max(early)} s early"
    assert max(early) <= summary.expiry_error_seconds <= 11


@pytest.mark.parametrize(
    "action",
    [
        {"region_error": {"not_leader": {}}},
        {"region_error": {"epoch_not_match": {}}},
        {"drop": {}},
        {"abort": {"code": "DEADLINE_EXCEEDED", "details": "slow"}},
    ],
    ids=["not leader", "epoch", "drop", "timeout"],
)
def test_questions_for_ttls_that_fail_are_asked_again(
    action: dict[str, object], sources: Sources, options: Options, tmp_path: Path
) -> None:
    """A few of many requests under way fail; every row still gets its own expiry, not its neighbour's."""
    live, at = sources(V1TTL).live, sources(V1TTL).at
    failing = live.fail("RawGetKeyTTL", action, skip=100, count=3)
    wanted = options(live, ranges=(KeyRange(b"ttl", b"ttm"),))
    summary = backup(wanted).summary
    assert live.hits(failing) == 3
    live.heal()
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    assert found == stored(take_expiries(found, at, V1TTL, 0), V1TTL)
    assert (summary.total_kvs, summary.vanished_kvs) == (len(expiring()), 0)


def test_uncompressed_files_keep_timestamps_too(sources: Sources, options: Options, tmp_path: Path) -> None:
    """Stores always compress: their files are rewritten, and rows keep the ts that a scan would not know."""
    wanted = options(
        sources(V2).live, engine="auto", compression=Compression.NONE, ranges=(KeyRange(b"row", b"row01"),)
    )
    summary = backup(wanted).summary
    assert (summary.engine, "uncompressed" in summary.engine_reason) == ("store", True)
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    restamped(found, 1, sources(V2))
    assert len(found) == summary.total_kvs
    for path in Path(wanted.storage.path).rglob("*.sst"):
        assert b"\x28\xb5\x2f\xfd" not in path.read_bytes(), "a frame of zstd"
