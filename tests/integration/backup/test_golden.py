"""Our backup of the golden data against the backup that real stores made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.reading import golden_rows, rocksdb_rows
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store


@pytest.fixture(scope="module")
def source(golden: Path, clusters: Clusters) -> LiveCluster:
    """Return a V1 cluster with the golden V1 rows, split where the recorded cluster was."""
    live = clusters(ApiVersion.V1)
    live.raw().batch_put({row["k"]: row["v"] for row in golden_rows(golden / "backups" / "v1")})
    meta = json.loads((golden / "backups" / "v1" / "meta.json").read_text())
    live.split(*(bytes.fromhex(region["start_key"]) for region in meta["before"]["regions"] if region["start_key"]))
    live.scatter()
    counted = live.raw().checksum()
    assert counted.crc64xor == meta["before"]["crc64xor"]
    return live


@pytest.mark.parametrize(
    ("name", "target"),
    [("v1", ApiVersion.V1), pytest.param("v1_to_v2", ApiVersion.V2, marks=pytest.mark.core("backup"))],
)
def test_the_rows_are_those_that_real_stores_wrote(
    name: str, target: ApiVersion, golden: Path, source: LiveCluster, options: Options, tmp_path: Path
) -> None:
    """Internal keys and values are equal, byte for byte, and so are the sums that go into backupmeta."""
    recorded = golden / "backups" / name
    wanted = options(source, dst_api_version=target, executor="driver")
    summary = backup(wanted).summary
    theirs = rocksdb_rows(recorded / "data", tmp_path)
    assert rocksdb_rows(Path(wanted.storage.path), tmp_path) == theirs
    sums = json.loads((recorded / "meta.json").read_text())["backupmeta_file_sums"]
    assert {field: getattr(summary, field) for field in sums} == sums


def test_backupmeta_says_what_the_go_tools_does(golden: Path, source: LiveCluster, options: Options) -> None:
    """Field by field beside a golden backupmeta of the same conversion, where the two must agree."""
    wanted = options(source, dst_api_version=ApiVersion.V2)
    backup(wanted)
    ours, theirs = brpb_pb2.BackupMeta(), brpb_pb2.BackupMeta()
    ours.ParseFromString((Path(wanted.storage.path) / "backupmeta").read_bytes())
    theirs.ParseFromString((golden / "backups" / "v1_to_v2" / "data" / "backupmeta").read_bytes())
    assert ours.cluster_version == source.cluster.pd_http.cluster_version()
    for field in ("is_raw_kv", "api_version", "ddls", "version", "start_version"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.raw_ranges == theirs.raw_ranges
    assert {file.cf for file in ours.files} == {file.cf for file in theirs.files}
    assert ours.files[0].start_key == theirs.files[0].start_key
    assert ours.files[-1].end_key == theirs.files[-1].end_key
    folder = Path(wanted.storage.path)
    assert all((folder / file.name).stat().st_size == file.size for file in ours.files)


def test_the_records_open(source: LiveCluster, options: Options) -> None:
    """A second reading of the golden backup gives the cluster's id and no ledger is left."""
    wanted = options(source, dst_api_version=ApiVersion.V2)
    summary = backup(wanted).summary
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.cluster_id == summary.cluster_id == source.cluster.cluster_id
    assert not list((Path(wanted.storage.path) / "tikv-br").rglob("ledger/*"))
