"""A backup compared with a cluster, and the cluster repaired from it."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.integration.diff.conftest import ROWS, Clusters, fill, found, plant
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.openssl import crypter
from tests.support.raw_calls import put_with_ttls
from tikv_br.backup.run import backup
from tikv_br.backupset.files import FileKind
from tikv_br.compare.report import DifferenceKind
from tikv_br.dataflow.options import BackupOptions
from tikv_br.diff.places import BackupChoice, ClusterChoice, DiffOptions
from tikv_br.diff.run import diff, repair
from tikv_br.errors import BackupDamaged, BackupNotFound, CrypterMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify


def back_up(live: LiveCluster, folder: Path, **changes: Any) -> StorageLocation:  # noqa: ANN401 - any option
    """Back up in several files."""
    place = StorageLocation("local", str(folder / "backup"))
    usual: dict[str, Any] = {"storage": place, "file_bytes": 40_000, "safe_interval": 0.0}
    backup(BackupOptions(cluster=live.config, executor="driver", concurrency=2, **(usual | changes)))
    return place


def asked(place: StorageLocation, live: LiveCluster, **changes: Any) -> DiffOptions:  # noqa: ANN401 - any option
    """Compare a backup with a cluster, and name all keys."""
    return structs.replace(
        DiffOptions(BackupChoice(place), ClusterChoice(live.config), keys=10_000, concurrency=2), **changes
    )


def without_files(place: StorageLocation) -> None:
    """Leave of a backup what is recorded, and no data."""
    for path in Path(place.path).rglob("*.sst"):
        path.unlink()


@pytest.mark.parametrize("version", ["v1", "v1ttl", "v2"])
def test_equal_needs_no_file_and_no_scan(version: str, clusters: Clusters, tmp_path: Path) -> None:
    """The servers' checksums are what is recorded: the data files may even be gone, and no RawScan is sent."""
    live = clusters(f"{version}-a")
    fill(live, ROWS)
    place = back_up(live, tmp_path)
    without_files(place)
    scans = live.fail("RawScan", {"delay": {"seconds": 0}}, count=-1)
    try:
        result = diff(asked(place, live))
        assert live.hits(scans) == 0
    finally:
        live.heal()
    assert (result.keys, result.ranges) == ([], [])
    assert result.summary.rows == len(ROWS)
    assert result.summary.ranges > 3


@pytest.mark.parametrize(
    ("source", "form", "target"),
    [("v1-a", ApiVersion.V1, "v1-b"), ("v1-a", ApiVersion.V2, "v1-b"), ("v2-a", None, "v2-b"), ("v1-a", None, "v2-b")],
)
def test_planted_differences_are_found_and_put_right(
    source: str, form: ApiVersion | None, target: str, clusters: Clusters, tmp_path: Path
) -> None:
    """In the backup's own form of keys and in the other, in which recorded sums cannot be compared."""
    origin, live = clusters(source), clusters(target)
    fill(origin, ROWS)
    place = back_up(origin, tmp_path, **({"dst_api_version": form} if form else {}))
    fill(live, ROWS)
    assert diff(asked(place, live)).summary.remaining == 0
    planted = plant(live, seed=21)
    assert found(diff(asked(place, live))) == planted
    assert found(diff(asked(place, live, exact=True))) == planted
    done = repair(diff(asked(place, live)), delete=True)
    assert (done.summary.puts, done.summary.deletes, done.summary.remaining) == (9, 4, 0)
    assert contents(live) == ROWS


@pytest.mark.parametrize("kind", FileKind)
def test_encrypted_backups_of_either_kind(kind: FileKind, clusters: Clusters, tmp_path: Path) -> None:
    """SSTs and Parquet files are read through their encryption where recorded sums do not suffice, and only there."""
    live = clusters("v2-a")
    fill(live, ROWS)
    place = replace(StorageLocation("local", str(tmp_path / "encrypted")), crypter=crypter("aes256-ctr"))
    back_up(live, tmp_path, storage=place, file_kind=kind)
    assert diff(asked(place, live)).summary.remaining == 0
    planted = plant(live, seed=8)
    assert found(repair(diff(asked(place, live)), delete=True)) == planted
    assert contents(live) == ROWS
    with pytest.raises(CrypterMismatch):
        diff(asked(replace(place, crypter=crypter("aes128-ctr")), live))


def test_a_backup_of_several_keyspaces(clusters: Clusters, tmp_path: Path) -> None:
    """The keyspace must be said; each is compared with the one of the same id, or another one."""
    live = clusters("v2-a")
    first, second = (live.create_keyspace(name) for name in ("ks1", "ks4242"))
    fill(live, ROWS, first)
    fill(live, {b"other": b"rows"}, second)
    place = back_up(live, tmp_path, keyspaces=("ks1", "ks4242"))
    with pytest.raises(UsageError, match=rf"several keyspaces: ks1 \({first}\), ks4242 \({second}\)"):
        diff(asked(place, live))
    for keyspace, rows in ((str(first), len(ROWS)), (str(second), 1)):
        result = diff(asked(place, live, a=BackupChoice(place, keyspace)))
        assert (result.summary.rows, result.summary.remaining) == (rows, 0)
    across = DiffOptions(BackupChoice(place, str(second)), ClusterChoice(live.config, "ks1"))
    assert (diff(across).summary.only_a, diff(across).summary.only_b) == (1, len(ROWS))


