"""Restores where stores cannot reach the storage: files are read and sent from here, and nothing unsound gets through."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.backup.data import load, when
from tests.integration.backup.reading import golden_rows
from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.integration.restore.restores import break_off, leftovers, restore_golden
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.files import FileKind
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import BackupDamaged, BackupUnsupported, StorageObjectMissing
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.progress_events import StepStarted
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.run import RestoreSummary, restore
from tikv_br.storage.url import StorageLocation, parse


def run(live: LiveCluster, location: StorageLocation, **changes: object) -> RestoreSummary:
    """Restore, by default by uploads."""
    settings = {"via": Via.UPLOAD, **changes}
    return restore(RestoreOptions(cluster=live.config, storage=location, **settings))  # type: ignore[arg-type]


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stores fail to find a directory, as if it were on another machine."""
    nowhere = brpb_pb2.StorageBackend(local=brpb_pb2.Local(path="/of/another/machine"))
    monkeypatch.setattr("tikv_br.restore.transfer.to_backend", lambda *_arguments, **_more: nowhere)


@pytest.mark.parametrize("name", ["v1", "v1ttl", "v2"])
def test_a_recorded_backup_is_uploaded_whole(golden: Path, tmp_path: Path, name: str) -> None:
    """Rows, TTLs and the servers' checksum are those that were recorded, and no store has fetched anything."""
    expected = golden_rows(golden / "backups" / name)
    version = {"v1": ApiVersion.V1, "v1ttl": ApiVersion.V1TTL, "v2": ApiVersion.V2}[name]
    with live_cluster(tmp_path / "cluster", version) as live:
        downloads = live.fail("Download", {"delay": {"seconds": 0}}, count=-1)
        summary = restore_golden(live, golden, name, via=Via.UPLOAD)
        assert live.hits(downloads) == 0
        raw = live.raw()
        rows = {raw.codec.rpc_key(key): value for key, value in rows_of(live).items()}
        now = time.time()
        ttls = [(row, raw.get_ttl(raw.codec.user_key(row["k"]))) for row in expected if row["e"]][:20]
    assert rows == {row["k"]: row["v"] for row in expected}
    assert summary.verified
    assert summary.uploaded_files == summary.files
    assert all(abs(row["e"] - now - (ttl or 0)) < 30 for row, ttl in ttls)


@pytest.mark.usefixtures("blind")
def test_files_that_stores_cannot_find_are_sent(source: StorageLocation, target: LiveCluster) -> None:
    """By default a file that only this machine sees is uploaded; with --via stores it is an error."""
    with pytest.raises(StorageObjectMissing) as raised:
        run(target, source, via=Via.STORES)
    assert "--via upload" in raised.value.hint
    summary = run(target, source, via=Via.AUTO)
    assert summary.uploaded_files == summary.files >= FILES
    assert rows_of(target) == ROWS


def test_files_that_stores_can_fetch_are_not_sent(source: StorageLocation, target: LiveCluster) -> None:
    """By default stores fetch if they can."""
    assert run(target, source, via=Via.AUTO).uploaded_files == 0


def test_regions_cut_uploads_and_any_prefix_goes(source: StorageLocation, target: LiveCluster) -> None:
    """Each region gets its rows only, under names that no store could have given them."""
    keyspace = target.create_keyspace("ks3")
    codec = KeyCodec(ApiVersion.V2, keyspace)
    split = [codec.bound(codec.rpc_key(b"any length" + key[3:])) for key in (b"row00100", b"row00333")]
    target.split(*split)
    summary = run(target, source, to_keyspace="ks3", rewrite_prefix=(b"row", b"any length"))
    assert summary.regions > summary.files
    assert summary.verified
    wanted = {b"any length" + key[3:]: value for key, value in ROWS.items() if key.startswith(b"row")}
    assert rows_of(target, keyspace) == wanted


@pytest.mark.parametrize(
    ("rpc", "action"),
    [
        ("Upload", {"drop": {}}),
        ("Ingest", {"region_error": {"epoch_not_match": {}}}),
        ("Ingest", {"region_error": {"stale_command": {}}}),
    ],
)
def test_failed_uploads_are_repeated(
    source: StorageLocation, target: LiveCluster, rpc: str, action: dict[str, object]
) -> None:
    """Each try is a file of its own at the stores: they refuse a second one of the same name."""
    failpoint = target.fail(rpc, action, count=2, skip=3)
    assert run(target, source).verified
    assert target.hits(failpoint) == 2
    assert rows_of(target) == ROWS


def test_a_damaged_block_never_gets_to_a_store(source: StorageLocation, target: LiveCluster, tmp_path: Path) -> None:
    """A store would die of it: damage between check and reading ends the restore as damage, and no fatal_request is recorded."""
    location = parse(f"local://{tmp_path / 'fresh'}")
    with live_cluster(tmp_path / "fresh-source", ApiVersion.V2) as live:
        load(live, {b"key%d" % number: b"value" * number for number in range(100)})
        backup(BackupOptions(cluster=live.config, storage=location, safe_interval=0.0, executor="driver"))
    file = max(Path(location.path).rglob("*.sst"))
    data = bytearray(file.read_bytes())
    data[30] ^= 1
    options = RestoreOptions(cluster=target.config, storage=location, via=Via.UPLOAD)
    with pytest.raises(BackupDamaged, match=file.name):
        restore(options, when(StepStarted, "ingest", lambda: file.write_bytes(data)))
    assert rows_of(target) == {}


def test_parquet_becomes_ssts_here(target: LiveCluster, tmp_path: Path) -> None:
    """Stores take in no Parquet; by default its rows are ingested all the same, with their own expiries."""
    location = parse(f"local://{tmp_path / 'parquet'}")
    with live_cluster(tmp_path / "v2-source", ApiVersion.V2) as live:
        load(live, {b"lasting%d" % number: b"value" for number in range(100)})
        load(live, {b"expiring": b"value"}, ttl=5000)
        backup(BackupOptions(live.config, location, safe_interval=0.0, file_kind=FileKind.PARQUET, executor="driver"))
        rows = rows_of(live)
    with pytest.raises(BackupUnsupported, match="Parquet"):
        run(target, location, via=Via.STORES)
    summary = run(target, location, via=Via.AUTO)
    assert summary.verified
    assert summary.uploaded_files == summary.files
    assert rows_of(target) == rows
    assert 4000 < (target.raw().get_ttl(b"expiring") or 0) <= 5000


def test_a_restore_by_uploads_goes_on(source: StorageLocation, target: LiveCluster) -> None:
    """Ended in the middle, only what is missing is sent."""
    break_off(target, source, via=Via.UPLOAD)
    summary = run(target, source)
    assert summary.resumed_files + summary.uploaded_files == summary.files
    assert rows_of(target) == ROWS
    assert leftovers(source) == []
