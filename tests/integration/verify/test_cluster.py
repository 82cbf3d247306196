"""A live cluster held against a backup: equal in spite of expiring keys, and every difference found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import hard_rows, load
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.raw_calls import put_with_ttls
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.rawkv import RawClient
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import ApiVersionMismatch, BackupDamaged, ChecksumMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.verify.options import Finding, Level, Subset, VerifyOptions
from tikv_br.verify.run import VerifySummary, verify

ROWS = hard_rows(count=500)


@pytest.fixture(params=[ApiVersion.V1TTL, ApiVersion.V2], ids=lambda version: version.label)
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveCluster]:
    """A cluster of several regions with lasting rows."""
    with live_cluster(tmp_path / "cluster", request.param, stores=3) as cluster:
        load(cluster, ROWS)
        codec = cluster.raw().codec
        keys = sorted(ROWS)[:: len(ROWS) // 6][1:]
        cluster.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
        yield cluster


def back_up(live: LiveCluster, folder: Path, name: str = "backup") -> StorageLocation:
    """Take a backup in several files."""
    location = parse(f"local://{folder / name}")
    backup(
        BackupOptions(cluster=live.config, storage=location, file_bytes=20_000, safe_interval=0.0, executor="driver")
    )
    return location


def options(live: LiveCluster, location: StorageLocation) -> VerifyOptions:
    """Compare with that cluster."""
    return VerifyOptions(location, Level.RESTORE, live.config, executor="driver", concurrency=2)


def differences(asked: VerifyOptions) -> list[Finding]:
    """Differences in the cluster."""
    found: list[Finding] = []
    with pytest.raises(ChecksumMismatch):
        verify(asked, on_finding=found.append)
    assert all(finding.level is Level.RESTORE for finding in found)
    return found


def expiring(count: int, step: float) -> dict[bytes, int]:
    """Keys between the others, and the seconds after which each expires."""
    return {b"row%05d-expires" % number: max(1, round(number * step)) for number in range(count)}


def put_expiring(live: LiveCluster, ttls: dict[bytes, int]) -> None:
    """Put them."""
    put_with_ttls(live.raw(), [(key, b"for a while", ttl) for key, ttl in ttls.items()])


def test_keys_that_expire_break_no_comparison(live: LiveCluster, tmp_path: Path) -> None:
    """Some keys never expire, some in years, and every few moments one vanishes while the comparisons run."""
    began = time.monotonic()
    verify(options(live, back_up(live, tmp_path, "first")))
    # A slow machine, too, compares some times before the last has gone.
    longest = max(20.0, 10 * (time.monotonic() - began))
    ttls = expiring(200, longest / 200) | {b"years%03d" % number: 10**8 for number in range(50)}
    put_expiring(live, ttls)
    asked = options(live, back_up(live, tmp_path))
    counts: list[int] = []
    deadline = time.monotonic() + longest + 120
    while not counts or counts[-1] != len(ROWS) + 50:
        assert time.monotonic() < deadline, counts
        summary: VerifySummary = verify(asked)
        assert summary.files_checked == summary.files > 2
        counts.append(summary.rows_checked)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > len(ROWS) + 50
    assert len(set(counts)) > 3


@pytest.mark.core("verify")
def test_differences_are_found_among_expiring_keys(live: LiveCluster, tmp_path: Path) -> None:
    """A lost, a changed and an added key, in three files, while others expire: three findings, each names its file."""
    put_expiring(live, expiring(200, 0.05))
    location = back_up(live, tmp_path)
    raw = live.raw()
    files = [file for file in BackupSet.open(open_store(location)).files if lasting(raw, file)][:3]
    victims = [lasting(raw, file)[0] for file in files]
    raw.delete(victims[0])
    raw.put(victims[1], b"changed")
    raw.put(victims[2] + b"\0added", b"new")
    found = differences(options(live, location))
    assert sorted(finding.object for finding in found) == sorted(file.name for file in files)
    assert all(finding.object in finding.cause for finding in found)


def lasting(raw: RawClient, file: FileEntry) -> list[bytes]:
    """The keys that never expire in a file's range."""
    return [
        key
        for key in sorted(ROWS)
        if file.key_range.contains(KeyRange(raw.codec.rpc_key(key), raw.codec.rpc_key(key) + b"\0"))
    ]


def test_rows_that_the_backup_lacks_altogether(live: LiveCluster, tmp_path: Path) -> None:
    """If the backup has a range without a file, the cluster must have no row there: unless only a subset is checked."""
    asked = options(live, back_up(live, tmp_path))
    summary = verify(asked)
    assert summary.ranges_compared >= summary.files
    part = verify(structs.replace(asked, subset=Subset.parse("30%")))
    assert 0 < part.files_checked == part.ranges_compared < part.files


def test_an_empty_cluster_lacks_every_file(live: LiveCluster, tmp_path: Path) -> None:
    """All files are named, not only the first."""
    location = back_up(live, tmp_path)
    live.raw().delete_range(EVERY_KEY)
    found = differences(options(live, location))
    files = {str(path.relative_to(location.path)) for path in Path(location.path).rglob("*.sst")}
    assert {finding.object for finding in found} == files


def test_damage_counts_more_than_a_difference(live: LiveCluster, tmp_path: Path) -> None:
    """A file is missing and the cluster differs elsewhere: the backup is what must not be used."""
    location = back_up(live, tmp_path)
    files = sorted(Path(location.path).rglob("*.sst"))
    files[0].unlink()
    live.raw().delete_range(EVERY_KEY)
    found: list[Finding] = []
    with pytest.raises(BackupDamaged, match=f"{len(files)} findings"):
        verify(options(live, location), on_finding=found.append)
    assert {finding.level for finding in found} == {Level.META, Level.RESTORE}


def test_a_cluster_of_another_encoding_is_refused(live: LiveCluster, tmp_path: Path) -> None:
    """Rows in another encoding cannot be compared by the servers' checksums."""
    location = back_up(live, tmp_path)
    with live_cluster(tmp_path / "v1", ApiVersion.V1) as other, pytest.raises(ApiVersionMismatch):
        verify(options(other, location))
