"""client-go, the Go client of the TiKV project, and we understand each other on every API version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from tests.interop.conftest import Clusters, Connect
from tests.interop.line_client import LineClient
from tests.interop.rows import our_rows, rows, split, with_ttls
from tests.support.live_cluster import LiveCluster
from tests.support.raw_calls import CompareAndSwapResult, compare_and_swap
from tikv_br.backup.run import backup
from tikv_br.dataflow.options import BackupOptions, Loss
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
TOLERANCE = 60
"""Seconds that a remaining TTL may differ by: machines are slow, but not a minute, and the TTLs lie 1000 s apart."""


@dataclass(frozen=True)
class Loaded:
    """A playground with rows that client-go has put."""

    live: LiveCluster
    go: LineClient
    rows: dict[bytes, bytes]
    expiries: dict[bytes, float]
    """When keys expire, in seconds since the epoch; 0 = never."""

    def read(self) -> list[tuple[bytes, bytes]]:
        """Expected rows."""
        return sorted(self.rows.items())


@pytest.fixture(scope="module")
def sources(clusters: Clusters, client_go: Connect) -> dict[ApiVersion, Loaded]:
    """Return a loaded playground of each API version, with deleted and replaced rows, in several regions on three stores."""
    return {version: load(clusters(version), client_go, version) for version in ApiVersion}


@pytest.fixture(params=list(ApiVersion), ids=lambda version: version.label)
def loaded(request: pytest.FixtureRequest, sources: dict[ApiVersion, Loaded]) -> Iterator[Loaded]:
    """Return one of the loaded playgrounds, and look that a test left its rows as they were."""
    found = sources[request.param]
    yield found
    assert our_rows(found.live) == found.read()


def load(live: LiveCluster, client_go: Connect, version: ApiVersion) -> Loaded:
    """Load rows by client-go alone, while the regions under it are split."""
    go, data = client_go(live), rows()
    go.batch_put(dict.fromkeys(list(data)[::3], b"old") | {b"row-gone": b"x", b"rox1": b"y", b"rox2": b"z"})
    split(live)
    lasting = with_ttls(data, version)
    go.batch_put_with_ttls(lasting)
    go.delete(b"row-gone")
    go.batch_delete([b"rox1"])
    go.delete_range(KeyRange(b"rox", b"roy"))
    now = time.time()
    expiries = {key: ttl and now + ttl for key, _, ttl in lasting}
    return Loaded(live, go, data, expiries)


def assert_ttls(go: LineClient, expiries: dict[bytes, float]) -> None:
    """Compare the TTLs that client-go sees, of every 20th key, with the expected ones."""
    for key, expiry in list(expiries.items())[::20]:
        ttl = go.get_ttl(key)
        assert ttl is not None
        assert (ttl == 0) == (expiry == 0)
        assert not ttl or abs(ttl - (expiry - time.time())) < TOLERANCE


def test_both_read_the_same(loaded: Loaded) -> None:
    """Scans forward, backward, of parts and of keys, batch gets and TTLs of client-go agree with our scan of its rows."""
    live, go, expected = loaded.live, loaded.go, loaded.read()
    assert our_rows(live) == expected
    assert go.scan() == expected
    assert go.scan(keys_only=True) == [(key, b"") for key, _ in expected]
    assert go.scan(b"row00099", b"row00300", 50) == [row for row in expected if row[0] >= b"row00099"][:50]
    downwards = [row for row in reversed(expected) if b"row001" <= row[0] < b"row003"]
    assert go.reverse_scan(b"row003", b"row001") == downwards
    assert go.reverse_scan(b"row003", b"row001", 7) == downwards[:7]
    some = [key for key, _ in expected][::7]
    assert go.batch_get([*some, b"missing"]) == live.raw().batch_get(some) == {key: loaded.rows[key] for key in some}
    assert (go.get(b"row-gone"), go.get(b"row00007")) == (None, b"")
    if live.raw().codec.api_version.has_ttl:
        assert_ttls(go, loaded.expiries)


def test_checksums_agree(loaded: Loaded) -> None:
    """client-go's checksum of the whole and of parts is ours, region by region as we count it."""
    live, go = loaded.live, loaded.go
    for ends in ((b"", b""), (b"row00099", b"row00300"), (b"\1", b"\1\0"), (b"\xfe", b"")):
        span = KeyRange(*ends)
        assert go.checksum(span) == live.raw().checksum(span)
    assert go.checksum().total_kvs == len(loaded.rows)


