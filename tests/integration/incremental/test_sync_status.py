"""``tikv-br sync --status-addr`` as a process: what it serves is what it does."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.command import PROGRAM, environment, tikv_br
from tests.integration.incremental.conftest import Clusters
from tests.support.documented import assert_documented
from tests.support.lag import Distribution, Probe
from tests.support.live_cluster import contents, live_cluster
from tests.support.ports import reserved_ports
from tests.support.waiting import eventually
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

PATIENCE = 90.0
KEYS = 300
ROWS = {b"status-%03d" % at: b"value" for at in range(KEYS)}


class Served:
    """A sync that serves how it is doing."""

    def __init__(self, process: subprocess.Popen[str], command: list[str]) -> None:
        assert process.stdout is not None
        self._process, self._command = process, command
        reported = json.loads(process.stdout.readline())
        self.url: str = reported["url"]
        self.key = Path(reported["key_file"]).read_text().strip()

    def get(self, path: str) -> str:
        """The body of an answer that must be 200."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def wait_for_rows(self, rows: int = KEYS) -> None:
        """Until the sink has confirmed so many, by default all; 0: until the sync has begun."""
        until = time.monotonic() + PATIENCE
        while True:
            reported: dict[str, Any] = json.loads(self.get("status"))["syncs"][0]
            if reported["status"] and reported["status"]["written"] >= rows:
                return
            assert time.monotonic() < until, reported
            time.sleep(0.1)

    def health(self) -> str:
        """Code and body of /healthz."""
        request = urllib.request.Request(self.url + "healthz", headers={"Authorization": f"Bearer {self.key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return f"{answer.status} {answer.read().decode()}"
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"

    def problem(self) -> str:
        """Problem of the sync, according to /status."""
        return str(json.loads(self.get("status"))["syncs"][0]["trouble"])

    def metrics(self) -> dict[str, float]:
        """All samples by name; there is one sync."""
        families = text_string_to_metric_families(self.get("metrics"))
        return {sample.name: sample.value for family in families for sample in family.samples}

    def stop(self) -> list[dict[str, Any]]:
        """End it by SIGTERM; its JSON lines."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        out = self._process.stdout.read()  # communicate() would drop what was read together with the first line
        assert self._process.wait(PATIENCE) == 143
        lines = [json.loads(line) for line in out.splitlines()]
        assert_documented(self._command, lines)
        return lines


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """Run ``tikv-br sync`` with a status address on a free port."""
    command = ["sync", *arguments, "--status-addr", "0", "--output", "json"]
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            [str(PROGRAM), *command],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(XDG_STATE_HOME=home),
            cwd="/",
        ) as process,
    ):
        try:
            yield Served(process, command)
        finally:
            process.kill()


def test_a_running_sync_is_seen_from_outside(clusters: Clusters, tmp_path: Path) -> None:
    """Rows written show in /status, /metrics and in the JSON lines; /healthz says ok."""
    live = clusters(ApiVersion.V2)
    ours = ["--start", "status-", "--end", "status."]  # other tests' rows of the last seconds are none of ours
    source = ["--pd", live.pd, *ours, "--start-ts", "now", "--hold-back", "0s", "--state-dir", str(tmp_path / "state")]
    with serving(*source, "--sink", "blackhole://", "--status-every", "1s") as sync:
        sync.wait_for_rows(0)
        live.raw().batch_put(ROWS)
        sync.wait_for_rows()
        metrics = sync.metrics()
        assert metrics["tikv_br_sync_written_rows_total"] == KEYS
        assert metrics["tikv_br_sync_feed_regions"] >= 1
        assert metrics["tikv_br_sync_feed_stores"] >= 1
        assert metrics["tikv_br_sync_healthy"] == 1
        assert abs(time.time() - metrics["tikv_br_sync_checkpoint_timestamp_seconds"]) < PATIENCE
        eventually(
            lambda: sync.get("healthz") == "ok\n", PATIENCE
        )  # a region that has just been split is scanned again
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(sync.url + "status", timeout=60)
        lines = sync.stop()
        assert sync.key not in json.dumps(lines)
    assert any(line["message_type"] == "summary" and line["written"] == KEYS for line in lines)
    assert any(line["message_type"] == "status" and line["name"] == "sync" for line in lines)


def test_the_lag_of_writes_is_what_their_user_sees(clusters: Clusters, tmp_path: Path) -> None:
    """With timestamps of stores 3 s old, the checkpoint lags 3 s more than writes take; `write_lag` is the latter."""
    source = clusters(ApiVersion.V2)
    asked = ["--pd", source.pd, "--start-ts", "now", "--hold-back", "0s", "--state-dir", str(tmp_path / "state")]
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        assert source.raw().get(b"nobody's") is None
        with serving(*asked, "--sink", f"tikv://{target.pd}") as sync, Probe(source.raw(), target.raw()) as probe:
            sync.wait_for_rows(100)
            checkpoint_lags: list[float] = []
            until = time.monotonic() + 12.0  # more than the window of the estimate
            while time.monotonic() < until:
                time.sleep(0.2)
                checkpoint_lags.append(json.loads(sync.get("status"))["syncs"][0]["status"]["checkpoint_lag"])
            measured = Distribution.of(probe.lags(since=time.monotonic() - 11.0, until=time.monotonic() - 1.0)).p50
            shown = json.loads(sync.get("status"))["syncs"][0]["status"]
            tolerance = 0.8 + measured / 2  # a busy machine makes both longer, and less alike
            assert abs(shown["write_lag"] - measured) < tolerance, (shown, measured)
            # Both over the same time: a busy machine makes them longer at one moment and not at another.
            assert Distribution.of(checkpoint_lags).p50 > measured + 1.5
            assert sync.metrics()["tikv_br_sync_write_lag_seconds"] < measured + tolerance


def test_a_pd_that_is_down_is_reported(tmp_path: Path) -> None:
    """Within 20 s of the PD of the source going down /healthz says degraded and why; a warning is logged, and it ends with PD's return."""
    with live_cluster(tmp_path / "pg", ApiVersion.V2, stores=1) as source:
        asked = [
            "--pd",
            source.pd,
            "--start-ts",
            "now",
            "--sink",
            "blackhole://",
            "--state-dir",
            str(tmp_path / "state"),
        ]
        log = tmp_path / "log"
        with serving(*asked, "--log-file", str(log)) as sync:
            eventually(lambda: sync.health() == "200 ok\n", PATIENCE)
            source.kill_pd(seconds=25)
            eventually(
                lambda: re.search(r"200 degraded\nsync: .*the source's PD has not answered for 1\d s", sync.health()),
                20,
            )
            assert sync.metrics()["tikv_br_sync_healthy"] == 1
            assert sync.metrics()["tikv_br_sync_degraded"] == 1
            assert sync.metrics()["tikv_br_sync_pd_silent_seconds"] >= 10
            eventually(lambda: sync.health() == "200 ok\n", PATIENCE)
            assert re.search(r"WARNING.*the source's PD has not answered for \d+ s", log.read_text())


def test_gaps_in_the_span_are_degraded(tmp_path: Path) -> None:
    """While a store is down, /healthz is still 200 and says degraded: its regions have no changes."""
    with live_cluster(tmp_path / "pg", ApiVersion.V2, stores=2, replicas=1, regions=4) as source:
        asked = [
            "--pd",
            source.pd,
            "--start-ts",
            "now",
            "--sink",
            "blackhole://",
            "--state-dir",
            str(tmp_path / "state"),
        ]
        with serving(*asked) as sync:
            eventually(lambda: sync.health() == "200 ok\n", PATIENCE)
            down = source.regions()[0]["leader_store"]
            source.kill_store(down)
            eventually(lambda: re.match(r"200 degraded\nsync: .* of the range", sync.health()), PATIENCE)
            source.restart_store(down)
            eventually(lambda: sync.health() == "200 ok\n", PATIENCE)


def test_a_sink_that_is_down_at_the_start_is_waited_for(clusters: Clusters, tmp_path: Path) -> None:
    """Until the target's PD answers, the status names the sink as the cause; then the sync starts."""
    source = clusters(ApiVersion.V2)
    rows = {b"down-%03d" % at: b"value" for at in range(KEYS)}
    since = source.cluster.pd.tso()
    source.raw().batch_put(rows)
    asked = ["--pd", source.pd, "--start", "down-", "--end", "down.", "--from-backup-ts", str(since)]
    asked += [
        "--state-dir",
        str(tmp_path / "state"),
        "--hold-back",
        "0s",
        "--sink-backoff",
        "1s",
        "--status-every",
        "1s",
    ]
    with reserved_ports(1) as [port], serving(*asked, "--sink", f"tikv://127.0.0.1:{port}") as sync:
        waits_for_sink = rf"the sink has not answered for \d+ s: .*127\.0\.0\.1:{port}"
        eventually(lambda: re.search(waits_for_sink.replace(r"\d+", r"([3-9]|\d\d)"), sync.problem()), PATIENCE)
        with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1, pd_port=port) as target:
            sync.wait_for_rows()
            assert contents(target) == rows
            lines = sync.stop()
    assert any(re.search(waits_for_sink, line.get("waiting", "")) for line in lines)


def test_a_sink_that_stays_down_ends_a_sync_and_is_named(clusters: Clusters, tmp_path: Path) -> None:
    """After --sink-patience the error names the sink and has code 3; SIGTERM ends the wait."""
    with reserved_ports(1) as [port]:
        sink = f"tikv://127.0.0.1:{port}"
        asked = ["--pd", clusters(ApiVersion.V2).pd, "--sink", sink, "--start-ts", "now", "--state-dir", str(tmp_path)]
        done = tikv_br("sync", *asked, "--sink-patience", "1s", "--output", "json")
        assert (done.code, f"--sink {sink}" in done.last["message"]) == (3, True), done.last
        assert "--sink-patience" in done.last["message"]
        assert not list(tmp_path.rglob("*.json"))
        with serving(*asked) as sync:
            eventually(lambda: "the sink has not answered" in sync.problem(), PATIENCE)
            assert sync.stop()[-1]["message_type"] == "exit_error"


def test_passes_are_seen_from_outside_too(clusters: Clusters) -> None:
    """With ``--mode diff`` the same paths have the results of passes, and the age of the last one."""
    source, target = clusters(ApiVersion.V1), clusters(ApiVersion.V2)
    for live in (source, target):
        live.raw().delete_range(EVERY_KEY)
    source.raw().batch_put(ROWS)
    clusters_given = ["--pd", source.pd, "--sink", f"tikv://{target.pd}"]
    with serving(*clusters_given, "--mode", "diff", "--interval", "1s") as sync:
        sync.wait_for_rows()
        eventually(
            lambda: sync.get("healthz") == "ok\n", PATIENCE
        )  # a region that has just been split is scanned again
        assert sync.metrics()["tikv_br_sync_feed_regions"] >= 6
        assert 0 < sync.metrics()["tikv_br_sync_checkpoint_lag_seconds"] < PATIENCE
        lines = sync.stop()
    assert sum(line["puts"] for line in lines if line["message_type"] == "pass") == KEYS


def test_a_terminal_shows_figures_live(clusters: Clusters, tmp_path: Path) -> None:
    """On a terminal the figures of the sync are drawn while it runs, and the last line says where it has stopped."""
    span = ["--start", "nobody's-", "--end", "nobody's."]
    command = ["sync", "--pd", clusters(ApiVersion.V2).pd, *span, "--sink", "blackhole://", "--start-ts", "now"]
    here, there = pty.openpty()
    with os.fdopen(here, "rb", buffering=0) as terminal:
        with os.fdopen(there, "wb") as stderr:
            process = subprocess.Popen(
                [str(PROGRAM), *command, "--state-dir", str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**environment(), "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "100"},
                cwd="/",
            )
        with process:
            try:
                read_until(terminal, r"sync +\d.*s +- +0 +0 +\d+/\d+ +[12] +0 B")
                process.send_signal(signal.SIGTERM)
                read_until(terminal, r"Error: terminated \(SIGTERM\)")
                out, _ = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
    assert process.returncode == 143
    assert out.startswith("Stopped: checkpoint ")


def read_until(terminal: BinaryIO, pattern: str) -> None:
    """Read what a terminal shows, without its colours, until it has a text."""
    raw, shown = b"", ""
    until = time.monotonic() + PATIENCE
    while not re.search(pattern, shown):
        assert time.monotonic() < until, shown
        if select.select([terminal], [], [], 1.0)[0]:
            raw += terminal.read(1 << 16)
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode(errors="replace"))
