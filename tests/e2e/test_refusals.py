"""Bad input answers before anything heavy is loaded: no Spark, no compiler, no Arrow, no storage client.

What is counted is what a process has imported, not seconds, which a busy machine stretches. All refusals of a kind run in one
process: what any of them loads, the list after it shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import environment

HEAVY = ("numba", "pyarrow", "numpy", "pyspark", "py4j", "obstore", "boto3", "botocore", "rich")
SCRIPT = """
import contextlib, io, json, sys
from tikv_br.cli.main import run
heavy = sys.argv[1].split(",")
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = run(arguments)
    loaded = [name for name in heavy if name in sys.modules]
    print(json.dumps({"arguments": arguments, "code": code, "loaded": loaded, "said": said.getvalue()}))
"""
NOWHERE = "127.0.0.1:1"
LOAD = ["load", "raw", "--input", "/x.csv", "--key-column", "k", "--value-column", "v", "--staging", "/proc/nowhere"]

WITHOUT_A_CLUSTER = [
    (["nonsense"], 2),
    (["backup", "raw"], 2),
    (["backup", "raw", "-s", "/x", "--engine", "fast"], 2),
    (["backup", "raw", "-s", "/x", "--executor", "moon"], 2),
    (["backup", "raw", "-s", "/x", "--dst-api-version", "v9"], 2),
    (["backup", "raw", "-s", "/x", "--compression", "zip"], 2),
    (["backup", "raw", "-s", "/x", "--file-size", "5q"], 2),
    (["backup", "raw", "-s", "/x", "--gcttl", "soon"], 2),
    (["backup", "raw", "-s", "/x", "--start", "hex:zz"], 2),
    (["backup", "raw", "-s", "/x", "--range", "zz"], 2),
    (["backup", "raw", "-s", "/x", "--ratelimit", "x"], 2),
    (["backup", "raw", "-s", "/x", "--crypter.method", "aes128-ctr", "--crypter.key", "zz"], 2),
    (["backup", "raw", "-s", "ftp://x/y"], 2),
    (["backup", "raw", "-s", "hdfs://x/y"], 2),
    (["backup", "raw", "-s", "s3://xyz/y?acl=private"], 2),
    (["backup", "raw", "-s", "gs://xyz/y", "--gcs.predefined-acl", "private"], 2),
    (["backup", "raw", "-s", "s3://xyz/y", "--s3.acl", "private"], 2),
    (["backup", "raw", "-s", "azure://xyz/y", "--azblob.account-key", "no base64"], 2),
    (["restore", "raw", "-s", "/x", "--file-check", "no"], 2),
    (["restore", "raw", "-s", "/x", "--start", "02", "--end", "01"], 2),
    (["load", "raw", "--input", "/x.csv", "--key-column", "k", "--value-column", "v"], 2),
    ([*LOAD, "--spark-master", "moon"], 2),
    ([*LOAD, "--spark-conf", "spark.executor.memory"], 2),
    ([*LOAD, "--spark-conf", "executor.memory=4g"], 2),
    ([*LOAD, "--spark-conf", "spark.master=local"], 2),
    ([*LOAD, "--spark-archive", "/nowhere.tar.gz", "--spark-master", "spark://127.0.0.1:1"], 2),
    (["spark", "pack", "/proc/nowhere/archive.tar.gz"], 54),
    (["spark", "pack", "/proc/nowhere/archive.zip"], 2),
    ([*LOAD, "--input-option", "header"], 2),
    ([*LOAD, "--on-duplicate", "last"], 2),
    ([*LOAD, "--order-column", "t"], 2),
    ([*LOAD, "--input", "/x"], 2),
    (["sync"], 2),
    (["sync", "--sink", "nowhere://"], 2),
    (["sync", "--sink", "blackhole://"], 2),
    (["sync", "--sink", "blackhole://", "--state-dir", "/x", "--scratch-dir", "/proc/nowhere"], 2),
    (["sync", "--sink", "blackhole://", "--state-dir", "/x", "--status-addr", "foo"], 2),
    (["sync", "--sink", "blackhole://", "--state-dir", "/x", "--status-every", "0"], 2),
    (["sync", "--sink", "blackhole://", "--state-dir", "/x", "--start-ts", "now", "--from-backup-ts", "7"], 2),
    (["sync", "--sink", "tikv://x:1", "--mode", "diff", "--sink-ratelimit", "1"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1", "--state-dir", "/x", "--start-ts", "now"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t?protocol=avro", "--state-dir", "/x", "--start-ts", "now"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t", "--sink-ca", "x", "--state-dir", "/x", "--start-ts", "now"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t", "--sink-batch-size", "9", "--state-dir", "/x"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t", "--sink-concurrency", "9", "--state-dir", "/x"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t", "--allow-loss", "ttl", "--state-dir", "/x"], 2),
    (["log"], 2),
    (["log", "start"], 2),
    (["log", "start", "-s", "ftp://x/y"], 2),
    (["log", "start", "-s", "/x", "--flush-interval", "0"], 2),
    (["log", "start", "-s", "/x", "--flush-size", "5q"], 2),
    (["log", "start", "-s", "/x", "--scratch-dir", "/proc/nowhere"], 2),
    (["log", "status", "-s", "/proc/nowhere"], 31),
    (["log", "status", "-s", "/proc/nowhere", "--id", "a/b"], 2),
    (["log", "metadata", "-s", "/proc/nowhere"], 31),
    (["log", "pause", "-s", "/proc/nowhere"], 31),
    (["log", "compact", "-s", "/proc/nowhere"], 31),
    (["log", "compact", "-s", "/proc/nowhere", "--until", "then"], 2),
    (["log", "compact", "-s", "/proc/nowhere", "--executor", "spark", "--spark-master", "sparks"], 2),
    (["log", "truncate", "-s", "/proc/nowhere"], 2),
    (["log", "truncate", "-s", "/proc/nowhere", "--until", "7"], 31),
    (["log", "truncate", "-s", "/proc/nowhere", "--until", "then"], 31),
    (["log", "stop", "-s", "/proc/nowhere"], 31),
    (["restore", "point", "-s", "/x", "--full-backup-storage", "/x", "--until", "then"], 2),
    (["restore", "point", "-s", "/x", "--full-backup-storage", "/x", "--log-id", "a/../b"], 2),
    (["restore", "raw", "-s", "/x", "--log", "/x", "--until", "then"], 2),
    (["backup", "merge", "-s", "/x", "--base", "/x", "--until", "then"], 2),
    (["backup", "merge", "-s", "/x", "--base", "/x", "--log", "/x", "--log-id", "a/b"], 2),
    (["log", "start", "-s", "/x", "--id", "a/b"], 2),
    (["sync", "--sink", "local:///x?id=a/b"], 2),
    (["export", "raw"], 2),
    (["export", "raw", "-s", "/x", "--format", "xml"], 2),
    (["export", "raw", "-s", "/x", "--encoding", "base64"], 2),
    (["export", "raw", "-s", "/x", "--range", "zz"], 2),
    (["export", "raw", "-s", "/x", "--from-backup", "/x", "--pd", "127.0.0.1:1"], 2),
    (["export", "raw", "-s", "/x", "--crypter.key", "00"], 2),
    (["verify"], 2),
    (["verify", "/x", "--level", "deep"], 2),
    (["list"], 2),
    (["backup", "pin", "-s", "/x"], 2),
    (["prune", "-s", "/proc/nowhere"], 2),
    (["show", "-s", "/proc/nowhere"], 31),
    (["cat", "-s", "/proc/nowhere", "k"], 31),
    (["backup", "pin", "-s", "/proc/nowhere", "20260101"], 31),
    (["raw", "put", "k"], 2),
    (["raw", "get", "zz", "--format", "hex"], 2),
    (["raw", "get", "hex:zz"], 2),
    (["raw", "import"], 2),
    (["changefeed", "create", "--start-ts", "now"], 2),
    (["changefeed", "create", "--sink", "blackhole://"], 2),
    (["changefeed", "create", "--sink", "file:///x", "--start-ts", "now"], 2),
    (
        [
            "changefeed",
            "create",
            "--sink",
            "kafka://u:p@127.0.0.1:1/t?sasl-mechanism=SCRAM-SHA-256",
            "--start-ts",
            "now",
        ],
        2,
    ),
    (["changefeed", "create", "--sink", "blackhole://", "--start-ts", "now", "--id", "a/b"], 2),
    (["changefeed", "create", "--sink", "blackhole://", "--start-ts", "now", "--etcd-user", "x"], 2),
    (["changefeed", "update", "x", "--sink", "ftp://x"], 2),
    (["changefeed", "pause"], 2),
    (["capture", "list", "--etcd", "nonsense"], 2),
    (["capture", "start", "--lease", "61s"], 2),
    (["kafka"], 2),
    (["kafka", "replay"], 2),
    (["kafka", "replay", "--from", "kafka://x/y"], 2),
    (["kafka", "replay", "--from", "kafka://x/y", "--sink", "blackhole://"], 2),
    (["kafka", "replay", "--from", "kafka://x", "--sink", "tikv://x:1"], 2),
    (["kafka", "replay", "--from", "kafka://x/y?encoding=hex", "--sink", "tikv://x:1"], 2),
    (["kafka", "replay", "--from", "kafka://x/y", "--sink", "tikv://x:1", "--until", "then"], 2),
    (["kafka", "replay", "--from", "kafka://x/y", "--sink", "tikv://x:1", "--status-every", "0"], 2),
    (["gc"], 2),
    (["gc", "status", "--warn", "2h", "--critical", "1h"], 2),
    (["gc", "status", "--warn", "soon"], 2),
    (["gc", "release"], 2),
    (["gc", "run", "--life-time", "0"], 2),
    (["gc", "run", "--interval", "500ms"], 2),
    (["gc", "run", "--lease", "1s"], 2),
    (["gc", "run", "--status-addr", "foo"], 2),
    (["gc", "run", "--etcd-user", "x"], 2),
    (["serve"], 2),
    (["serve", "-s", "/x", "--listen", "nowhere"], 2),
    (["serve", "-s", "/x", "--listen", "0.0.0.0:8390"], 2),
    (["serve", "-s", "/x", "--listen", "0.0.0.0:8390", "--token", "short"], 2),
    (["serve", "-s", "/x", "--token-file", "/proc/nowhere"], 2),
    (["serve", "-s", "/x", "--refresh", "0"], 2),
    (["serve", "-s", "ftp://x/y"], 2),
    (["serve", "--log", "/x?id=a/b"], 2),
    (["serve", "--status", "ftp://x"], 2),
    (["serve", "--status", "http://user:word@x"], 2),
    (["serve", "--status", "x:1", "--status-key-file", "/proc/nowhere"], 2),
    (["serve", "--pd", "nowhere"], 2),
    (["config", "show", "nonsense"], 2),
    (["version", "--config", "/proc/nowhere"], 2),
    (["playground", "start", "--dir", "/proc/nowhere/x", "--api-version", "v9"], 2),
    (["playground", "start", "--dir", "/proc/nowhere/x", "--version", "5.3"], 2),
    (["playground", "start", "--dir", "/proc/nowhere/x", "--region-split-size", "5q"], 2),
]
WITH_A_CLUSTER = [
    (["raw", "get", "k", "--pd", NOWHERE], 3),
    (["raw", "get", "k", "--pd", "nowhere"], 2),
    (["raw", "get", "k", "--pd", NOWHERE, "--ca", "/proc/nowhere"], 2),
    (["backup", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE], 3),
    (["backup", "raw", "-s", "/proc/nowhere", "--pd", "a:b"], 2),
    (["backup", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--spark-master", "moon"], 2),
    (["backup", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--cert", "/proc/nowhere"], 2),
    (["restore", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE], 3),
    ([*LOAD, "--pd", NOWHERE], 3),
    (["restore", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--mode", "put"], 3),
    (["restore", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--mode", "put", "--allow-followers"], 2),
    (["restore", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--rewrite-prefix", "zz"], 2),
    (["backup", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--file-format", "parquet"], 3),
    (["restore", "point", "-s", "/proc/nowhere", "--full-backup-storage", "/proc/nowhere", "--pd", NOWHERE], 31),
    (["restore", "raw", "-s", "/proc/nowhere", "--log", "/proc/nowhere", "--pd", NOWHERE], 31),
    (["backup", "merge", "-s", "/proc/nowhere", "--base", "/proc/nowhere"], 31),
    (["gc", "status", "--pd", NOWHERE], 3),
    (["gc", "release", "x", "--pd", NOWHERE], 3),
    (["gc", "run", "--pd", NOWHERE], 3),
    (["diff", "--pd", NOWHERE], 2),
    (["diff", "--pd", NOWHERE, "--storage", "/proc/nowhere"], 31),
    (["export", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE], 3),
    (["export", "raw", "-s", "/proc/nowhere", "--pd", NOWHERE, "--encoding", "hex"], 2),
    (["export", "raw", "-s", "/proc/nowhere", "--from-backup", "/proc/nowhere"], 31),
    (["export", "raw", "-s", "/proc/nowhere", "--from-backup", "/proc/nowhere", "--ratelimit", "1"], 2),
    (["sync", "--sink", "kafka://127.0.0.1:1/t", "--mode", "diff", "--pd", NOWHERE], 2),
    (["verify", "/proc/nowhere"], 31),
    (["verify", "/proc/nowhere", "--subset", "7/3"], 2),
]


@pytest.mark.parametrize(
    ("refusals", "heavy"),
    [(WITHOUT_A_CLUSTER, (*HEAVY, "grpc")), (WITH_A_CLUSTER, HEAVY)],
    ids=["no cluster is asked", "a cluster is asked"],
)
def test_refusals_load_nothing_heavy(refusals: list[tuple[list[str], int]], heavy: tuple[str, ...]) -> None:
    """Each has its exit code and a sentence; gRPC is loaded where PD has been asked, the rest never."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(heavy)],
        input=json.dumps([arguments for arguments, _ in refusals]),
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
        env=environment(),
        cwd=Path(__file__).resolve().parents[2],
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(answer["arguments"], answer["code"]) for answer in answers] == refusals
    assert [answer for answer in answers if answer["loaded"] or "Error: " not in answer["said"]] == []
