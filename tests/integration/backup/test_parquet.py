"""Backups in Parquet: read by Arrow's own reader and by Spark, verified and searched by us."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.loaded import YEAR, Loaded, Sources, expiring
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.rows import find_value
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import BackupDamaged
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.tasks.session import spark_context
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


@pytest.fixture
def parquet(options: Options) -> Callable[..., BackupOptions]:
    """Return a function that makes the options of a backup into Parquet, in several files."""
    return functools.partial(options, file_kind=FileKind.PARQUET)


def files_of(folder: Path) -> list[Path]:
    """The data files, in no order."""
    return list(folder.rglob("*.parquet"))


def table_of(folder: Path) -> pa.Table:
    """All rows of a backup as Arrow reads the folder of files, by key."""
    return ds.dataset(folder / "parquet", format="parquet").to_table().sort_by("key")


@pytest.mark.parametrize(
    ("engine", "source", "target"),
    [
        ("scan", V1, V1),
        ("scan", V1, V2),
        ("scan", V1TTL, V1TTL),
        ("store", V1TTL, V2),
        ("scan", V2, V2),
        ("store", V2, V2),
    ],
)
def test_arrow_reads_every_row(
    engine: str,
    source: ApiVersion,
    target: ApiVersion,
    sources: Sources,
    parquet: Options,
    rows: dict[bytes, bytes],
) -> None:
    """User keys and values, expiries of the right second, timestamps as in SSTs; sums are those of the cluster."""
    loaded = sources(source)
    wanted = parquet(loaded.live, dst_api_version=target, engine=engine, checksum=True)
    summary = backup(wanted).summary
    folder = Path(wanted.storage.path)
    assert not list(folder.rglob("*.sst"))
    assert len(files_of(folder)) == summary.files > 1
    table = table_of(folder)
    assert table.schema.equals(SCHEMA)
    expected = rows | (expiring() if source.has_ttl else {})
    assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == expected
    assert table.num_rows == len(expected) == summary.total_kvs
    lasting = {
        key for key, expire in zip(table["key"].to_pylist(), table["expire_ts"].to_pylist(), strict=True) if not expire
    }
    assert lasting == rows.keys() - (expiring().keys() if source.has_ttl else set())
    assert all(abs(expire - loaded.at - YEAR) <= 30 for expire in table["expire_ts"].to_pylist() if expire)
    check_timestamps(set(table["ts"].to_pylist()), engine, source, target, summary.backup_ts, loaded)
    if source is target:
        counted = loaded.live.raw().checksum()
        assert (counted.crc64xor, counted.total_kvs) == (summary.crc64xor, summary.total_kvs)


def check_timestamps(
    found: set[int], engine: str, source: ApiVersion, target: ApiVersion, backup_ts: int, loaded: Loaded
) -> None:
    """Stores know the ts of each row; a scan does not, and stamps all rows alike."""
    if target is not V2:
        assert found == {0}
    elif source is not V2:
        assert found == {1}
    elif engine == "scan":
        assert found == {backup_ts}
    else:
        assert loaded.tso[0] < min(found) < max(found) < loaded.tso[1]


@pytest.mark.core("parquet")
def test_files_say_what_they_are(sources: Sources, parquet: Options) -> None:
    """Each file: its keyspace, API version and range; keys ascend and lie in it; its record fits its bytes."""
    wanted = parquet(sources(V2).live, engine="scan")
    backup(wanted)
    kept = BackupSet.open(open_store(wanted.storage))
    for file in kept.files:
        found = pq.ParquetFile(Path(wanted.storage.path) / file.name)
        facts = {key.decode(): value.decode() for key, value in found.metadata.metadata.items()}
        assert facts["tikv-br.format_version"] == "1"
        assert (facts["tikv-br.api_version"], facts["tikv-br.keyspace_id"]) == ("v2", "0")
        end = b"" if file.end_key == b"r\0\0\1" else file.end_key[4:]
        assert (facts["tikv-br.start_key"], facts["tikv-br.end_key"]) == (file.start_key[4:].hex(), end.hex())
        keys = found.read(["key"])["key"].to_pylist()
        assert keys == sorted(keys)
        assert all(file.start_key <= b"r\0\0\0" + key < file.end_key for key in (keys[0], keys[-1]))
        kept.verify_identity(file)
        kept.verify_content(file)


def test_all_levels_verify_it(sources: Sources, parquet: Options) -> None:
    """Listing, bytes and rows are right, and the cluster holds what the files hold, keys that expire too."""
    live = sources(V1TTL).live
    wanted = parquet(live, engine="scan")
    summary = backup(wanted).summary
    for level in Level:
        cluster = live.config if level is Level.RESTORE else None
        checked = verify(VerifyOptions(wanted.storage, level, cluster, executor="driver"))
        if level in {Level.DATA, Level.RESTORE}:
            assert checked.rows_checked == summary.total_kvs


def test_damage_is_found_at_the_level_that_promises_it(sources: Sources, parquet: Options) -> None:
    """A flipped bit of a page is found by every level that reads the file, and by the rows' own checksums."""
    wanted = parquet(sources(V1).live, engine="scan")
    backup(wanted)
    file = max(files_of(Path(wanted.storage.path)), key=lambda path: path.stat().st_size)
    sound = file.read_bytes()
    file.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    assert found(wanted, Level.META) == set()
    assert found(wanted, Level.FILES) == {Level.FILES}
    assert found(wanted, Level.DATA) == {Level.FILES, Level.DATA}


