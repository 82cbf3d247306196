"""``tikv-br backup raw`` as its users run it: results on stdout, an exit code for every kind of trouble."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backup_command import ROWS, check_refusal, files_at, lines, noisy_cluster, run
from tests.e2e.command import PROGRAM, environment, succeed
from tests.integration.s3_servers import moto_server
from tests.support.certificates import Authority
from tests.support.live_cluster import LiveCluster, live_cluster, make_keyspaces
from tests.support.waiting import PATIENCE, eventually
from tikv_br.errors import (
    ClusterTlsError,
    ConversionUnsupported,
    NothingMatched,
    SparkUnavailable,
    StorageDenied,
    StorageFull,
    StorageReadOnly,
    TikvBrError,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings

DRIVER = ["--executor", "driver"]
OTHER_KEYSPACE = 9


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """See `noisy_cluster`."""
    with noisy_cluster(tmp_path_factory.mktemp("v1")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def v2_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1) as cluster:
        make_keyspaces(cluster, OTHER_KEYSPACE)
        yield cluster


@pytest.fixture
def v2(v2_cluster: LiveCluster) -> Iterator[LiveCluster]:
    """Return the V2 cluster, empty: what a test writes is gone after it."""
    yield v2_cluster
    for keyspace in (0, OTHER_KEYSPACE):
        v2_cluster.raw(keyspace).delete_range(EVERY_KEY)


@pytest.mark.core("spark")
def test_a_backup_on_spark_ends_with_a_summary(live: LiveCluster, tmp_path: Path) -> None:
    """The last JSON line says all that a script asks for, and agrees with the cluster."""
    place = f"local://{tmp_path}/backup"
    done = run(
        "-u", live.pd, "-s", place, "--dst-api-version", "v2", "--checksum", "--executor", "spark", "--output", "json"
    )
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


def test_a_folder_for_each_run(live: LiveCluster, tmp_path: Path) -> None:
    """{time} is the start in UTC; the backups are listed at the folder above, where `prune` keeps the wanted ones."""
    place, root = f"local://{tmp_path}/backups/{{time}}", f"local://{tmp_path}/backups"
    done = run("-u", live.pd, "-s", place, *DRIVER, "--output", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path for path in (tmp_path / "backups").iterdir() if path.name != "tikv-br-index")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d{6}Z", folder.name)
    assert lines(done)[-1]["storage"] == f"{root}/{folder.name}"
    kept = succeed("prune", "-s", root, "--keep-daily", "7", "--yes", "--output", "json").last
    assert (kept["kept"], kept["removed"]) == (1, 0)


def test_a_killed_run_is_continued_in_its_folder(live: LiveCluster, tmp_path: Path) -> None:
    """The same command finds the folder at a later time, and reports it."""
    flags = ("-u", live.pd, "-s", f"local://{tmp_path}/{{time}}", *DRIVER, "--output", "json")
    live.fail("RawScan", {"delay": {"seconds": 5}}, count=-1)  # also the first, which looks for a row
    try:
        command = [str(PROGRAM), "backup", "raw", *flags]
        with subprocess.Popen(command, env=environment(), cwd="/", stdout=subprocess.DEVNULL) as process:
            eventually(lambda: any(tmp_path.rglob("run.json")), PATIENCE)
            process.kill()
    finally:
        live.heal()
    done = run(*flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path for path in tmp_path.iterdir() if path.name != "tikv-br-index")
    assert lines(done)[-1]["storage"] == f"local://{folder}"
    assert "it is continued" in done.stdout


@pytest.mark.core("backup")
def test_people_get_the_go_tools_words(live: LiveCluster, tmp_path: Path) -> None:
    """The summary is a text on stdout, progress goes to stderr."""
    done = run("-u", live.pd, "-s", str(tmp_path / "backup"), *DRIVER)
    assert done.returncode == 0, done.stderr
    assert "Raw backup success summary" in done.stdout
    assert f"total-kv           {ROWS:,}" in done.stdout
    assert "check the input" not in done.stderr  # a brief step


def test_the_stores_write_where_timestamps_must_be_kept(v2: LiveCluster, tmp_path: Path) -> None:
    """No flag and no JVM is needed; the result has the engine and the reason."""
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
    reported = run("-u", v2.pd, "-s", str(tmp_path / "scanned"), *DRIVER, "--engine", "scan", "--assume-no-ttl")
    assert "engine             scan (requested with --engine)" in reported.stdout


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


@pytest.mark.parametrize(
    "flag",
    [
        "--send-credentials-to-tikv",
        pytest.param(
            "--no-send-credentials-to-tikv",
            marks=pytest.mark.emulator_only("a TiKV without credentials tries for more than ten minutes"),
        ),
    ],
)
def test_stores_write_to_s3_with_the_credentials_they_are_sent(flag: str, live: LiveCluster) -> None:
    """Without them they use their own, and this playground has none: an error of the storage, and nothing stays."""
    with moto_server() as server:
        flags = ("--engine", "store", flag, "--output", "json", "--log-level", "debug")
        done = run("-u", live.pd, "-s", server.url("nightly/1"), *flags)
        listed = server.admin.list_objects_v2(Bucket="backups").get("Contents", [])
        names = {item["Key"] for item in listed if item["Key"].startswith("nightly/1/")}
    assert "s3cr" not in done.stdout + done.stderr
    if flag.startswith("--no"):
        assert (done.returncode, lines(done)[-1]["name"]) == (StorageDenied.exit_code, "StorageDenied")
        assert names == set()
        return
    assert done.returncode == 0, done.stdout + done.stderr
    summary = lines(done)[-1]
    assert len([name for name in names if name.endswith(".sst")]) == summary["files"] > 1
    assert {"nightly/1/backupmeta", "nightly/1/tikv-br/manifest.json"} <= names


@pytest.mark.core("s3")
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
    shown = run(
        "-u", live.pd, "-s", str(tmp_path / "backup"), "--dry-run", "--range", r"row\x3a1:row\x3a2", "--allow-empty"
    ).stdout
    assert "1 task over 1 region\n" in shown
    assert "at most" in shown


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--start", "hex:xyz"], UsageError, "--start"),
        (["--start", "xyz", "--format", "hex"], UsageError, "--start"),
        (["--start", r"C:\data"], UsageError, "--start"),
        (["--format", "hex", "--key-format", "raw"], UsageError, "--key-format"),
        (["--start", "zzz", "--end", "aaa"], UsageError, "zzz is not below aaa"),
        (["--range", "user:1:user:2"], UsageError, "is not START:END"),
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


@pytest.mark.core("tls")
def test_a_wrong_authority(tmp_path: Path) -> None:
    """The cluster's certificate is of another authority than --ca."""
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    pair = authority.issue("server")
    tls = TlsSettings(str(authority.ca), str(pair.cert), str(pair.key))
    started = launcher.start(tmp_path / "cluster", {"stores": 1, "tls": tls}, detached=False)
    try:
        arguments = ("-u", started.state["pd"], "-s", str(tmp_path / "backup"), *DRIVER, "--output", "json", "--ca")
        check_refusal(run(*arguments, str(stranger.ca)), ClusterTlsError)
        assert run(*arguments, str(authority.ca), "--allow-empty").returncode == 0
    finally:
        started.process.terminate()
        started.process.wait(60)


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
    chosen = ("--keyspace", str(OTHER_KEYSPACE), "--keyspace", "DEFAULT", "--range", r":b\x00", "--range", "hex:63:d")
    done = run(*place, *chosen, environment={"TIKV_BR_KEYSPACE": "5"})
    assert done.returncode == 0, done.stderr
    assert lines(done)[-1]["total_kvs"] == 2 * 2
    for wrong in (
        ["--range", "6"],
        ["--range", "a:b:c"],
        ["--range", "hex:zz:"],
        ["--range", "hex:6b"],
        ["--range", ":", "--start", "61"],
    ):
        check_refusal(run(*place, *wrong), UsageError)
    check_refusal(run(*place, "--range", ":63", "--range", "62:"), UsageError)


