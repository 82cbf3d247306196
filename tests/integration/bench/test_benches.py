"""All benches run, on very little data, and write what docs/benchmarks.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench.__main__ import BENCHES
from tests.support.tools import ROOT

FIGURE = {
    "bench", "case", "subject", "unit", "value", "runs", "compared_with", "ratio", "goal", "reached",
}  # fmt: skip
TOO_LONG = 400
pytestmark = pytest.mark.timeout(TOO_LONG)
ALL = "TIKV_BR_TEST_ALL_BENCHES" in os.environ
SLOW = {
    "commands",
    "orchestration",
    "spark_tasks",
    "scan_far",
    "sync_growth",
    "point_in_time",
    "log_rpo",
    "load_raw",
}
"""Benches of whole commands, of the JVM and of waiting, half a minute of other work: on request."""
COMMAND = ("whole command", "stores at work", "the command's own")
ON_REQUEST = {
    *((bench, name) for bench in ("commands", "orchestration") for name in COMMAND),
    *(("orchestration", name) for name in ("least that stores need", "its processor time", "own share")),
    ("commands", "its processor time"),
    *(("scan from afar", name) for name in ("tikv-br", "tikv-br, one lane")),
    *(("sync growth", name) for name in ("lag grows by", "lag, median", "sync's processor time")),
    *(("point in time", name) for name in (*COMMAND, "its processor time", "peak memory")),
    *(("log writer", "tikv-br"), ("log compaction", "tikv-br"), ("merge", "time")),
    *(("log RPO", name) for name in ("p50", "p99", "longest", "caught up after", "peak memory")),
    *(("log RPO", name) for name in ("versions in the log", "stored")),
    *(("initial load", name) for name in ("load raw", "raw load (puts)")),
    *(("Spark tasks", name) for name in ("session start", "until the first task ends", "each further task", "closure")),
}
AT_TIMES = {("scan to SST", "client-go, scan alone"), ("sync growth", "lag begins to grow at")}
"""Cases that depend on a built client-go, or in which a sync cannot keep up."""
SECONDS_BEHIND = 30.0
"""On the slowest machine: five servers and clients share its cores with other tests."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON of one run; the table is beside it under ``table``."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    asked = [part for name in BENCHES if ALL or name not in SLOW for part in ("--only", name)]
    command = [sys.executable, "-m", "bench", "--tiny", "--json", str(path), *asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TOO_LONG - 10, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found | {"table": done.stdout}


@pytest.mark.slow
def test_every_bench_has_figures(document: dict[str, Any]) -> None:
    """Each bench shows each of its subjects, with a median between the extremes, and ratios where there are rivals."""
    assert document["schema"] == 1
    assert document["scale"] == "tiny"
    figures = document["figures"]
    assert all(set(figure) == FIGURE for figure in figures)
    for figure in figures:
        for spread in filter(None, (figure["value"], figure["ratio"])):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert (figure["ratio"] is None) == (not figure["compared_with"])
    shown = {(figure["bench"], figure["subject"]) for figure in figures if not figure["subject"].startswith("step ")}
    subjects = shown - AT_TIMES
    assert subjects == {
        *(("scan to SST", name) for name in ("tikv-br, zstd 1", "tikv-br, lz4")),
        *(("scan to SST", name) for name in ("rocksdict writer, zstd 1", "per-key Python, zstd 1")),
        *(("SST writer", name) for name in ("tikv-br", "rocksdict")),
        *(("SST reader", name) for name in ("tikv-br", "rocksdict, iterated", "rocksdict, into Arrow")),
        *(("codec kernels", name) for name in ("memcpy", "scan page to Arrow", "checksum", "records to V2")),
        *(("codec kernels", name) for name in ("page to records, with sums", "records from V2")),
        *((bench, name) for bench in ("growth", "planning") for name in ("time", "peak memory")),
        *((bench, name) for bench in ("restore planning", "planning and commit") for name in ("time", "peak memory")),
        *(("sync ceiling", name) for name in ("tikv-br", "target's ceiling")),
        *(("sync lag", name) for name in ("p50", "p90", "p99", "longest", "sync's CPU per event", "catching up")),
        *(ON_REQUEST if ALL else ()),
    }


@pytest.mark.slow
def test_a_sync_is_seconds_behind(document: dict[str, Any]) -> None:
    """At 2,000 rows a second, or what the machine can, the target is seconds behind; a hold-back adds as much as it says."""
    middle = {
        figure["case"].rpartition("hold-back ")[2]: figure["value"]["median"]
        for figure in document["figures"]
        if (figure["bench"], figure["subject"]) == ("sync lag", "p50")
    }
    assert middle["0 s"] < SECONDS_BEHIND
    assert 2.5 < middle["3 s"] < SECONDS_BEHIND + 3


@pytest.mark.slow
def test_figures_say_where_they_come_from(document: dict[str, Any]) -> None:
    """Machine and load are in the document, and each figure is a line of the table."""
    assert document["machine"]["cores"] >= 1
    assert 0 < document["load"]["busy_share"] <= 1
    assert len(document["load"]["load_before"]) == 3
    lines = document["table"].splitlines()
    for figure in document["figures"]:
        cells = [figure["bench"], figure["case"], figure["subject"], figure["unit"]]
        assert any(line.startswith(cells[0]) and all(cell in line for cell in cells) for line in lines)
