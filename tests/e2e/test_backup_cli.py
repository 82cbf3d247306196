"""``tikv-br backup raw`` as its users run it: results on stdout, an exit code for every kind of trouble."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from formats.api_version import ApiVersion
from tests.certificates import Authority
from tests.documented import checked
from tests.integration.s3_servers import moto_server
from tests.live_cluster import LiveCluster, live_cluster
from tikv_br.errors import (
    BackupPathInUse,
    ClusterTlsError,
    ClusterUnreachable,
    ConversionUnsupported,
    SparkUnavailable,
    StorageFull,
    StorageReadOnly,
    Terminated,
    TikvBrError,
    UsageError,
)
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings

TIKV_BR = [sys.executable, "-m", "tikv_br.cli.main"]
DRIVER = ["--executor", "driver"]
ROWS = 2000
SLOW_SECONDS = 3
OTHER_KEYSPACE = 9


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V1 cluster with rows whose values do not compress."""
    with live_cluster(tmp_path_factory.mktemp("v1"), ApiVersion.V1, stores=3) as cluster:
        cluster.raw().batch_put({b"key%05d" % number: os.urandom(500) for number in range(ROWS)})
        cluster.run("split", keys=[b"key01000".hex()])
        yield cluster


@pytest.fixture(scope="module")
def v2_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1) as cluster:
        yield cluster


@pytest.fixture
def v2(v2_cluster: LiveCluster) -> Iterator[LiveCluster]:
    """Return the V2 cluster, empty: what a test writes is gone after it."""
    yield v2_cluster
    for keyspace in (0, OTHER_KEYSPACE):
        v2_cluster.raw(keyspace).delete_range(b"", b"")


