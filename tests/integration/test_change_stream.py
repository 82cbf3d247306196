"""A Spark stream of a cluster's changes, stopped and killed, against the versions in the stores."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.e2e.command import PROGRAM, environment
from tests.integration.change_query import LOG_ID, start
from tests.support import history
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.tools import ROOT
from tests.support.waiting import eventually
from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import merge_periods
from tikv_br.datasource import TikvDataSource
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.tasks.session import spark_context

pytestmark = pytest.mark.slow
PATIENCE = 300.0
Row = tuple[str, bytes, bytes | None, int, int]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session on two threads."""
    with spark_context("local[2]") as context:
        session = SparkSession(context)
        session.conf.set("spark.sql.shuffle.partitions", "2")
        session.dataSource.register(TikvDataSource)
        yield session


class Source:
    """A cluster and the log that ``tikv-br log start`` writes of it."""

    def __init__(self, live: LiveCluster, folder: Path) -> None:
        self.live, self.playground = live, folder / "playground"
        self.url, self.since = f"local://{folder}/log", live.cluster.pd.tso()

    def archive(self) -> LogArchive:
        """As its records say now."""
        return LogArchive.open(open_store(parse(self.url)), LOG_ID)

    def catch_up(self) -> None:
        """Wait until the log has all that is written by now."""
        now = self.live.cluster.pd.tso()

        def has_come() -> bool:
            archive = self.archive()
            return archive.inexact_around(archive.description.ranges, archive.end_ts())[0] > now

        eventually(has_come, PATIENCE, every=0.2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """An empty cluster of two regions whose log has begun."""
    folder = tmp_path_factory.mktemp("source")
    with live_cluster(folder / "playground", ApiVersion.V2, stores=1, regions=2, resolved_ts_interval=0.2) as live:
        found = Source(live, folder)
        command = [
            "log",
            "start",
            "--pd",
            live.pd,
            "--storage",
            found.url,
            "--id",
            LOG_ID,
            "--start-ts",
            str(found.since),
        ]
        command += ["--flush-interval", "1s", "--hold-back", "0s"]
        with subprocess.Popen([str(PROGRAM), *command], env=environment(), cwd="/") as process:
            try:
                eventually((folder / "log" / LOG_ID / "log.json").exists, PATIENCE)
                found.catch_up()
                yield found
            finally:
                process.kill()


def committed(output: Path) -> int:
    """Micro-batches that Spark's Parquet sink has committed."""
    return len([name for name in (output / "_spark_metadata").glob("*") if name.name.isdigit()])


def delivered(spark: SparkSession, output: Path) -> list[Row]:
    """The committed rows."""
    return [
        (
            row["op"],
            bytes(row["key"]),
            None if row["value"] is None else bytes(row["value"]),
            row["expire_ts"],
            row["ts"],
        )
        for row in spark.read.parquet(str(output)).collect()
    ]


def written(source: Source, scratch: Path, end: int) -> set[Row]:
    """The versions in the stores' RocksDB up to a time."""
    return {
        ("delete" if at.value is None else "put", key, at.value, at.expire_ts, at.ts)
        for key, versions in history.read(source.playground, scratch).items()
        for at in versions
        if source.since < at.ts <= end
    }


def write(source: Source, seed: int) -> None:
    """Put, overwrite and delete rows, some with a TTL."""
    raw, chance = source.live.raw(), random.Random(seed)
    for number in range(60):
        key = b"key%02d" % chance.randrange(30)
        match chance.randrange(4):
            case 0:
                raw.delete(key)
            case 1:
                raw.batch_put({b"%d-%d" % (seed, at): b"%d" % number for at in range(20)})
            case _:
                raw.put(key, b"%d %d" % (seed, number), ttl=chance.choice([0, 0, 5000]))


@pytest.mark.timeout(1200)
def test_stopped_and_killed_it_delivers_every_change_once(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    """A process is killed while it has a micro-batch; others continue, and stop. Rows come as they were written, each once."""
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "output"
    places = (source.url, str(checkpoint), str(output))
    write(source, 1)
    source.catch_up()
    command = [sys.executable, "-m", "tests.integration.change_query", *places]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:  # with its JVM in a group of its own
        try:
            eventually(lambda: process.poll() is not None or (checkpoint / "offsets" / "0").exists(), PATIENCE)
            write(source, 2)
            eventually(lambda: process.poll() is not None or (checkpoint / "offsets" / "1").exists(), PATIENCE)
            assert process.poll() is None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    before = committed(output)
    write(source, 3)
    query = start(spark, *places, available_now=False)
    eventually(lambda: query.exception() or committed(output) > before, PATIENCE, every=0.2)
    query.stop()
    assert query.exception() is None
    write(source, 4)
    source.catch_up()
    last = start(spark, *places, available_now=True)
    assert last.awaitTermination(round(PATIENCE))
    assert last.exception() is None
    rows = delivered(spark, output)
    assert len({row[1:] for row in rows}) == len(rows), "a change came twice"
    offsets = max(checkpoint.glob("offsets/[0-9]*"), key=lambda path: int(path.name))
    end = json.loads(offsets.read_text().splitlines()[-1])["ts"]
    expected = written(source, tmp_path / "scratch", end)
    assert {row[0] for row in expected} == {"put", "delete"}
    assert {row[3] > 0 for row in expected} == {False, True}
    assert {int(row[2].split()[0]) for row in expected if row[2] and b" " in row[2]} == {1, 2, 3, 4}
    assert set(rows) - expected == set()
    archive = source.archive()
    windows = merge_periods(period for segment in archive.segments for period in segment.inexact)

    def in_window(row: Row) -> bool:  # there are some only if the log's process had to subscribe again
        key = archive.codec().rpc_key(row[1])
        point = KeyRange(key, key + b"\0")
        return any(each.from_ts < row[4] <= each.to_ts and each.span.contains(point) for each in windows)

    assert [row for row in expected - set(rows) if not in_window(row)] == []


def test_the_example(spark: SparkSession, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run makes the table what the cluster holds."""
    table = tmp_path / "table"
    arguments = ["--log", source.url, "--log-id", LOG_ID, "--table", str(table), "--prefix", "fed", "--once"]
    monkeypatch.setattr(sys, "argv", ["feed_table_from_changes", *arguments])
    raw = source.live.raw()
    raw.batch_put({b"fed%d" % number: b"first" for number in range(20)})
    for _run in range(2):
        source.catch_up()
        runpy.run_path(str(ROOT / "examples" / "feed_table_from_changes.py"), run_name="__main__")
        newest = max(table.glob("version-*/_SUCCESS")).parent
        rows = pq.read_table(newest, columns=["key", "value"]).to_pylist()
        held = {key: value for key, value in contents(source.live).items() if key.startswith(b"fed")}
        assert {row["key"]: row["value"] for row in rows} == held
        assert len(rows) == len(held) > 10
        raw.batch_put({b"fed1": b"second", b"fednew": b""})
        raw.delete(b"fed2")


def test_errors_reach_the_user(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    """The query ends with our message and hint."""
    stream = spark.readStream.format("tikv").options(log=source.url, log_id="nobody").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match=r"(?s)there is no log nobody.*Hint: "):
        query.awaitTermination(round(PATIENCE))
    with pytest.raises(PySparkException, match="option log is for streams"):
        spark.read.format("tikv").options(log=source.url).load().count()
