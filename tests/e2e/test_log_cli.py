"""``tikv-br log`` as an operator uses it: start, status, pause, resume, truncate, end, and damage."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.e2e.command import PROGRAM, environment, succeed
from tests.support.documented import checked
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tests.unit.archive.samples import LOG, START, STEP, store_at, write_log
from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import Segment
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.cluster.pd_http import gc_status
from tikv_br.errors import SyncRunning
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

PATIENCE = 60.0


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1, regions=2) as live:
        yield live


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``tikv-br log`` with JSON output."""
    command = ["log", *arguments, "--output", "json"]
    done = subprocess.run(
        [PROGRAM, *command], capture_output=True, text=True, timeout=120, check=False, env=environment(), cwd="/"
    )
    return checked(command, done)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the test."""
    with subprocess.Popen(command, env=environment(), cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


def lines(done: subprocess.CompletedProcess[str], kind: str) -> list[dict[str, Any]]:
    """The messages of a type."""
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [line for line in found if line["message_type"] == kind]


def check_compaction(place: list[str], until: int) -> None:
    """Compact a log up to its end: one segment, and no other figure of its status is different."""
    figures = ("start_ts", "end_ts", "restorable_ts", "scan_window_count", "scan_window_seconds", "gaps", "damage")
    (before,) = lines(run("status", *place), "log_status")
    (plan,) = lines(run("compact", *place, "--until", str(until), "--dry-run"), "log_compaction")
    assert lines(run("status", *place), "log_status")[0]["segments"] == before["segments"]
    done = run("compact", *place, "--until", str(until))
    assert done.returncode == 0, done.stdout
    (found,) = lines(done, "log_compaction")
    assert found["segments"] == plan["segments"] > 1
    assert (found["new_segments"], found["removed_segments"], found["executor"]) == (1, 0, "driver")
    (after,) = lines(run("status", *place), "log_status")
    assert [after[name] for name in figures] == [before[name] for name in figures]
    assert (after["segments"], before["segments"]) == (1, found["segments"])
    assert after["rows"] == before["rows"] - found["duplicate_rows"]
    (again,) = lines(run("compact", *place, "--grace", "0s"), "log_compaction")
    assert (again["segments"], again["removed_segments"]) == (0, found["segments"])
    assert run("compact", *place, "--until", "1").returncode == 2


def test_the_life_of_a_log(v2: LiveCluster, tmp_path: Path) -> None:
    """Each command does what its help promises, with the right exit code."""
    place = ["--storage", f"local://{tmp_path}", "--id", "one"]
    start = [str(PROGRAM), "log", "start", "--pd", v2.pd, *place, "--flush-interval", "200ms", "--hold-back", "0s"]
    assert run("status", *place).returncode == 31
    store = open_store(parse(f"local://{tmp_path}"))

    def reached(ts: int) -> bool:
        return (tmp_path / "one" / "log.json").exists() and LogArchive.open(store, "one").checkpoint_ts > ts

    short = subprocess.run(
        [*start[:-1], "2s", "--start-ts", "now"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment(),
        cwd="/",
    )
    assert short.returncode == 2
    assert "a hold-back of 2 s is too short: stores use timestamps up to 3 s old" in short.stderr
    with running([*start, "--start-ts", "now"]) as process:
        eventually((tmp_path / "one" / "log.json").exists, PATIENCE)
        v2.raw().batch_put({b"key%d" % at: b"value" for at in range(100)})
        written = v2.cluster.pd.tso()
        eventually(lambda: reached(written), PATIENCE)
        status = run("status", *place)
        assert status.returncode == 0, status.stdout
        (found,) = lines(status, "log_status")
        assert (found["rows"], found["gaps"], found["damage"], found["state"]) == (100, [], [], "active")
        assert found["end_ts"] >= found["checkpoint_ts"] > written
        assert 0 < found["rpo_seconds"] < 60
        assert run("pause", *place).returncode == 0
        assert process.wait(PATIENCE) == 0
    refused = subprocess.run(start, capture_output=True, text=True, timeout=60, check=False, env=environment(), cwd="/")
    assert refused.returncode == 2
    assert "is paused" in refused.stderr
    assert run("resume", *place).returncode == 0
    with running(start) as process:
        v2.raw().put(b"key1", b"later")
        later = v2.cluster.pd.tso()
        eventually(lambda: reached(later), PATIENCE)
        refused = run("end", *place, "--pd", v2.pd, "--yes")
        assert (refused.returncode, "SIGTERM" in refused.stdout) == (SyncRunning.exit_code, True)
        process.terminate()
        assert process.wait(PATIENCE) == 143
    first, last = lines(run("changes", "key1", *place), "log_change")
    assert [(each["op"], bytes.fromhex(each["value"])) for each in (first, last)] == [
        ("put", b"value"),
        ("put", b"later"),
    ]
    (same,) = lines(run("changes", "hex:6b657931", *place, "--since", str(written)), "log_change")
    assert same["ts"] == last["ts"]
    assert run("changes", "key1", *place, "--since", str(later)).returncode == 13
    segments = lines(run("metadata", *place), "log_segment")
    assert sum(segment["rows"] for segment in segments) >= 101
    assert any(segment["scan_windows"] for segment in segments)
    only_shown = run("truncate", *place, "--until", str(written))
    assert only_shown.returncode == 2
    assert len(lines(run("metadata", *place), "log_segment")) == len(segments)
    assert run("truncate", *place, "--until", str(written), "--yes").returncode == 0
    assert len(lines(run("metadata", *place), "log_segment")) < len(segments)
    (found,) = lines(run("status", *place), "log_status")
    assert (found["start_ts"], found["gaps"]) == (written, [])
    check_compaction(place, found["end_ts"])
    assert run("end", *place, "--pd", v2.pd).returncode == 2  # it asks, and there is no terminal
    assert json.loads(run("status", *place).stdout)["state"] == "active"
    succeed("log", "stop", *place, "--pd", v2.pd, "--yes")  # its former name
    assert "tikv-br-sync-one" not in [each.service for each in gc_status(v2.cluster.pd_http).services]
    assert run("resume", *place).returncode == 2
    victim = next((tmp_path / "one" / "segments").glob("*.json"))
    victim.write_bytes(victim.read_bytes()[:-20])
    damaged = run("status", *place)
    assert damaged.returncode == 39
    assert victim.name in damaged.stdout


@pytest.mark.parametrize(("level", "code"), [(None, 0), ("files", 39), ("data", 39)])
def test_status_finds_a_flipped_byte_if_it_reads_the_files(level: str | None, code: int, tmp_path: Path) -> None:
    """By default only sizes and records are checked, and the output mentions it; the hint is about the log."""
    write_log(store_at(tmp_path))
    victim = sorted((tmp_path / LOG / "data").rglob("*.parquet"))[3]
    data = bytearray(victim.read_bytes())
    data[len(data) // 4] ^= 1
    victim.write_bytes(data)
    done = run("status", "--storage", f"local://{tmp_path}", "--id", LOG, *(["--level", level] if level else []))
    assert done.returncode == code, done.stdout
    (found,) = lines(done, "log_status")
    assert found["level"] == (level or "meta")
    if code:
        (error,) = lines(done, "exit_error")
        assert victim.name in error["message"]
        assert "backup" not in error["message"]
        assert error["hint"].startswith("Restore to a time before the gap")
        assert found["restorable_ts"] == START + 3 * STEP


def test_status_at_level_data_counts_the_rows(tmp_path: Path) -> None:
    """A file that agrees with its hash, but has another number of rows than its segment recorded, is damage."""
    store = store_at(tmp_path)
    write_log(store, segments=2)
    first = min((tmp_path / LOG / "segments").iterdir())
    name = first.relative_to(tmp_path).as_posix()
    found = read_record(store, Segment, name)
    wrong = structs.replace(found.files[0], total_kvs=found.files[0].total_kvs + 1)
    write_record(store, name, structs.replace(found, files=(wrong,)))
    place = ["--storage", f"local://{tmp_path}", "--id", LOG]
    assert run("status", *place, "--level", "files").returncode == 0
    done = run("status", *place, "--level", "data")
    assert (done.returncode, "than recorded: (50, " in done.stdout) == (39, True)
