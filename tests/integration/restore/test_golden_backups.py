"""Every backup that the Go tool wrote comes back row for row, through our restore and the playground."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.integration.backup.reading import golden_rows
from tests.integration.restore.conftest import rows_of
from tests.integration.restore.restores import restore_golden
from tests.support.live_cluster import live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange

CASES = {
    "v1": (ApiVersion.V1, 0),
    "v1_lz4": (ApiVersion.V1, 0),
    "v1_snappy": (ApiVersion.V1, 0),
    "v1_to_v2": (ApiVersion.V2, 0),
    "v1ttl": (ApiVersion.V1TTL, 0),
    "v1ttl_to_v2": (ApiVersion.V2, 0),
    "v2": (ApiVersion.V2, 0),
    "v2_ranged": (ApiVersion.V2, 0),
    "v2_ks1_rpc": (ApiVersion.V2, 1),
    "v2_ks4242_rpc": (ApiVersion.V2, 4242),
    "v2_3stores": (ApiVersion.V2, 0),
}
SHARED_EXPECTATIONS = {"v1_lz4": "v1", "v1_snappy": "v1"}
TTL_SAMPLE = 200


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.emulator_only("a keyspace of a certain id")] if keyspace else [])
        for name, (_, keyspace) in CASES.items()
    ],
)
def test_a_recorded_backup_comes_back_whole(golden: Path, tmp_path: Path, name: str) -> None:
    """Keys, values, remaining TTLs and the server's own checksum equal what was recorded beside the backup."""
    api_version, keyspace = CASES[name]
    folder = golden / "backups" / name
    expected = golden_rows(golden / "backups" / SHARED_EXPECTATIONS.get(name, name))
    sums = json.loads((folder / "meta.json").read_text())["expected_sums"]
    with live_cluster(tmp_path / "cluster", api_version, stores=3) as live:
        summary = restore_golden(live, golden, name)
        raw = live.raw(keyspace)
        pages = list(raw.scan_pages(raw.codec.rpc_range()))
        rows = {
            key: value
            for page in pages
            for key, value in zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True)
        }
        found = raw.checksum()
        ttls = {row["k"]: row["e"] for row in expected if row["e"]}
        sample = dict(list(ttls.items())[:: max(len(ttls) // TTL_SAMPLE, 1)])
        now = time.time()
        remaining = {key: raw.get_ttl(raw.codec.user_key(key)) for key in sample}
    assert rows == {row["k"]: row["v"] for row in expected}
    assert (found.crc64xor, found.total_kvs, found.total_bytes) == (
        sums["crc64xor"],
        sums["total_kvs"],
        sums["total_bytes"],
    )
    assert summary.verified
    assert (summary.crc64xor, summary.total_kvs) == (found.crc64xor, found.total_kvs)
    assert all(abs((remaining[key] or 0) - (expiry - now)) < 60 for key, expiry in sample.items())


@pytest.mark.core("restore")
def test_a_part_of_a_backup_restores_and_is_proven(golden: Path, tmp_path: Path) -> None:
    """A range that cuts through files brings exactly its rows, and the checksum of those is compared."""
    expected = golden_rows(golden / "backups" / "v1")
    start, end = sorted(row["k"] for row in expected)[1000], sorted(row["k"] for row in expected)[2500]
    with live_cluster(tmp_path / "cluster", ApiVersion.V1) as live:
        summary = restore_golden(live, golden, "v1", span=KeyRange(start, end))
        found = live.raw().checksum()
    assert summary.verified
    assert found.total_kvs == summary.total_kvs == 1500


def test_other_rows_in_the_range_are_counted_and_left_alone(golden: Path, tmp_path: Path) -> None:
    """--allow-overwrite compares the backup's keys only: foreign rows between, before and after them are counted."""
    keys = sorted(row["k"] for row in golden_rows(golden / "backups" / "v1"))
    others = {key + b"-other": b"mine" for key in keys[::2]} | {b"\0mine": b"first", b"\xff\xff-mine": b"last"}
    with live_cluster(tmp_path / "cluster", ApiVersion.V1) as live:
        live.raw().batch_put(others)
        summary = restore_golden(live, golden, "v1", allow_overwrite=True)
        found = live.raw().checksum()
        assert rows_of(live).items() >= others.items()
    assert summary.verified
    assert summary.other_kvs == len(others)
    assert (summary.total_kvs, found.total_kvs) == (len(keys), len(keys) + len(others))
