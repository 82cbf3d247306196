"""The Spark data sources: Spark reads and writes playgrounds, and our own client shows what they hold."""

from __future__ import annotations

import pickle
import runpy
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tests.support.openssl import KEYS, crypter
from tests.support.ports import reserved_ports
from tests.support.tools import ROOT
from tikv_br.backup.run import backup
from tikv_br.backupset.files import FileKind
from tikv_br.bulk_load import runs
from tikv_br.bulk_load.partition import PartitionResult
from tikv_br.dataflow.options import BackupOptions
from tikv_br.datasource import TikvBackupDataSource, TikvDataSource
from tikv_br.errors import ClusterUnreachable, TargetNotEmpty, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.session import spark_context

pytestmark = pytest.mark.slow
KEYSPACE = 5
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
DAY = 86_400


def rows_from(first: int, last: int) -> dict[bytes, bytes]:
    """Rows of different sizes, with values that are empty or no text among them."""
    return {b"user%04d" % number: bytes([number % 256]) * (number % 9) for number in range(first, last)}


ROWS = rows_from(0, 1000) | {b"": b"empty key", b"\xff\xff": b"last", b"order1": b"x" * 5000}
BOUNDS = (b"user0200", b"user0400", b"user0600")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session on two threads."""
    with spark_context("local[2]") as context:
        session = SparkSession(context)
        session.conf.set("spark.sql.shuffle.partitions", "2")
        session.dataSource.register(TikvDataSource)
        session.dataSource.register(TikvBackupDataSource)
        yield session


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster with rows in a keyspace of four regions, and other rows in the default keyspace."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=2) as live:
        make_keyspaces(live, 32)
        raw = live.raw(KEYSPACE)
        raw.batch_put(ROWS)
        live.raw().batch_put({b"user0001": b"of another keyspace"})
        live.split(*(raw.codec.bound(raw.codec.rpc_key(key)) for key in BOUNDS))
        live.scatter()
        yield live


@pytest.fixture(scope="module")
def v1ttl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """An empty V1TTL cluster."""
    with live_cluster(tmp_path_factory.mktemp("v1ttl"), ApiVersion.V1TTL, stores=1) as live:
        yield live


def options(live: LiveCluster, **more: str) -> dict[str, str]:
    """Options that make a partition of each region of a keyspace."""
    return {"pd": live.pd, "keyspace": str(KEYSPACE), "partition_bytes": "1", **more}


def pairs(frame: DataFrame) -> dict[bytes, bytes]:
    """Keys and values; fails on a key that is there twice."""
    rows = frame.select("key", "value").collect()
    found = {bytes(row["key"]): bytes(row["value"]) for row in rows}
    assert len(found) == len(rows)
    return found


def source_pairs(source: Any, partitions: list[Any], reader: Any) -> dict[bytes, bytes]:  # noqa: ANN401
    """Keys and values of all partitions, read in this process."""
    rows = [row for each in partitions for batch in reader.read(each) for row in batch.to_pylist()]
    found = {row["key"]: row["value"] for row in rows}
    assert len(found) == len(rows), source.name()
    return found


def schema_of(text: str) -> StructType:
    """The columns of a text such as ``key binary``."""
    types = {"binary": BinaryType(), "string": StringType(), "int": IntegerType()}
    columns = (column.split() for column in text.split(", "))
    return StructType([StructField(name, types[kind]) for name, kind in columns])


def requests(live: LiveCluster) -> int:
    """Scans since the last `forget_calls`."""
    return int(live.calls()["rpcs"].get("RawScan", {"calls": 0})["calls"])


def test_a_script_without_an_activated_environment(
    spark: SparkSession, live: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would start the ``python3`` of the PATH, which has no tikv-br: a source that is registered has this one started instead."""
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(tmp_path / "bare" / "bin" / "python"))
    spark.dataSource.register(TikvDataSource)
    assert pairs(spark.read.format("tikv").options(**options(live)).load()) == ROWS


