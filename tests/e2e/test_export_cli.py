"""``tikv-br export`` as a user runs it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.e2e.conftest import Playgrounds

ROWS = {"name": "Zoë", "quote": 'say "hi", twice', "lines": "1\n2", "empty": ""}


@pytest.fixture
def pd(playgrounds: Playgrounds, tmp_path: Path) -> str:
    """A V1TTL cluster with some rows of text."""
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("key", "value"), *ROWS.items()])
    succeed("raw", "delete-range", "--pd", playgrounds["v1ttl"], "--yes")
    succeed("raw", "load", str(tmp_path / "rows.csv"), "--pd", playgrounds["v1ttl"])
    return playgrounds["v1ttl"]


@pytest.mark.core("export")
def test_round_trip_as_csv(pd: str, tmp_path: Path) -> None:
    """People read a summary, csv reads the rows, raw load puts them back; a second export there is refused with code 25."""
    place = tmp_path / "out"
    done = succeed("export", "raw", "--pd", pd, "-s", str(place), "--format", "csv", "--executor", "driver")
    assert "Export complete" in done.out
    assert f"{len(ROWS)}" in done.out
    with (place / "part-00000.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["key"]: row["value"] for row in rows} == ROWS
    assert {row["expire_ts"] for row in rows} == {""}
    succeed("raw", "delete-range", "--pd", pd, "--yes")
    succeed("raw", "load", str(place / "part-00000.csv"), "--pd", pd)
    assert succeed("raw", "get", "--pd", pd, "quote", "--value-format", "raw").out == f"{ROWS['quote']}\n"
    refused = tikv_br("export", "raw", "--pd", pd, "-s", str(place), "--output", "json")
    assert (refused.code, refused.last["name"]) == (25, "StorageConflict")
    assert "--overwrite" in refused.last["hint"]


def test_backup_as_json_lines(pd: str, tmp_path: Path) -> None:
    """`tikv-br export` is `export raw`; ranges are given as --key-format says."""
    succeed("backup", "raw", "--pd", pd, "-s", str(tmp_path / "backup"), "--executor", "driver")
    range_flags = ("--key-format", "raw", "--start", "m", "--end", "o")
    source = ("--from-backup", str(tmp_path / "backup"), "--format", "jsonl", "--executor", "driver")
    done = succeed("export", *source, "-s", str(tmp_path / "out"), *range_flags, "--output", "json").last
    assert (done["total_kvs"], done["encoding"]) == (1, "hex")
    line = '{"key":"6e616d65","value":"5a6fc3ab","expire_ts":null}\n'
    assert (tmp_path / "out" / "part-00000.jsonl").read_text() == line
