"""Files of stores: complete with ts and expiry, restorable, verified; and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import hard_rows, load
from tests.integration.backup.reading import golden_rows, rocksdb_rows
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
GOLDEN = {"v1ttl": (V1TTL, V1TTL, "v1ttl"), "v1ttl_to_v2": (V1TTL, V2, "v1ttl"), "v2": (V2, V2, "v2")}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_rows_are_those_that_real_stores_wrote(name: str, golden: Path, options: Options, tmp_path: Path) -> None:
    """A recorded backup is restored, backed up, and equal in every internal key and value: ts and expiry are kept."""
    source, target, origin = GOLDEN[name]
    with live_cluster(tmp_path / "cluster", source, stores=3) as live:
        recorded = parse(f"local://{golden / 'backups' / origin / 'data'}")
        restore(RestoreOptions(cluster=live.config, storage=recorded, state=parse(f"local://{tmp_path / 'state'}")))
        wanted = options(live, engine="auto", dst_api_version=target, safe_interval=0, checksum=True)
        summary = backup(wanted).summary
    assert (summary.engine, "expiry" in summary.engine_reason) == ("store", True)
    found = rocksdb_rows(Path(wanted.storage.path), tmp_path)
    assert found == rocksdb_rows(golden / "backups" / name / "data", tmp_path)
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.manifest is not None
    assert (kept.manifest.description.engine, kept.manifest.description.engine_reason) == (
        "store",
        summary.engine_reason,
    )
    expiries = [row["e"] for row in golden_rows(golden / "backups" / name) if row["e"]]
    assert sum(file.expiry.total_kvs for file in kept.files) == len(expiries) > 0
    verify(VerifyOptions(storage=wanted.storage, level=Level.DATA))


@pytest.mark.parametrize(
    ("source", "target"), [(V1, V1), (V1, V2), pytest.param(V1TTL, V2, marks=pytest.mark.core("backup")), (V2, V2)]
)
def test_a_backup_by_stores_restores_completely(
    source: ApiVersion, target: ApiVersion, clusters: Clusters, options: Options, tmp_path: Path
) -> None:
    """Backed up by the stores, restored into another cluster: every row is there, and the clusters' checksums agree."""
    live, rows = clusters(source), hard_rows(count=300)
    live.raw().delete_range(EVERY_KEY)  # what other tests have left
    load(live, rows)
    wanted = options(live, engine="store", dst_api_version=target, gc_ttl=0, safe_interval=0)
    summary = backup(wanted).summary
    with live_cluster(tmp_path / "target", target, stores=3) as other:
        assert restore(RestoreOptions(cluster=other.config, storage=wanted.storage)).verified
        verify(VerifyOptions(storage=wanted.storage, level=Level.RESTORE, cluster=other.config))
        found = other.raw().checksum()
        assert (found.crc64xor, found.total_kvs) == (summary.crc64xor, len(rows))
        assert {key: other.raw().get(key) for key in list(rows)[::50]} == {key: rows[key] for key in list(rows)[::50]}


def test_an_empty_keyspace_leaves_no_folder(clusters: Clusters, options: Options) -> None:
    """The stores are asked, answer without files, and the backup covers the range."""
    clusters(V2).create_keyspace("ks77")
    wanted = options(clusters(V2), engine="store", keyspaces=("ks77",), gc_ttl=0, allow_empty=True)
    assert backup(wanted).summary.files == 0
    assert BackupSet.open(open_store(wanted.storage)).files == ()
    assert not (Path(wanted.storage.path) / "sst").exists()


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.SNAPPY, Compression.ZSTD])
def test_the_compression_is_passed_on(compression: Compression, clusters: Clusters, options: Options) -> None:
    """The metadata of the files has the compression."""
    live = clusters(V1)
    load(live, {b"c%d" % number: b"v" * 100 for number in range(100)})
    wanted = options(live, engine="store", ranges=(KeyRange(b"c", b"d"),), compression=compression)
    backup(wanted)
    (file,) = Path(wanted.storage.path).rglob("*.sst")
    said = SstReader(MemorySource(file.read_bytes())).table.properties["rocksdb.compression"]
    assert said == compression.property_name.encode()


def test_a_range_is_cut_to_the_byte(clusters: Clusters, options: Options, tmp_path: Path) -> None:
    """Start is inclusive, end exclusive, and neither needs to be a key or a region's bound."""
    live = clusters(V1TTL)
    load(live, {key: key for key in (b"ra", b"rb", b"rb\0", b"rc")})
    wanted = options(live, engine="store", ranges=(KeyRange(b"rb", b"rb\0"),))
    assert backup(wanted).summary.total_kvs == 1
    assert rocksdb_rows(Path(wanted.storage.path), tmp_path) == {b"zrb": b"rb" + bytes(8)}


def test_rows_without_ttl_are_found_to_be_so(clusters: Clusters, options: Options) -> None:
    """Taken to be without TTL, files are not read for it; otherwise each row's expiry is recorded."""
    live: LiveCluster = clusters(V1TTL)
    live.raw().batch_put({b"t%02d" % number: b"v" for number in range(20)}, 100_000)
    for assume, expected in ((True, 0), (False, 20)):
        wanted = options(live, engine="store", ranges=(KeyRange(b"t", b"u"),), assume_no_ttl=assume)
        backup(wanted)
        kept = BackupSet.open(open_store(wanted.storage))
        assert sum(file.expiry.total_kvs for file in kept.files) == expected