def run(
    *arguments: str, environment: dict[str, str] | None = None, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    done = subprocess.run(
        [*TIKV_BR, "backup", "raw", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
        check=False,
        preexec_fn=before,
    )
    return checked(["backup", "raw", *arguments], done)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the JSON lines on stdout."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def files_at(place: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def check_refusal(done: subprocess.CompletedProcess[str], error: type[TikvBrError]) -> dict[str, Any]:
    """Check that a run with ``--output json`` ended with this error, in its exit code and in its last line."""
    assert done.returncode == error.exit_code, done.stdout + done.stderr
    last = lines(done)[-1]
    assert (last["message_type"], last["code"], last["name"]) == ("exit_error", error.exit_code, error.__name__)
    assert last["message"]
    assert last["hint"]
    assert "Traceback" not in done.stderr
    return last


@pytest.mark.slow
def test_a_backup_on_spark_ends_with_a_summary(live: LiveCluster, tmp_path: Path) -> None:
    """The default executor is Spark; the last JSON line says all that a script asks for, and agrees with the cluster."""
    place = f"local://{tmp_path}/backup"
    done = run("-u", live.pd, "-s", place, "--dst-api-version", "v2", "--checksum", "--output", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = lines(done)[-1]
    counted = live.raw().checksum()
    assert summary["message_type"] == "summary"
    assert (summary["api_version"], summary["dst_api_version"], summary["engine"]) == ("v1", "v2", "scan")
    assert summary["total_kvs"] == counted.total_kvs == ROWS
    assert summary["total_bytes"] == counted.total_bytes + 4 * ROWS
    assert (summary["executor"], summary["backup_ts"]) == ("spark", 0)
    assert summary["storage"] == place
    assert summary["backup_size"] == sum(path.stat().st_size for path in (tmp_path / "backup").rglob("*.sst"))
    assert set(summary["task_seconds"]) == {"scan", "ttl", "convert", "encode", "upload", "store", "inspect"}
    steps = [line["name"] for line in lines(done) if line["message_type"] == "step" and line["state"] == "finished"]
    assert steps[-1] == "hand over the safe point"
    assert done.stderr == ""


def test_people_get_the_go_tools_words(live: LiveCluster, tmp_path: Path) -> None:
    """The summary is a text on stdout, progress goes to stderr."""
    done = run("-u", live.pd, "-s", str(tmp_path / "backup"), *DRIVER)
    assert done.returncode == 0, done.stderr
    assert "Raw backup success summary" in done.stdout
    assert f"total-kv           {ROWS:,}" in done.stdout
    assert "step 1/14: check the input" in done.stderr


def test_the_stores_write_where_timestamps_must_be_kept(v2: LiveCluster, tmp_path: Path) -> None:
    """Without a word about it, and without a JVM; the result says which engine it was and why."""
    v2.raw().batch_put({b"key%05d" % number: b"v" for number in range(ROWS)}, 100_000)
    place = tmp_path / "backup"
    done = run("-u", v2.pd, "-s", str(place), "--output", "json", environment={"JAVA_HOME": str(tmp_path / "nowhere")})
    assert done.returncode == 0, done.stdout + done.stderr
    summary = lines(done)[-1]
    assert (summary["engine"], summary["executor"], summary["total_kvs"]) == ("store", "driver", ROWS)
    assert "timestamps" in summary["engine_reason"]
    description = json.loads((place / "tikv-br" / "manifest.json").read_text())["content"]["description"]
    assert (description["engine"], description["engine_reason"]) == ("store", summary["engine_reason"])
    assert summary["backup_size"] == sum(path.stat().st_size for path in place.rglob("*.sst"))
    told = run("-u", v2.pd, "-s", str(tmp_path / "scanned"), *DRIVER, "--engine", "scan", "--assume-no-ttl")
    assert "engine             scan (asked for)" in told.stdout


@pytest.mark.slow
def test_stores_are_steered_from_spark_on_request(live: LiveCluster, tmp_path: Path) -> None:
    """The same tasks, in Spark's workers."""
    place = tmp_path / "backup"
    flags = ("--engine", "store", "--executor", "spark", "--dst-api-version", "v2", "--checksum", "--output", "json")
    done = run("-u", live.pd, "-s", str(place), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = lines(done)[-1]
    assert (summary["engine"], summary["executor"], summary["total_kvs"]) == ("store", "spark", ROWS)
    assert len(list(place.rglob("*.sst"))) == summary["files"]


@pytest.mark.parametrize("flag", ["--send-credentials-to-tikv", "--no-send-credentials-to-tikv"])
def test_stores_write_to_s3_with_the_credentials_they_are_sent(flag: str, live: LiveCluster) -> None:
    """Without them they use their own, and this playground has none: an error of the storage, and nothing stays."""
    with moto_server() as server:
        flags = ("--engine", "store", flag, "--output", "json", "--log-level", "debug")
        done = run("-u", live.pd, "-s", server.url("nightly/1"), *flags)
        listed = server.admin.list_objects_v2(Bucket="backups").get("Contents", [])
        names = {item["Key"] for item in listed if item["Key"].startswith("nightly/1/")}
    assert "s3cr" not in done.stdout + done.stderr
    if flag.startswith("--no"):
        assert done.returncode != 0, done.stdout
        assert names == set()
        return
    assert done.returncode == 0, done.stdout + done.stderr
    summary = lines(done)[-1]
    assert len([name for name in names if name.endswith(".sst")]) == summary["files"] > 1
    assert {"nightly/1/backupmeta", "nightly/1/tikv-br/manifest.json"} <= names


def test_a_backup_goes_to_s3_without_showing_secrets(live: LiveCluster) -> None:
    """The URL's credentials reach the store and appear nowhere."""
    with moto_server() as server:
        done = run("-u", live.pd, "-s", server.url("nightly/1"), *DRIVER, "--output", "json", "--log-level", "debug")
        assert done.returncode == 0, done.stdout + done.stderr
        names = {item["Key"] for item in server.admin.list_objects_v2(Bucket="backups")["Contents"]}
        assert {"nightly/1/backupmeta", "nightly/1/tikv-br/manifest.json"} <= names
        manifest = server.admin.get_object(Bucket="backups", Key="nightly/1/tikv-br/manifest.json")["Body"].read()
    assert lines(done)[-1]["storage"].startswith("s3://backups/nightly/1?")
    for text in (done.stdout, done.stderr, manifest.decode()):
        assert "s3cr" not in text


def test_a_dry_run_prints_the_plan(live: LiveCluster, tmp_path: Path) -> None:
    """One `plan` line with the intervals, then a summary that says it was a dry run."""
    done = run("-u", live.pd, "-s", str(tmp_path / "backup"), "--dry-run", "--output", "json")
    plan, summary = lines(done)[-2:]
    assert (plan["message_type"], summary["message_type"], summary["dry_run"]) == ("plan", "summary", True)
    assert plan["intervals"][0]["start"] == plan["intervals"][-1]["end"] == ""
    assert plan["regions"] == len(live.regions())
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--start", "xyz"], UsageError, "--start"),
        (["--start", "62", "--end", "61"], UsageError, "before"),
        (["--dst-api-version", "v9"], UsageError, "v9"),
        (["--compression", "brotli"], UsageError, "brotli"),
        (["--compression", "snappy", "--compression-level", "3"], UsageError, "level"),
        (["--safe-interval", "soon"], UsageError, "soon"),
        (["--executor", "cluster"], UsageError, "cluster"),
        (["--engine", "steam"], UsageError, "steam"),
        (["--spark-master", "nowhere"], UsageError, "nowhere"),
        (["--keyspace", "5"], UsageError, "keyspace"),
        (["--ca", "/does/not/exist.pem"], UsageError, "--ca"),
        (["--no-such-flag"], UsageError, "no-such-flag"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: list[str], error: type[TikvBrError], message: str, live: LiveCluster, tmp_path: Path
) -> None:
    """Exit code 2 and the flag's name, with nothing written and no Spark started."""
    done = run("-u", live.pd, "-s", str(tmp_path / "backup"), "--output", "json", *arguments)
    assert message in check_refusal(done, error)["message"]
    assert not (tmp_path / "backup").exists()


def test_an_unreachable_pd(tmp_path: Path) -> None:
    """A port where nobody listens."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = run("-u", address, "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json")
    assert address in check_refusal(done, ClusterUnreachable)["message"]


def test_a_wrong_authority(tmp_path: Path) -> None:
    """The cluster's certificate is of another authority than --ca."""
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    pair = authority.issue("server")
    tls = TlsSettings(str(authority.ca), str(pair.cert), str(pair.key))
    started = launcher.start(tmp_path / "cluster", {"stores": 1, "tls": tls}, detached=False)
    try:
        arguments = ("-u", started.state["pd"], "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json", "--ca")
        check_refusal(run(*arguments, str(stranger.ca)), ClusterTlsError)
        assert run(*arguments, str(authority.ca)).returncode == 0
    finally:
        started.process.terminate()
        started.process.wait(20)


def test_a_conversion_that_loses_data(v2: LiveCluster, tmp_path: Path) -> None:
    """V2 to V1: refused, with both versions in the message."""
    done = run("-u", v2.pd, "-s", str(tmp_path / "backup"), "--dst-api-version", "v1", "--output", "json")
    message = check_refusal(done, ConversionUnsupported)["message"]
    assert "v2" in message
    assert "v1" in message
    assert not (tmp_path / "backup").exists()
    check_refusal(run("-u", v2.pd, "-s", str(tmp_path), "--allow-loss", "ttl,all", "--output", "json"), UsageError)


def test_ranges_and_keyspaces_by_flags(v2: LiveCluster, tmp_path: Path) -> None:
    """Both flags may be repeated; what cannot be meant is refused by name."""
    for keyspace in (0, OTHER_KEYSPACE):
        v2.raw(keyspace).batch_put({b"a": b"1", b"b:": b"2", b"c": b"3", b"d": b"4"})
    place = ("-u", v2.pd, "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json")
    chosen = ("--keyspace", str(OTHER_KEYSPACE), "--keyspace", "DEFAULT", "--range", ":6200", "--range", "63:64")
    done = run(*place, *chosen, environment={"TIKV_BR_KEYSPACE": "5"})
    assert done.returncode == 0, done.stderr
    assert lines(done)[-1]["total_kvs"] == 2 * 2
    for wrong in (["--range", "6"], ["--range", "a:b:c"], ["--range", "zz:"], ["--range", ":", "--start", "61"]):
        check_refusal(run(*place, *wrong), UsageError)
    check_refusal(run(*place, "--range", ":63", "--range", "62:"), UsageError)


@pytest.mark.parametrize("flag", ["--format", "--file-format"])
def test_parquet_by_either_flag(flag: str, v2: LiveCluster, tmp_path: Path) -> None:
    """Written, and allowed to lose what the conversion costs; a contradiction between the flags is refused."""
    v2.raw().put(b"key", b"value")
    place = ("-u", v2.pd, "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json")
    lossy = ("--dst-api-version", "v1ttl", "--allow-loss", "ts, keyspace")
    done = run(*place, *lossy, flag, "parquet")
    assert done.returncode == 0, done.stderr
    assert lines(done)[-1]["file_format"] == "parquet"
    assert lines(done)[-1]["dropped_tombstones"] == 0
    assert "rewritten" in lines(done)[-1]["engine_reason"]
    assert list((tmp_path / "backup" / "parquet").glob("*.parquet"))
    check_refusal(run(*place, "--format", "parquet", "--file-format", "sst"), UsageError)


def test_a_path_in_use(live: LiveCluster, tmp_path: Path) -> None:
    """A second backup at the same path."""
    place = ["-u", live.pd, "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json"]
    assert run(*place).returncode == 0
    before = files_at(tmp_path)
    check_refusal(run(*place), BackupPathInUse)
    assert files_at(tmp_path) == before


def test_a_place_that_cannot_be_written(live: LiveCluster) -> None:
    """A folder that no rights could make."""
    check_refusal(run("-u", live.pd, "-s", "/dev/null/backup", *DRIVER, "--output", "json"), StorageReadOnly)


def test_a_full_storage(live: LiveCluster, tmp_path: Path) -> None:
    """The disk takes the lock and not the files: all is removed again."""

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    place = tmp_path / "backup"
    done = run("-u", live.pd, "-s", str(place), *DRIVER, "--output", "json", before=small_files_only)
    check_refusal(done, StorageFull)
    assert files_at(place) == []


def test_no_java(live: LiveCluster, tmp_path: Path) -> None:
    """Spark cannot start: said before the cluster is asked anything or the path is taken."""
    missing = {"JAVA_HOME": str(tmp_path / "nowhere")}
    done = run("-u", live.pd, "-s", str(tmp_path / "backup"), "--output", "json", environment=missing)
    check_refusal(done, SparkUnavailable)
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("engine", "executor"),
    [
        ("scan", "driver"),
        ("store", "driver"),
        pytest.param("scan", "spark", marks=pytest.mark.slow),
        pytest.param("store", "spark", marks=pytest.mark.slow),
    ],
)
def test_a_terminated_backup_leaves_nothing(engine: str, executor: str, live: LiveCluster, tmp_path: Path) -> None:
    """SIGTERM while tasks scan, or stores write: exit code 143, and no file of ours stays."""
    rpc = "RawScan" if engine == "scan" else "backup.region"
    slow = live.fail(rpc, {"delay": {"seconds": SLOW_SECONDS}}, count=-1)
    place = tmp_path / "backup"
    command = [*TIKV_BR, "backup", "raw", "-u", live.pd, "-s", str(place), "--engine", engine]
    command += ["--executor", executor, "--output", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not live.hits(slow):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "backup.lock" in files_at(place)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        live.heal()
    assert process.returncode == Terminated.exit_code
    assert json.loads(output.splitlines()[-1])["name"] == "Terminated"
    time.sleep(SLOW_SECONDS + 0.5)  # no task goes on without its driver
    late = files_at(place)
    if engine == "store":  # a store cannot be stopped within a region: each may finish one, and nothing names it
        assert len(late) <= len(live.store_ids)
        late = [name for name in late if not name.startswith("sst/")]
    assert late == []


def test_help_is_quick() -> None:
    """The help of the command loads no Spark, no Arrow and no gRPC."""
    began = time.monotonic()
    done = run("--help")
    assert done.returncode == 0
    assert time.monotonic() - began < 5
    heavy = "import sys; import tikv_br.cli.backup_cmd; print({'grpc', 'pyarrow', 'numba', 'pyspark', 'obstore', 'boto3'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(live: LiveCluster, tmp_path: Path) -> None:
    """A Spark worker is killed with files already written: its task runs again, and only one attempt's files stay."""
    slow = live.fail("RawScan", {"delay": {"seconds": SLOW_SECONDS}}, skip=2, count=2)
    place = tmp_path / "backup"
    command = [*TIKV_BR, "backup", "raw", "-u", live.pd, "-s", str(place), "--file-size", "10KiB", "--output", "json"]
    process = subprocess.Popen([*command, "--concurrency", "1"], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120  # a JVM takes its time on a busy machine
        while not list(place.glob("sst/*.sst")) or not live.hits(slow):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = set(place.glob("sst/*.sst"))
        for worker in spark_workers(process.pid):
            worker.kill()
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
        live.heal()
    summary = json.loads(output.splitlines()[-1])
    assert summary["message_type"] == "summary", output
    assert summary["total_kvs"] == ROWS
    assert not before & set(place.glob("sst/*.sst"))
    assert len(list(place.glob("sst/*.sst"))) == summary["files"]


def spark_workers(pid: int) -> list[psutil.Process]:
    """Return the Python workers of a driver: the leaves below its daemon."""
    below = psutil.Process(pid).children(recursive=True)
    return [child for child in below if is_spark_worker(child)]


def is_spark_worker(process: psutil.Process) -> bool:
    """Whether it is a leaf below the daemon, and alive."""
    try:
        return "pyspark.daemon" in process.cmdline() and not process.children()
    except psutil.NoSuchProcess:  # it has ended, or waits to be reaped
        return False
