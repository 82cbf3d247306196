"""``tikv-br load raw`` as a user runs it, with its staging on a real S3 server."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, tikv_br
from tests.integration.s3_servers import BUCKET, SECRET_KEY, S3Server, versitygw_server
from tests.support.live_cluster import contents, live_cluster
from tests.support.tools import ROOT, missing
from tests.support.waiting import eventually
from tikv_br.formats.api_version import ApiVersion

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


def _objects(server: S3Server) -> list[str]:
    """Objects in the server's own listing."""
    return [each["Key"] for each in server.admin.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
