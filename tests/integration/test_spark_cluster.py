"""docs/spark-cluster.md: operations on a standalone Spark cluster whose workers have no tikv-br: it comes in an archive."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.integration.backup.reading import rocksdb_rows
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.spark_cluster import ROOT, SPARK_HOME, SparkCluster, make_archive, make_python, spark_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion

pytestmark = pytest.mark.slow
ROWS = {b"key%04d" % number: b"value %d" % number for number in range(1200)}
PARTS = 12
LONG = 9 * PATIENCE
"""Seconds that a command on the cluster may take on a busy machine."""
SMALL = (
    "spark.driver.host=127.0.0.1",
    "spark.executor.memory=512m",
    "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)
ONE = ("--concurrency", "1")


@dataclass(frozen=True, slots=True)
class Place:
    """A Spark cluster, and a source with rows in several regions."""

    folder: Path
    spark: SparkCluster
    archive: Path
    source: LiveCluster

    @property
    def first(self) -> str:
        """URL of a backup that was made without Spark."""
        return f"local://{self.folder / 'first'}"

    def on_spark(self, *more: str, executor: bool = True) -> list[str]:
        """The flags that name the cluster."""
        conf = [word for setting in (*SMALL, *more) for word in ("--spark-conf", setting)]
        flags = ["--executor", "spark"] if executor else []
        return [*flags, "--spark-master", self.spark.master, "--spark-archive", str(self.archive), *conf]

    def backup_command(self, name: str, *more: str) -> list[str]:
        """A backup by scans, one task for each region."""
        where = ["--pd", self.source.pd, "-s", f"local://{self.folder / name}", "--output", "json"]
        return ["backup", "raw", *where, "--engine", "scan", *self.on_spark(), *more]

    def written(self, name: str) -> dict[bytes, bytes]:
        """The rows of a backup as RocksDB reads them."""
        scratch = self.folder / f"scratch-{name}"
        scratch.mkdir()
        return {key[1:]: value for key, value in rocksdb_rows(self.folder / name, scratch).items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """All of it, for the module."""
    folder = tmp_path_factory.mktemp("spark")
    python = make_python(folder / "python")
    with (
        live_cluster(folder / "source", ApiVersion.V1, stores=1) as source,
        spark_cluster(folder, python) as spark,
    ):
        raw = source.raw()
        raw.batch_put(ROWS)
        source.split(*(raw.codec.rpc_key(b"key%04d" % (number * len(ROWS) // PARTS)) for number in range(1, PARTS)))
        here = ("--pd", source.pd, "-s", f"local://{folder / 'first'}", "--engine", "scan", "--executor", "driver")
        succeed("backup", "raw", *here)  # compiles the kernels, which then come in the archive
        yield Place(folder, spark, make_archive(folder, python), source)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LiveCluster]:
    """An empty cluster."""
    with live_cluster(tmp_path / "target", ApiVersion.V1, stores=1) as running:
        yield running


def test_backup(place: Place) -> None:
    """RocksDB finds the rows of the source in the files of two workers that have tikv-br from the archive only."""
    done = succeed(*place.backup_command("backup"), timeout=LONG)
    assert (done.last["executor"], done.last["total_kvs"]) == ("spark", len(ROWS))
    assert place.written("backup") == ROWS


def test_verify_on_one_core(place: Place) -> None:
    """Every row is read; ``--concurrency 1`` takes one core of the cluster, and so one executor."""
    before = place.spark.started()
    command = ("verify", place.first, "--level", "data", *place.on_spark(), *ONE, "--output", "json")
    assert succeed(*command, timeout=LONG).last["rows_checked"] == len(ROWS)
    assert [count for name, count in place.spark.started().items() if name not in before] == [1]


def test_restore_by_uploads(place: Place, target: LiveCluster) -> None:
    """The target gets the rows of the source."""
    command = ("restore", "--pd", target.pd, "-s", place.first, "--via", "upload", *place.on_spark(), *ONE)
    succeed(*command, timeout=LONG)
    assert contents(target) == ROWS


def test_load(place: Place, target: LiveCluster) -> None:
    """The rows of a table are in the target."""
    rows = {f"load{number}": f"row {number}" for number in range(100)}
    table = place.folder / "rows.jsonl"
    table.write_text("\n".join(json.dumps({"id": key, "payload": value}) for key, value in rows.items()))
    load = ("load", "raw", "--pd", target.pd, "--input", str(table), "--key-column", "id", "--value-column", "payload")
    staging = f"local://{place.folder / 'staging'}"
    succeed(*load, "--staging", staging, *place.on_spark(executor=False), timeout=LONG)
    assert contents(target) == {key.encode(): value.encode() for key, value in rows.items()}


def test_restore_to_a_point_in_time(place: Place, tmp_path: Path) -> None:
    """A full backup and an incremental one are merged and restored by the cluster."""
    with (
        live_cluster(tmp_path / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as source,
        live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target,
    ):
        here, raw = ("--pd", source.pd, "--safe-interval", "0s", "--executor", "driver"), source.raw()
        raw.batch_put(ROWS)
        succeed("backup", "raw", *here, "-s", f"local://{tmp_path / 'full'}")
        raw.batch_put(dict.fromkeys(list(ROWS)[:50], b"later"))
        raw.batch_delete(list(ROWS)[50:80])
        succeed("backup", "raw", *here, "-s", f"local://{tmp_path / 'more'}", "--base", f"local://{tmp_path / 'full'}")
        succeed(
            "restore",
            "raw",
            "--pd",
            target.pd,
            "-s",
            f"local://{tmp_path / 'more'}",
            *place.on_spark(),
            *ONE,
            timeout=LONG,
        )
        assert contents(target) == contents(source)
        assert len(contents(target)) == len(ROWS) - 30


@contextlib.contextmanager
def half_done(place: Place, name: str) -> Iterator[list[psutil.Process]]:
    """A backup in the middle of its tasks, with its executors; it must succeed after the block, with every row."""
    slow = place.source.fail("RawScan", {"delay": {"seconds": 5}}, count=-1)
    command = [str(PROGRAM), *place.backup_command(name)]
    with (place.folder / f"{name}.log").open("wb") as output:
        program = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), cwd="/")
    try:
        eventually(
            lambda: (place.source.hits(slow) > 1 and bool(place.spark.executors())) or program.poll() is not None,
            LONG,
        )
        assert program.poll() is None, (place.folder / f"{name}.log").read_text()[-3000:]
        yield place.spark.executors()
        place.source.disarm()
        assert program.wait(LONG) == 0, (place.folder / f"{name}.log").read_text()[-3000:]
    finally:
        place.source.disarm()
        if program.poll() is None:
            program.kill()
            program.wait(PATIENCE)
    assert place.written(name) == ROWS


def test_an_executor_is_killed(place: Place) -> None:
    """SIGKILL in the middle of a backup: its tasks run again, and no row is missing or there twice."""
    with half_done(place, "killed") as executors:
        for each in executors:
            each.kill()


def test_a_worker_is_lost(place: Place) -> None:
    """A worker and its executor are killed, and do not come back before the end of the backup."""
    try:
        with half_done(place, "lost") as executors:
            worker = executors[0].ppid()
            mine = [each for each in executors if each.ppid() == worker]
            place.spark.lose_worker(worker)
            for each in mine:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends when its worker has gone
                    each.kill()
    finally:
        place.spark.add_worker()


def test_workers_without_tikv_br_are_refused(place: Place) -> None:
    """Without the archive: one error with its own exit code, which names what is missing and what to do. No file is written."""
    command = place.backup_command("refused", *ONE)
    at = command.index("--spark-archive")
    done = tikv_br(*command[:at], *command[at + 2 :], timeout=LONG)
    assert done.code == 55, done
    assert "no tikv-br (No module named 'tikv_br')" in done.last["message"]
    assert "tikv-br spark pack" in done.last["hint"]
    assert not list((place.folder / "refused").rglob("*.sst"))


@contextlib.contextmanager
def hidden_from_workers(spark: SparkCluster, address: str) -> Iterator[str]:
    """Another address for a server, at which connections of processes on the workers are closed at once."""
    host, _, port = address.rpartition(":")

    def is_on_worker(peer: int) -> bool:
        family = {each.pid for worker in spark.workers for each in worker.children(recursive=True)}
        found = psutil.net_connections("tcp")  # gRPC uses sockets of IPv6 for both
        return any(each.laddr and each.laddr.port == peer and each.pid in family for each in found)

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if is_on_worker(self.client_address[1]):
                return
            with socket.create_connection((host, int(port))) as inner:
                back = threading.Thread(target=self._copy, args=(inner, self.request), daemon=True)
                back.start()
                self._copy(self.request, inner)
                back.join()

        def _copy(self, source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_executor_without_a_way_to_pd(place: Place) -> None:
    """The error says on which worker, and what cannot be reached. No file is written."""
    command = place.backup_command("cut-off", *ONE)
    with hidden_from_workers(place.spark, place.source.pd) as pd:
        command[command.index("--pd") + 1] = pd
        done = tikv_br(*command, timeout=LONG)
    assert done.code == 3, done
    assert re.search(rf"task .* on worker .*: .*{re.escape(pd)}", done.last["message"]), done
    assert not list((place.folder / "cut-off").rglob("*.sst"))


def test_spark_submit_with_a_packed_environment(place: Place) -> None:
    """``spark pack`` makes all that a bare Python lacks, and the program takes the master from spark-submit."""
    archive = place.folder / "packed.tar.gz"
    packed = succeed("spark", "pack", str(archive), "--output", "json").last
    assert any(each.startswith("numba ") for each in packed["packages"])
    conf = [*SMALL, "spark.pyspark.python=./environment/bin/python", f"spark.pyspark.driver.python={sys.executable}"]
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", place.spark.master]
    command += ["--archives", f"{archive}#environment", *(word for each in conf for word in ("--conf", each))]
    command += [str(ROOT / "examples" / "tikv_br_main.py"), "backup", "raw", "--pd", place.source.pd]
    command += ["-s", f"local://{place.folder / 'submitted'}", "--engine", "scan", "--executor", "spark", *ONE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), cwd="/", timeout=LONG
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert place.written("submitted") == ROWS