def test_it_reads_and_deletes_what_we_write(loaded: Loaded) -> None:
    """Our puts and deletes are seen by client-go and the other way round, also in one compare-and-swap after the other."""
    live, go = loaded.live, loaded.go
    raw, ttl = live.raw(), 5000 if live.raw().codec.api_version.has_ttl else 0
    ours = {b"zz-%03d" % number: b"%d" % number for number in range(100)} | {b"zz-": b""}
    raw.batch_put(ours, ttl)
    assert go.scan(b"zz-", b"zz.") == sorted(ours.items())
    if ttl:
        assert abs((go.get_ttl(b"zz-007") or 0) - ttl) < TOLERANCE
    assert compare_and_swap(raw, b"zz-cas", None, b"1").succeeded
    assert go.compare_and_swap(b"zz-cas", b"1", b"") == CompareAndSwapResult(True, b"1")
    assert go.compare_and_swap(b"zz-cas", b"1", b"2") == CompareAndSwapResult(False, b"")
    assert compare_and_swap(raw, b"zz-cas", b"", b"3").succeeded
    go.delete_range(KeyRange(b"zz-", b"zz-050"))
    assert raw.checksum(KeyRange(b"zz-", b"zz.")).total_kvs == 51
    raw.delete_range(KeyRange(b"zz-050", b"zz."))
    assert go.scan(b"zz-", b"zz.") == []


def test_it_follows_splits_and_leaders(loaded: Loaded) -> None:
    """Regions split, merge and change leaders under its cache; its scan and puts still reach every row."""
    live, go = loaded.live, loaded.go
    assert go.scan() == loaded.read()
    codec = live.raw().codec
    live.split(*(codec.bound(codec.rpc_key(b"row00%d" % number)) for number in range(150, 160)))
    for region in live.regions():
        others = [store for store in live.store_ids if store != region["leader_store"]]
        live.transfer_leader(region_id=region["id"], store_id=others[region["id"] % len(others)])
    assert go.scan() == loaded.read()
    go.batch_put_with_ttls(with_ttls(loaded.rows, codec.api_version))
    split(live)


PAIRS = [
    *(("store", source, target) for source, target in [(V1, V1), (V1, V2), (V1TTL, V1TTL), (V1TTL, V2), (V2, V2)]),
    *(("scan", source, target) for source, target in [(V1, V1TTL), (V1TTL, V2), (V2, V2), (V2, V1)]),
]
"""Those which lose something are proven elsewhere; one of them stands for all here."""


@pytest.mark.parametrize(
    ("engine", "source", "target"), PAIRS, ids=lambda value: value if isinstance(value, str) else value.label
)
def test_it_reads_what_we_restore(
    engine: str,
    source: ApiVersion,
    target: ApiVersion,
    sources: dict[ApiVersion, Loaded],
    clusters: Clusters,
    client_go: Connect,
    tmp_path: Path,
) -> None:
    """Rows put by client-go, backed up and restored by us, are read by client-go: keys, values, TTLs and checksum."""
    loaded, restored = sources[source], clusters(target, "target")
    place = StorageLocation("local", str(tmp_path / "backup"))
    options = BackupOptions(
        loaded.live.config, place, dst_api_version=target, executor="driver", allow_loss=frozenset(Loss)
    )
    summary = backup(structs.replace(options, engine=engine)).summary
    go = client_go(restored)
    try:
        assert restore(RestoreOptions(restored.config, place)).verified
        assert go.scan() == loaded.read()
        sums = go.checksum()
        assert (sums.crc64xor, sums.total_kvs) == (summary.crc64xor, len(loaded.rows))
        if target.has_ttl:
            assert_ttls(go, loaded.expiries)
        go.put(b"row00001", b"after the restore")
        assert go.get(b"row00001") == b"after the restore"
    finally:
        restored.raw().delete_range(EVERY_KEY)
