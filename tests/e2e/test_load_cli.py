"""``tikv-br load raw`` as a user runs it, with its staging on a real S3 server."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import PROGRAM, environment, tikv_br
from tests.integration.cloud_servers import AzureServer, azurite_server
from tests.integration.gcs_server import GcsServer, gcs_server
from tests.integration.s3_servers import BUCKET, SECRET_KEY, S3Server, versitygw_server
from tests.support.live_cluster import contents, live_cluster
from tests.support.tools import ROOT, missing
from tests.support.waiting import eventually
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = {f"k{number:03d}": f"v{number}" for number in range(300)}


COLUMNS = ("--key-column", "id", "--value-column", "payload", "--spark-master", "local[1]", "--output", "json")


@pytest.mark.core("load")
def test_a_dry_run_says_what_would_be_loaded(tmp_path: Path) -> None:
    """It counts rows and bytes of an input, and changes neither the target nor the staging."""
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(json.dumps({"id": key, "payload": value}) for key, value in ROWS.items()))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2) as live:
        where = ("--pd", live.pd, "--input", str(table), "--staging", f"local://{tmp_path}/staging")
        done = tikv_br("load", "raw", *where, *COLUMNS, "--dry-run")
        assert done.code == 0, done
        assert (done.last["input_rows"], done.last["duplicate_rows"], done.last["bad_rows"]) == (len(ROWS), 0, 0)
        assert contents(live) == {}
    assert not (tmp_path / "staging").exists()


def test_structs_as_avro(tmp_path: Path) -> None:
    """With Spark's module for Avro a struct becomes the bytes that the specification says: fields in order, unions with null by index."""
    jars = sorted((ROOT / ".cache" / "jars").glob("spark-avro_*.jar"))
    if not jars:
        missing("no spark-avro: run scripts/install_spark_avro.sh")
    table = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "payload": {"name": "\u00e4", "tags": ["x", None]}}, {"id": "b", "payload": {"tags": []}}]
    table.write_text("\n".join(map(json.dumps, rows)))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2) as live:
        where = ("--pd", live.pd, "--input", str(table), "--mode", "put")
        done = tikv_br(
            *("load", "raw", *where, *COLUMNS, "--value-encoding", "avro", "--spark-conf", f"spark.jars={jars[0]}")
        )
        assert done.code == 0, done
        assert contents(live) == {b"a": b"\0\4\xc3\xa4\0\4\0\2x\2\0", b"b": b"\2\0\0"}


def test_load_killed_while_it_ingests_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """SIGKILL after staging: the second run needs no Spark, loads every row, and leaves no object."""
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(json.dumps({"id": key, "payload": value}) for key, value in ROWS.items()))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2) as live, versitygw_server(tmp_path / "s3") as server:
        command = [
            *("load", "raw", "--pd", live.pd, "--input", str(table), "--staging", server.url("lake")),
            *(*COLUMNS, "--partitions", "3"),
        ]
        slow = live.fail("Ingest", {"delay": {"seconds": 5}}, count=-1)
        first = subprocess.Popen(
            [str(PROGRAM), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), cwd="/"
        )
        try:
            eventually(lambda: live.hits(slow) > 0 or first.poll() is not None, seconds=300)
            assert first.poll() is None
            assert [name for name in _objects(server) if name.endswith(".sst")]
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        live.heal()
        done = tikv_br(*command)
        assert done.code == 0, done
        assert (done.last["resumed_staging"], done.last["verified"]) == (True, True)
        assert done.last["session_seconds"] == 0
        assert contents(live) == {key.encode(): value.encode() for key, value in ROWS.items()}
        assert not _objects(server)
        assert SECRET_KEY not in done.out + done.err


FILES = {
    "csv": (b"id,payload\n", b"%s,value\n", b"bad,\xff\n"),
    "jsonl": (b"", b'{"id": "%s", "payload": "value"}\n', b'{"id": "bad", "payload": "\xff"}\n'),
}
"""Head of a file, a row, and a row of bytes that are no text."""


@pytest.fixture(params=["s3", "azure", "gcs"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a folder of each cloud."""
    folder = tmp_path / "lake"
    folder.mkdir()
    servers: dict[str, Callable[[], AbstractContextManager[S3Server | AzureServer | GcsServer]]] = {
        "s3": lambda: versitygw_server(folder),
        "azure": lambda: azurite_server(folder),
        "gcs": lambda: gcs_server(folder),
    }
    with servers[request.param]() as server:
        yield server.url("lake")


@pytest.mark.slow
@pytest.mark.parametrize(("lake", "kind"), [("s3", "csv"), ("azure", "jsonl"), ("gcs", "csv")], indirect=["lake"])
def test_folders_of_a_cloud_are_read_whole_and_bad_rows_are_kept(kind: str, lake: str, tmp_path: Path) -> None:
    """At any depth, without hidden files; a bad row is in the folder of --bad-rows with its file, and the others are loaded."""
    head, row, bad = FILES[kind]
    store = open_store(parse(lake))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2) as live:
        for number, folder in enumerate(("", "sub/", "sub/deep/", "_temporary/")):
            body = head + row % (b"k%d" % number) + (bad if folder == "sub/deep/" else b"")
            store.put(f"{folder}part.{kind}", body)
        where = ("--pd", live.pd, "--input", lake, "--input-format", kind, "--mode", "put")
        done = tikv_br("load", "raw", *where, *COLUMNS, "--bad-rows", str(tmp_path / "bad"))
        assert done.code == 0, done
        assert done.last["bad_rows"] == 1
        assert contents(live) == {b"k0": b"value", b"k1": b"value", b"k2": b"value"}
    written = "".join(path.read_text() for path in (tmp_path / "bad").glob("*/part-*.json"))
    kept = json.loads(written)
    assert (kept["_file"], kept["_line"]) == (f"lake/sub/deep/part.{kind}", 2 + head.count(b"\n"))
    assert "\\xff" in kept["_row"]


@pytest.mark.slow
def test_a_parquet_file_of_a_cloud_without_bytes_is_refused(lake: str, tmp_path: Path) -> None:
    """It is named, and nothing is loaded."""
    store = open_store(parse(lake))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2) as live:
        table = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": ["a"], "payload": ["v"]}), table)
        store.put("good.parquet", table.getvalue().to_pybytes())
        store.put("sub/empty.parquet", b"")
        where = ("--pd", live.pd, "--input", lake, "--input-format", "parquet", "--mode", "put")
        refused = tikv_br("load", "raw", *where, *COLUMNS)
        assert refused.code == UsageError.exit_code, refused
        assert "sub/empty.parquet" in refused.out
        assert contents(live) == {}


def _objects(server: S3Server) -> list[str]:
    """Objects in the server's own listing."""
    return [each["Key"] for each in server.admin.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