def test_all_rows_of_a_keyspace_once(spark: SparkSession, live: LiveCluster) -> None:
    """A partition per region, and every row in one of them."""
    frame = spark.read.format("tikv").options(**options(live)).load()
    assert frame.rdd.getNumPartitions() == len(BOUNDS) + 1
    assert pairs(frame) == ROWS == contents(live, KEYSPACE)
    one = spark.read.format("tikv").options(**options(live, partition_bytes=str(1 << 30))).load()
    assert one.rdd.getNumPartitions() == 1


def test_regions_that_split_after_planning(live: LiveCluster) -> None:
    """Partitions are ranges of keys: changes of regions neither lose nor repeat a row."""
    keyspace_id = 20
    raw = live.raw(keyspace_id)
    raw.batch_put(ROWS)
    codec = raw.codec
    live.split(codec.bound(codec.rpc_key(b"user0500")))
    source = TikvDataSource(options(live, keyspace=str(keyspace_id)))
    reader = source.reader(source.schema())
    partitions = list(reader.partitions())
    assert len(partitions) == 2
    live.split(*(codec.bound(codec.rpc_key(key)) for key in (b"order", b"user0300", b"user0401", b"user0999")))
    live.scatter()
    assert source_pairs(source, partitions, reader) == ROWS


def test_filters_are_pushed_down(spark: SparkSession, live: LiveCluster) -> None:
    """The result is what Spark filters itself, with the scans of the wanted range only."""
    plain = spark.read.format("tikv").options(**options(live)).load()
    pushing = spark.read.format("tikv").options(**options(live, pushdown="true")).load()
    condition = (
        (f.col("key") >= f.lit(b"user0250")) & (f.col("key") < f.lit(b"user0260")) & (f.octet_length("value") > 3)
    )
    counts = []
    spark.conf.set(PUSHDOWN, "true")
    try:
        for frame in (plain, pushing):
            live.forget_calls()
            expected = {k: v for k, v in rows_from(250, 260).items() if len(v) > 3}
            assert pairs(frame.where(condition)) == expected
            counts.append(requests(live))
        live.forget_calls()
        assert pairs(pushing.where(f.col("key").isin(b"user0001", b"user0999", b"nobody"))) == {
            key: ROWS[key] for key in (b"user0001", b"user0999")
        }
        assert pairs(pushing.where((f.col("key") < f.lit(b"a")) & (f.col("key") > f.lit(b"b")))) == {}
    finally:
        spark.conf.unset(PUSHDOWN)
    assert counts[0] > len(BOUNDS)
    assert counts[1] == 1
    prefix = spark.read.format("tikv").options(**options(live, prefix="user00")).load()
    assert pairs(prefix) == rows_from(0, 100)


def test_expiry(spark: SparkSession, v1ttl: LiveCluster) -> None:
    """Rows that expire have the time at which they do; written with it, or with a TTL, they keep it; what is over is left out."""
    raw, now = v1ttl.raw(), time.time()
    raw.put(b"read/day", b"1", DAY)
    raw.put(b"read/never", b"2")
    frame = spark.read.format("tikv").options(pd=v1ttl.pd, ttl="true", prefix="read/").load()
    found = {bytes(row["key"]): row["expire_ts"] for row in frame.collect()}
    assert found[b"read/day"] == pytest.approx(now + DAY, abs=600)
    assert found == {b"read/day": found[b"read/day"], b"read/never": 0}
    copies = frame.withColumn("key", f.concat(f.lit(b"copy/"), "key"))
    copies.write.format("tikv").mode("append").options(pd=v1ttl.pd).save()
    given = [(b"ttl/day", b"3", DAY), (b"ttl/never", b"4", None)]
    rows = spark.createDataFrame(given, "key binary, value binary, ttl int")
    rows.write.format("tikv").mode("append").options(pd=v1ttl.pd).save()
    over = spark.createDataFrame([(b"over", b"5", 1)], "key binary, value binary, expire_ts long")
    over.write.format("tikv").mode("append").options(pd=v1ttl.pd).save()
    for key in (b"copy/read/day", b"ttl/day"):
        assert raw.get_ttl(key) == pytest.approx(DAY, abs=600)
    assert raw.get_ttl(b"copy/read/never") == raw.get_ttl(b"ttl/never") == 0
    assert raw.get(b"over") is None