def test_keys_are_text_and_a_key_that_is_hex_too_is_told(v2: LiveCluster, tmp_path: Path) -> None:
    """Hex keys in scripts of an earlier version are not reinterpreted silently; a range without a row is an error."""
    v2.raw().batch_put({b"1000": b"1", b"1500": b"2"})
    place = ("-u", v2.pd, *DRIVER, "--output", "json")
    text = run(*place, "-s", str(tmp_path / "text"), "--start", "1000", "--end", "2000")
    assert lines(text)[-1]["total_kvs"] == 2
    assert "--start 1000: read as the text 1000; if it is hex, pass hex:1000" in text.stdout
    asked = run(*place, "-s", str(tmp_path / "asked"), "--start", "1000", "--end", "2000", "--key-format", "text")
    assert "hex:1000" not in asked.stdout
    for bounds in (
        ("--start", "hex:1000", "--end", "hex:2000"),
        ("--start", "1000", "--end", "2000", "--format", "hex"),
    ):
        check_refusal(run(*place, "-s", str(tmp_path / "hex"), *bounds), NothingMatched)
    empty = run(*place, "-s", str(tmp_path / "hex"), "--start", "hex:1000", "--end", "hex:2000", "--allow-empty")
    assert lines(empty)[-1]["total_kvs"] == 0


@pytest.mark.parametrize("flag", ["--format", pytest.param("--file-format", marks=pytest.mark.core("parquet"))])
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


def test_a_place_that_cannot_be_written(live: LiveCluster) -> None:
    """A folder that no rights could make."""
    check_refusal(run("-u", live.pd, "-s", "/dev/null/backup", *DRIVER, "--output", "json"), StorageReadOnly)


def test_a_full_storage(live: LiveCluster, tmp_path: Path) -> None:
    """The disk takes the lock and not the files: all is removed again."""
    small_files_only = ["/bin/sh", "-c", 'ulimit -f 600 && exec "$0" "$@"']  # 300 KiB
    place = tmp_path / "backup"
    # First without a limit: else compiled kernels, too, might be written to their cache for the first time under it.
    assert run("-u", live.pd, "-s", str(tmp_path / "first"), *DRIVER).returncode == 0
    done = run("-u", live.pd, "-s", str(place), *DRIVER, "--output", "json", within=small_files_only)
    check_refusal(done, StorageFull)
    assert files_at(place) == []


def test_no_java(live: LiveCluster, tmp_path: Path) -> None:
    """Spark cannot start: said before the cluster is asked anything or the path is taken."""
    missing = {"JAVA_HOME": str(tmp_path / "nowhere")}
    done = run(
        "-u", live.pd, "-s", str(tmp_path / "backup"), "--executor", "spark", "--output", "json", environment=missing
    )
    check_refusal(done, SparkUnavailable)
    assert not (tmp_path / "backup").exists()


def test_a_backup_by_the_stores_loads_no_arrow_and_no_pandas(live: LiveCluster, tmp_path: Path) -> None:
    """Their import takes longer than the plan and the requests of such a backup."""
    code = "import sys; from tikv_br.cli.main import run; code = run(); print({'pandas', 'pyarrow', 'numpy', 'numba'} & set(sys.modules), code)"
    place = ["-u", live.pd, "-s", str(tmp_path / "backup"), "--engine", "store", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", code, "backup", "raw", *place], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "set() 0", done.stdout + done.stderr
