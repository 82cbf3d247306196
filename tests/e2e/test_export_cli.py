"""``tikv-br export`` as a user runs it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

ROWS = {"name": "Zoë", "quote": 'say "hi", twice', "lines": "1\n2", "empty": ""}
PAIRS = {key.encode(): value.encode() for key, value in ROWS.items()}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V1TTL cluster with some rows of text."""
    with live_cluster(tmp_path_factory.mktemp("cluster"), ApiVersion.V1TTL, stores=1) as live:
        live.raw().batch_put(PAIRS)
        yield live


@pytest.mark.core("export")
def test_round_trip_as_csv(live: LiveCluster, tmp_path: Path) -> None:
    """People read a summary, csv reads the rows, raw import puts them back; a second export there is refused with code 25."""
    place = tmp_path / "out"
    done = succeed("export", "raw", "--pd", live.pd, "-s", str(place), "--format", "csv", "--executor", "driver")
    assert "Export complete" in done.out
    assert f"{len(ROWS)}" in done.out
    with (place / "part-00000.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["key"]: row["value"] for row in rows} == ROWS
    assert {row["expire_ts"] for row in rows} == {""}
    live.raw().delete_range(EVERY_KEY)
    succeed("raw", "import", str(place / "part-00000.csv"), "--pd", live.pd)
    assert contents(live) == PAIRS
    refused = tikv_br("export", "raw", "--pd", live.pd, "-s", str(place), "--output", "json")
    assert (refused.code, refused.last["name"]) == (25, "StorageConflict")
    assert "--overwrite" in refused.last["hint"]


def test_backup_as_json_lines(live: LiveCluster, tmp_path: Path) -> None:
    """`tikv-br export` is `export raw`; ranges are given as --key-format says."""
    succeed("backup", "raw", "--pd", live.pd, "-s", str(tmp_path / "backup"), "--executor", "driver")
    range_flags = ("--start", "m", "--end", "hex:6f")
    source = ("--from-backup", str(tmp_path / "backup"), "--format", "jsonl", "--executor", "driver")
    done = succeed("export", *source, "-s", str(tmp_path / "out"), *range_flags, "--output", "json").last
    assert (done["total_kvs"], done["encoding"]) == (1, "hex")
    text = (tmp_path / "out" / "part-00000.jsonl").read_text()
    named = {"url": (f"{tmp_path}/backup",), "newest": ("newest", "--from-backup", str(tmp_path))}
    for name, chosen in named.items():
        succeed("export", *chosen, *source[2:], "-s", str(tmp_path / name), *range_flags)
        assert (tmp_path / name / "part-00000.jsonl").read_text() == text
    assert tikv_br("export", f"{tmp_path}/backup", "-s", str(tmp_path / "no"), "--pd", live.pd).code == 2
    assert tikv_br("export", "newest", "-s", str(tmp_path / "no")).code == 2
    line = '{"key":"6e616d65","value":"5a6fc3ab","expire_ts":null}\n'
    assert (tmp_path / "out" / "part-00000.jsonl").read_text() == line