def found(options: BackupOptions, level: Level) -> set[Level]:
    """The levels of what a verification finds."""
    findings: list[Finding] = []
    try:
        verify(VerifyOptions(options.storage, level, executor="driver"), on_finding=findings.append)
    except BackupDamaged:
        assert findings
    return {finding.level for finding in findings}


def test_single_values_are_found(sources: Sources, parquet: Options, rows: dict[bytes, bytes]) -> None:
    """Cat finds each of some keys, and none that is not there."""
    wanted = parquet(sources(V2).live, engine="store")
    backup(wanted)
    kept = BackupSet.open(open_store(wanted.storage))
    for key in list(rows)[::97]:
        hit = find_value(kept, key)
        assert hit is not None
        assert (hit.stored.value, hit.stored.expire_ts, hit.stored.deleted) == (rows[key], 0, False)
        assert hit.ts > 0
    hit = find_value(kept, b"ttl0007")
    assert hit is not None
    assert hit.stored.expire_ts > 0
    for key in (b"row-gone", b"row-expired", b"row00007\0x"):
        assert find_value(kept, key) is None


def test_the_go_tool_refuses_it(sources: Sources, parquet: Options) -> None:
    """The Go tool compares the backupmeta's API version with the cluster's before anything else (restore_raw.go).

    Here it is one that no cluster has. RawKV it stays: other tools of the family refuse that themselves.
    """
    wanted = parquet(sources(V1).live, dst_api_version=V2)
    backup(wanted)
    meta = brpb_pb2.BackupMeta.FromString((Path(wanted.storage.path) / "backupmeta").read_bytes())
    assert meta.is_raw_kv
    assert meta.api_version == 1002
    assert meta.files


@pytest.mark.slow
def test_spark_reads_it_and_skips_what_it_need_not_read(
    sources: Sources, parquet: Options, rows: dict[bytes, bytes]
) -> None:
    """A folder of files is a DataFrame; a filter on the key is pushed down to the row groups' statistics."""
    from pyspark.sql import SparkSession

    wanted = parquet(sources(V1).live, engine="scan")
    backup(wanted)
    with spark_context("local[1]") as context:
        session = SparkSession(context)
        session.conf.set("spark.sql.adaptive.enabled", "false")  # so that the plan shown is the one that ran
        frame = session.read.parquet(f"{wanted.storage.path}/parquet")
        assert frame.columns == SCHEMA.names
        assert {(bytes(row.key), bytes(row.value)) for row in frame.select("key", "value").collect()} == set(
            rows.items()
        )
        chosen = frame.where("key >= X'726f773030313030' and key < X'726f773030313033'").select("key")
        assert {bytes(row.key) for row in chosen.collect()} == {b"row00100", b"row00101", b"row00102"}
        plan = chosen._jdf.queryExecution().executedPlan()
        scan = plan.collectLeaves().apply(0)
        assert 3 <= scan.metrics().apply("numOutputRows").value() < len(rows) / 2


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("source", [V1, V1TTL, V2])
def test_it_is_restored(
    source: ApiVersion, mode: Mode, sources: Sources, targets: Clusters, parquet: Options, rows: dict[bytes, bytes]
) -> None:
    """A cluster serves every row again, with its remaining TTL."""
    wanted = parquet(sources(source).live, engine="auto")
    backup(wanted)
    live = targets(source)
    live.raw().delete_range(EVERY_KEY)
    restored = restore(RestoreOptions(live.config, wanted.storage, mode=mode))
    expected = rows | (expiring() if source.has_ttl else {})
    assert live.raw().batch_get(expected) == expected
    assert restored.verified
    assert live.raw().checksum().total_kvs == len(expected)
    if source.has_ttl:
        left = live.raw().get_ttl(b"ttl0007")
        assert left is not None
        assert 0 < left <= YEAR
