"""``tikv-br raw`` on playgrounds of all API versions."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import succeed, tikv_br
from tests.e2e.conftest import VERSIONS, Playgrounds
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient

EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def pd(playgrounds: Playgrounds, version: str) -> str:
    """Return the address of an emptied cluster of the version that the test asks for."""
    succeed("raw", "delete-range", "--pd", playgrounds[version], "--all", "--confirm")
    return playgrounds[version]


@EVERY_VERSION
def test_put_get_delete_with_every_form_of_key(pd: str) -> None:
    """A pair put in one form is got in another; deleted, it is gone, with exit code 13 for scripts."""
    succeed("raw", "put", "--pd", pd, "k\u00e9y", "v1")
    assert succeed("raw", "get", "--pd", pd, "6bc3a979", "--format", "hex", "--value-format", "raw").out == "v1\n"
    assert succeed("raw", "get", "--pd", pd, r"k\xc3\xa9y", "--format", "escaped").out == "v1\n"
    for name in (r"k\xc3\xa9y", "hex:6bc3a979"):
        assert succeed("raw", "get", "--pd", pd, name).out == "v1\n"
    succeed("raw", "put", "--pd", pd, "--format", "hex", "00ff", "0a00")
    got = succeed("raw", "get", "--pd", pd, "--format", "hex", "00ff", "--output", "json").last
    assert got.items() >= {"message_type": "pair", "key": "00ff", "value": "0a00"}.items()
    succeed("raw", "delete", "--pd", pd, "--format", "hex", "00ff")
    gone = tikv_br("raw", "get", "--pd", pd, "--format", "hex", "00ff", "--output", "json")
    assert (gone.code, gone.last["message_type"], gone.last["name"]) == (13, "exit_error", "KeyNotFound")


@EVERY_VERSION
def test_scan_shows_every_pair_in_order(pd: str) -> None:
    """Text and JSON show the same pairs, ascending, within bounds and limit; JSON rows have key and value only."""
    rows = [{"key": name, "value": name.upper()} for name in "bacd"]
    succeed("raw", "import", "--pd", pd, "--format", "raw", "-", stdin="\n".join(map(json.dumps, rows)))
    assert succeed("raw", "scan", "--pd", pd).out == "a\tA\nb\tB\nc\tC\nd\tD\n"
    rows = succeed("raw", "scan", "--pd", pd, "--start", "b", "--end", "d", "--output", "json").lines
    assert rows == [{"key": "62", "value": "42"}, {"key": "63", "value": "43"}]
    assert succeed("raw", "scan", "--pd", pd, "--limit", "2", "--start", "b").out == "b\tB\nc\tC\n"
    assert succeed("raw", "scan", "--pd", pd, "--start", "x").out == ""
    succeed("raw", "delete-range", "--pd", pd, "--start", "b", "--end", "d", "--yes")
    assert succeed("raw", "scan", "--pd", pd).out == "a\tA\nd\tD\n"


@pytest.mark.parametrize("version", ["v1ttl", "v2"])
def test_ttl_is_kept_and_shown(pd: str) -> None:
    """A TTL is shown as seconds left and as absolute time, and 0 or "never" where there is none."""
    before = int(time.time())
    succeed("raw", "put", "--pd", pd, "soon", "x", "--ttl", "1h")
    succeed("raw", "put", "--pd", pd, "never", "y")
    rows = {row["key"]: row for row in succeed("raw", "scan", "--pd", pd, "--with-ttl", "--output", "json").lines}
    assert set(rows[b"soon".hex()]) == {"key", "value", "expire_ts"}
    assert before + 3598 <= rows[b"soon".hex()]["expire_ts"] <= time.time() + 3602
    assert rows[b"never".hex()]["expire_ts"] == 0
    left = succeed("raw", "ttl", "--pd", pd, "soon", "--output", "json").last
    assert 3500 < left["ttl"] <= 3600
    assert succeed("raw", "ttl", "--pd", pd, "never").out == "never\n"
    assert tikv_br("raw", "ttl", "--pd", pd, "nothing").code == 13


@pytest.mark.parametrize("version", ["v1"])
def test_ttl_is_refused_where_a_store_would_die_of_it(pd: str) -> None:
    """On V1 every use of a TTL is a usage error before anything is sent, and the stores live on."""
    for arguments in (["ttl", "k"], ["put", "k", "v", "--ttl", "5"], ["scan", "--with-ttl"]):
        done = tikv_br("raw", arguments[0], "--pd", pd, *arguments[1:])
        assert (done.code, "does not support TTLs" in done.err) == (2, True)
    succeed("raw", "put", "--pd", pd, "still", "alive")


@EVERY_VERSION
def test_load_from_every_kind_of_file_and_made(pd: str, version: str, tmp_path: Path) -> None:
    """JSON lines from a scan, CSV, Parquet and made pairs all arrive; scan, checksum and summary agree on them."""
    (tmp_path / "a.csv").write_text("key,value\nc1,x\nc2,y\n")
    pq.write_table(pa.table({"key": [b"p1"], "value": [b"z"]}), tmp_path / "a.parquet")
    lines = '{"key":"6a31","value":"77"}\n'
    loads = [
        succeed("raw", "import", "--pd", pd, str(tmp_path / "a.csv"), "--output", "json").last,
        succeed("raw", "import", "--pd", pd, str(tmp_path / "a.parquet"), "--output", "json").last,
        succeed("raw", "import", "--pd", pd, "-", "--output", "json", stdin=lines).last,
        succeed("raw", "import", "--pd", pd, "--count", "5000", "--value-size", "50", "--output", "json").last,
    ]
    assert [load["total_kvs"] for load in loads] == [2, 1, 1, 5000]
    rows = succeed("raw", "scan", "--pd", pd, "--output", "json").lines
    assert [bytes.fromhex(row["key"]) for row in rows][:4] == [b"c1", b"c2", b"j1", b"key-000000000000"]
    assert len(rows) == 5004
    prefix = 4 if version == "v2" else 0
    size = sum(len(row["key"]) // 2 + len(row["value"]) // 2 + prefix for row in rows)
    checksum = succeed("raw", "checksum", "--pd", pd, "--output", "json").last
    assert (checksum["total_kvs"], checksum["total_bytes"]) == (5004, size)
    assert 0 < checksum["crc64xor"] < 2**64


@pytest.mark.parametrize("version", ["v2"])
@pytest.mark.core("raw")
def test_keyspaces_are_apart(pd: str) -> None:
    """Pairs of one keyspace are not seen in another."""
    succeed("raw", "put", "--pd", pd, "k", "zero")
    succeed("raw", "delete", "--pd", pd, "--keyspace", "4242", "k")
    missing = tikv_br("raw", "get", "--pd", pd, "--keyspace", "4242", "k")
    assert (missing.code, "in keyspace 4242" in missing.err, "--keyspace" in missing.err) == (13, True, True)
    succeed("raw", "put", "--pd", pd, "--keyspace", "4242", "k", "other")
    assert succeed("raw", "get", "--pd", pd, "k").out == "zero\n"


@pytest.mark.parametrize("version", ["v1"])
def test_wrong_flags_answer_without_a_cluster(pd: str) -> None:
    """Bad keys, empty ranges, unknown keyspaces and dangerous deletes exit 2, each with its reason."""
    nowhere = "127.0.0.1:1"
    cases = {
        ("get", "--pd", nowhere, "--format", "hex", "6g"): "not a hex digit",
        ("scan", "--pd", nowhere, "--start", "zzz", "--end", "aaa"): "--start zzz is not less than --end aaa",
        ("checksum", "--pd", nowhere, "--start", "b", "--end", "b"): "--start b is not less than --end b",
        ("delete-range", "--pd", nowhere, "--start", "a"): "--yes",
        ("delete-range", "--pd", nowhere): "no range was given",
        ("delete-range", "--pd", nowhere, "--yes"): "--all",
        ("delete-range", "--pd", nowhere, "--yes", "--all", "--prefix", "a"): "--all cannot be combined",
        ("scan", "--pd", nowhere, "--prefix", "a", "--end", "b"): "--prefix cannot be combined",
        ("load", "--pd", nowhere): "either FILE or --count",
        ("load", "--pd", nowhere, "--count", "1", "/x.csv"): "either FILE or --count",
        ("load", "--pd", nowhere, "/nowhere/x.csv"): "is not a file",
        ("put", "--pd", nowhere, "k", "v", "--ttl", "1.5s"): "whole seconds",
        ("put", "--pd", nowhere, "k", "v", "--ttl", "soon"): "not a valid duration",
        ("put", "--pd", "nonsense", "k", "v"): "host:port",
        ("put", "--pd", pd, "--keyspace", "7", "k", "v"): "no keyspaces",
        ("get", "--pd", pd, "--cert", "/c.pem", "k"): "--cert and --key",
    }
    for arguments, words in cases.items():
        done = tikv_br("raw", *arguments)
        assert (done.code, words in done.err) == (2, True), f"{arguments}: {done}"


@pytest.mark.parametrize("version", ["v2"])
def test_a_prefix(pd: str) -> None:
    """The keys that begin with it, up to the last byte; who follows the cluster is told that it does not see the deletion."""
    for key in ("a", "user:1", "user:\\xff", "user;"):
        succeed("raw", "put", "--pd", pd, key, "v")
    assert succeed("raw", "scan", "--pd", pd, "--prefix", "user:").out == "user:1\tv\nuser:\\xff\tv\n"
    assert succeed("raw", "checksum", "--pd", pd, "--prefix", "user:", "--output", "json").last["total_kvs"] == 2
    with PdClient(ClusterConfig(pd=(pd,))) as client:
        client.update_service_safe_point("tikv-br-sync-east", 60, client.tso())
        done = succeed("raw", "delete-range", "--pd", pd, "--prefix", "user:", "--yes")
        client.update_service_safe_point("tikv-br-sync-east", 0, 0)
    assert ("tikv-br-sync-east" in done.err, "Deleted 2 rows" in done.out) == (True, True)
    assert "follow" not in succeed("raw", "delete-range", "--pd", pd, "--all", "--yes").err


@pytest.mark.parametrize("version", ["v1"])
def test_scanned_json_loads_again(pd: str, tmp_path: Path) -> None:
    """``raw import`` reads the output of ``raw scan --output json``, to the byte."""
    succeed("raw", "import", "--pd", pd, "--count", "1000", "--value-size", "33")
    first = succeed("raw", "scan", "--pd", pd, "--output", "json").out
    (tmp_path / "all.jsonl").write_text(first)
    succeed("raw", "delete-range", "--pd", pd, "--all", "--confirm")
    assert succeed("raw", "scan", "--pd", pd).out == ""
    succeed("raw", "import", "--pd", pd, str(tmp_path / "all.jsonl"))
    assert succeed("raw", "scan", "--pd", pd, "--output", "json").out == first
    assert len(json.loads(first.splitlines()[0])["value"]) == 66