def test_written_rows_are_there(spark: SparkSession, live: LiveCluster) -> None:
    """Append writes new keys and replaces values of known ones, in this keyspace only."""
    written = {b"written%03d" % number: bytes([number]) for number in range(200)}
    raw = live.raw(9)
    raw.put(b"written007", b"old")
    frame = spark.createDataFrame(list(written.items()), "key binary, value binary").repartition(3)
    frame.write.format("tikv").mode("append").options(pd=live.pd, keyspace="9").save()
    assert contents(live, 9) == written


@pytest.mark.parametrize(
    ("mode", "schema", "given", "message"),
    [
        ("overwrite", "key binary, value binary", {}, 'mode("overwrite") is not supported'),
        ("append", "key binary, value binary", {"ingest": "true"}, "option staging is missing"),
        ("append", "key binary, value binary", {"staging": "/tmp"}, "option staging needs option ingest"),
        (
            "append",
            "key binary, value binary",
            {"ingest": "true", "staging": "s3://bucket/x?access-key=alice&secret-access-key=s"},
            "contains credentials",
        ),
        ("append", "key string, value binary", {}, "column key is string"),
        ("append", "key binary, payload binary", {}, "cannot write column 'payload'"),
        ("append", "key binary, value binary", {"keyspace": "nobody"}, "no keyspace 'nobody'"),
        ("append", "key binary, value binary", {"pushdown": "true"}, "unknown option 'pushdown'"),
    ],
)
def test_refused_writes(live: LiveCluster, mode: str, schema: str, given: Mapping[str, str], message: str) -> None:
    """Before any row is written, with a hint."""
    source = TikvDataSource({"pd": live.pd, "keyspace": "9", **given})
    with pytest.raises(UsageError) as caught:
        source.writer(schema_of(schema), overwrite=mode == "overwrite")
    assert message in caught.value.message
    assert caught.value.__notes__


def test_nulls_are_refused(live: LiveCluster) -> None:
    """A key or value that is null has no meaning in a cluster; nor has a negative TTL."""
    writer = TikvDataSource({"pd": live.pd, "keyspace": "9"}).writer(
        schema_of("key binary, value binary, ttl int"), overwrite=False
    )
    for row in ({"key": None, "value": b"x", "ttl": 0}, {"key": b"null", "value": b"x", "ttl": -1}):
        with pytest.raises(UsageError, match="cannot write these rows"):
            writer.write(iter([pa.RecordBatch.from_pylist([row])]))
    assert live.raw(9).get(b"null") is None


def ingest(live: LiveCluster, frame: DataFrame, keyspace_id: int, folder: Path, **more: str) -> None:
    """Write a DataFrame by SSTs, staged in a folder."""
    options = {"pd": live.pd, "keyspace": str(keyspace_id), "ingest": "true", "staging": str(folder), **more}
    frame.write.format("tikv").mode("append").options(**options).save()