def test_exact_shows_changes_that_cancel_out_in_checksums(clusters: Clusters, tmp_path: Path) -> None:
    """Two rows with the same change keep the checksum of a file: only a comparison of all rows shows them."""
    live = clusters("v2-a")
    orders = {b"order1": b"pending", b"order2": b"pending"}
    fill(live, orders)
    place = back_up(live, tmp_path)
    live.raw().batch_put(dict.fromkeys(orders, b"settled"))
    assert verify(VerifyOptions(place, Level.RESTORE, live.config, executor="driver")).rows_checked == 2
    assert diff(asked(place, live)).keys == []
    assert found(diff(asked(place, live, exact=True))) == dict.fromkeys(orders, DifferenceKind.VALUE)


def test_a_range_that_cuts_files(clusters: Clusters, tmp_path: Path) -> None:
    """Only what lies inside is compared; a range that the backup does not have is refused."""
    live = clusters("v2-a")
    fill(live, ROWS)
    place = back_up(live, tmp_path, ranges=(KeyRange(b"row00100", b"row00900"),))
    live.raw().batch_delete([b"row00050", b"row00200", b"row00300", b"row00950"])
    assert found(diff(asked(place, live))) == dict.fromkeys((b"row00200", b"row00300"), DifferenceKind.ONLY_A)
    assert found(diff(asked(place, live, span=KeyRange(b"row00250", b"row00301")))) == {
        b"row00300": DifferenceKind.ONLY_A
    }
    with pytest.raises(UsageError, match="no part of the requested range"):
        diff(asked(place, live, span=KeyRange(b"row00900", b"")))


def test_rows_that_expire_meanwhile(clusters: Clusters, tmp_path: Path) -> None:
    """While rows expire one after the other nothing differs; one lost before its time does, and comes back with it."""
    live = clusters("v1ttl-a")
    fill(live, ROWS)
    rows = [(b"row%05d-expires" % number, b"for a while", 1 + number // 40) for number in range(200)]
    put_with_ttls(live.raw(), [*rows, (b"row00700-in-an-hour", b"v", 3600)])
    place = back_up(live, tmp_path, engine="store")
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        assert diff(asked(place, live)).keys == []
    live.raw().delete(b"row00700-in-an-hour")
    result = repair(diff(asked(place, live)))
    [key] = result.keys
    assert (key.key, key.kind) == (b"row00700-in-an-hour", DifferenceKind.ONLY_A)
    assert 2000 < key.expires_in <= 3600
    assert result.summary.puts == 1
    assert result.summary.remaining == 0
    ttl = live.raw().get_ttl(b"row00700-in-an-hour")
    assert ttl is not None
    assert 2000 < ttl <= 3600


@pytest.mark.parametrize(
    ("name", "version", "keyspace"),
    [
        ("v1ttl", "V1TTL", 0),
        pytest.param("v2_ks4242_rpc", "V2", 4242, marks=pytest.mark.emulator_only("a keyspace of a certain id")),
    ],
)
def test_a_recorded_backup(name: str, version: str, keyspace: int, golden: Path, tmp_path: Path) -> None:
    """A backup of the Go tool equals the cluster it was restored into; planted differences are found and repaired."""
    place = parse(f"local://{golden / 'backups' / name / 'data'}")
    with live_cluster(tmp_path / "cluster", ApiVersion[version], stores=1) as live:
        restore(RestoreOptions(cluster=live.config, storage=place))
        assert diff(asked(place, live)).keys == []
        before = contents(live, keyspace)
        victims = sorted(before)[:: len(before) // 3][:3]
        raw = live.raw(keyspace)
        raw.delete(victims[0])
        raw.put(victims[1], before[victims[1]] + b"!")
        expected = {victims[0]: DifferenceKind.ONLY_A, victims[1]: DifferenceKind.VALUE}
        assert found(diff(asked(place, live))) == expected
        assert repair(diff(asked(place, live))).summary.remaining == 0
        assert contents(live, keyspace) == before


def test_a_backup_that_cannot_be_read(clusters: Clusters, tmp_path: Path) -> None:
    """None there, or a damaged file where it is needed: said so, never taken for equal or different."""
    live = clusters("v1-a")
    fill(live, ROWS)
    with pytest.raises(BackupNotFound):
        diff(asked(StorageLocation("local", str(tmp_path / "nothing")), live))
    place = back_up(live, tmp_path)
    live.raw().delete(b"row00700")
    for path in Path(place.path).rglob("*.sst"):
        shutil.copyfile(path, path.with_suffix(".copy"))
        path.write_bytes(path.with_suffix(".copy").read_bytes()[:-100])
    with pytest.raises(BackupDamaged):
        diff(asked(place, live))