def files_in(folder: Path) -> list[Path]:
    """The files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_ingested_rows_are_there(spark: SparkSession, live: LiveCluster, tmp_path: Path) -> None:
    """Rows in no order, in several partitions, some with a TTL, come by SSTs; other keyspaces stay, and nothing stays staged."""
    rows = {b"in%05d" % (number * 7919 % 3000): b"%d" % number * (number % 7) for number in range(3000)}
    given = [(key, value, DAY if key.endswith(b"7") else None) for key, value in rows.items()]
    given.append((b"in over", b"expired", 1))
    frame = spark.createDataFrame(given, "key binary, value binary, expire_ts long").repartition(3)
    frame = frame.withColumn(
        "expire_ts", f.when(f.col("expire_ts") > 1, f.col("expire_ts") + int(time.time())).otherwise(f.col("expire_ts"))
    )
    before = contents(live, KEYSPACE)
    live.forget_calls()
    ingest(live, frame, 30, tmp_path)
    called = live.calls()["rpcs"]
    assert not {name for name in called if "Put" in name}
    assert contents(live, 30) == rows
    announced = max(live.cluster.ingests.read(), key=lambda each: each.announced_ts)
    assert (announced.command, announced.finished_ts > (announced.lowest_ts or 0) > 0) == ("ingest from Spark", True)
    raw = live.raw(30)
    assert raw.get_ttl(b"in00007") == pytest.approx(DAY, abs=600)
    assert raw.get_ttl(b"in00008") == 0
    assert contents(live, KEYSPACE) == before
    assert files_in(tmp_path) == []
    ingest(live, frame.limit(0), 30, tmp_path)
    assert contents(live, 30) == rows


def batch_of(*keys: bytes) -> pa.RecordBatch:
    """Rows with these keys, as Spark hands them over."""
    return pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.binary()), "value": pa.array([b"new"] * len(keys))})


def test_refused_ingests(live: LiveCluster, tmp_path: Path) -> None:
    """Keys that are there twice, in one partition or in two, and a target with rows: refused with the target unchanged."""
    old = {b"dup1": b"old", b"dup9": b"old"}
    live.raw(31).batch_put(old)
    given = {"pd": live.pd, "keyspace": "31", "ingest": "true", "staging": str(tmp_path)}
    fine = [batch_of(b"dup0", b"dup3"), batch_of(b"dup2", b"dup1")]
    for parts, error, message in (
        (
            [batch_of(b"dup0", b"dup3", b"dup0")],
            UsageError,
            "1 row with a key that another row has, for example 64757030",
        ),
        ([*fine, batch_of(b"dup3")], UsageError, "1 row with a key that another row has, for example 64757033"),
        ([batch_of(b"")], UsageError, "a row has an empty key"),
        (fine, TargetNotEmpty, "the target is not empty in "),
    ):
        writer = TikvDataSource(given).writer(schema_of("key binary, value binary"), overwrite=False)
        with pytest.raises(error, match=message) as caught:
            writer.commit([writer.write(iter([part])) for part in parts])
        writer.abort([])
        assert caught.value.__notes__
        assert contents(live, 31) == old
        assert files_in(tmp_path) == []
    writer = TikvDataSource({**given, "allow_overwrite": "true"}).writer(
        schema_of("key binary, value binary"), overwrite=False
    )
    writer.commit([writer.write(iter([part])) for part in fine])
    assert contents(live, 31) == old | {b"dup%d" % number: b"new" for number in range(4)}


def test_many_runs_are_merged(live: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks with more rows than a run, and runs of all keys, make files that follow each other; a key of two tasks is refused."""
    monkeypatch.setattr(runs, "RUN_BYTES", 40_000)
    monkeypatch.setattr(runs, "GROUP_BYTES", 8_000)
    monkeypatch.setattr(runs, "MERGE_BYTES", 60_000)
    ranges: list[int] = []
    merge_range = runs.merge_range

    def merge_and_count(*given: Any) -> PartitionResult:  # noqa: ANN401 - passed on
        ranges.append(1)
        return merge_range(*given)

    monkeypatch.setattr(runs, "merge_range", merge_and_count)
    key = tmp_path / "key"
    key.write_text(KEYS["aes256-ctr"])
    key.chmod(0o600)
    source = TikvDataSource(
        {
            "pd": live.pd,
            "keyspace": "32",
            "ingest": "true",
            "staging": str(tmp_path / "s"),
            "crypter_key_file": str(key),
        }
    )
    rows = {b"many%05d" % (number * 7919 % 4000): b"v%d" % number * 10 for number in range(4000)}
    schema = schema_of("key binary, value binary")

    def batches(part: list[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(part), 100):
            keys, values = zip(*part[first : first + 100], strict=True)
            yield pa.RecordBatch.from_pydict({"key": keys, "value": values})

    parts = [list(rows.items())[first::4] for first in range(4)]
    writer = pickle.loads(pickle.dumps(source.writer(schema, overwrite=False)))
    staged = [writer.write(batches(part)) for part in parts]
    assert len(files_in(tmp_path / "s")) > len(parts)
    again = writer.write(batches(parts[2][500:503]))
    with pytest.raises(UsageError, match="3 rows with a key that another row has"):
        writer.commit([*staged, again])
    assert contents(live, 32) == {}
    assert files_in(tmp_path / "s") == []
    writer = source.writer(schema, overwrite=False)
    staged = [writer.write(batches(part)) for part in parts]
    ranges.clear()
    writer.commit(staged)
    assert contents(live, 32) == rows
    assert len(ranges) > 3
    assert files_in(tmp_path / "s") == []
    writer.write(batches(parts[0]))
    writer.abort([])
    assert files_in(tmp_path / "s") == []


def test_spark_shows_message_and_hint(spark: SparkSession, live: LiveCluster, tmp_path: Path) -> None:
    """At load for a wrong option; when it is planned, on the driver, for what the cluster does not have."""
    with pytest.raises(PySparkException, match=r"(?s)unknown option 'prefxi'.*Hint: Options: pd, "):
        spark.read.format("tikv").options(**options(live, prefxi="a")).load()
    missing = spark.read.format("tikv").options(**options(live, keyspace="nobody")).load()
    with pytest.raises(PySparkException, match=r"(?s)no keyspace 'nobody'.*Hint: "):
        missing.count()
    frame = spark.createDataFrame([(b"user0001", b"replaced")], "key binary, value binary")
    with pytest.raises(PySparkException, match=r"(?s)is not supported.*Hint: Use mode"):
        frame.write.format("tikv").mode("overwrite").options(pd=live.pd, keyspace=str(KEYSPACE)).save()
    with pytest.raises(PySparkException, match=r"(?s)TargetNotEmpty.*Hint: Empty the range, or set allow_overwrite"):
        ingest(live, frame, KEYSPACE, tmp_path)
    assert files_in(tmp_path) == []
    assert contents(live, KEYSPACE) == ROWS


def test_cluster_that_cannot_be_read(v1ttl: LiveCluster) -> None:
    """PD that is away, and a keyspace where there is none, fail when the source is planned."""
    with reserved_ports(1) as (port,):
        away = TikvDataSource({"pd": f"127.0.0.1:{port}"})
        with pytest.raises(ClusterUnreachable):
            away.reader(away.schema()).partitions()
    keyspace = TikvDataSource({"pd": v1ttl.pd, "keyspace": "5"})
    with pytest.raises(UsageError, match="option keyspace"):
        keyspace.reader(keyspace.schema()).partitions()


@pytest.mark.parametrize("kind", [FileKind.SST, FileKind.PARQUET])
def test_backups(spark: SparkSession, live: LiveCluster, tmp_path: Path, kind: FileKind) -> None:
    """In both formats, the SSTs encrypted: a source on Spark gives the cluster's rows."""
    place = StorageLocation("local", str(tmp_path / "backup"))
    extra = {}
    if kind is FileKind.SST:
        place = replace(place, crypter=crypter("aes256-ctr"))
        key = tmp_path / "key"
        key.write_text(KEYS["aes256-ctr"])
        key.chmod(0o600)
        extra = {"crypter_key_file": str(key)}
    backup(BackupOptions(live.config, place, keyspaces=(str(KEYSPACE),), file_kind=kind, executor="driver"))
    frame = spark.read.format("tikv-backup").options(ts="true", **extra).load(place.path)
    assert pairs(frame) == ROWS
    assert frame.where("ts = 0").count() == 0
    assert frame.where(f.col("key").between(f.lit(b"user0100"), f.lit(b"user0109"))).count() == 10


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as from a shell, but on the session that is there."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_examples(
    spark: SparkSession,
    live: LiveCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their output has the written rows."""
    here = ("--pd", live.pd, "--keyspace", "11")
    raw = live.raw(11)
    raw.batch_put({b"user%d" % number: b"x" * number for number in range(30)} | {b"shop1": b"y"})
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(live.config, place, keyspaces=("11",), executor="driver"))
    raw.batch_put({b"user7": b"changed", b"new1": b""})
    raw.delete(b"shop1")
    run_example("count_by_prefix", *here, monkeypatch=monkeypatch)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["30", "b'user'"], ["1", "b'new1'"]]
    run_example("find_oversized", *here, "--bytes", "28", monkeypatch=monkeypatch)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["29", "b'user29'"], ["28", "b'user28'"]]
    run_example("compare_with_backup", *here, "--storage", place.path, monkeypatch=monkeypatch)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed == ["changed: 1", "b'user7'", "gone: 1", "b'shop1'", "new: 1", "b'new1'"]
