"""The real command, killed at random moments and run again until it is done; and two of them at one path."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import environment
from tests.integration.backup.reading import Rows, rocksdb_rows
from tests.integration.backup.resume.unfinished import REGIONS, ROWS, fill
from tests.support.ledgers import read_entries
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.errors import BackupPathInUse, LeaseHeld
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

KILLS = 10
"""For each engine."""
RPCS = {"store": "backup.region", "scan": "RawScan"}
TS_SIZE = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster with several tasks' worth of regions."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=2) as running:
        fill(running)
        yield running


@pytest.fixture
def live(cluster: LiveCluster) -> LiveCluster:
    """Return the cluster; each region takes its time, whatever another test has left."""
    slow_down(cluster)
    return cluster


def slow_down(live: LiveCluster) -> None:
    """Let each region take a little time, and nothing else be wrong."""
    live.heal()
    for rpc in RPCS.values():
        live.fail(rpc, {"delay": {"seconds": 0.01}}, count=-1)


def start(live: LiveCluster, engine: str, place: Path, *more: str) -> subprocess.Popen[str]:
    """Start a backup in a process of its own."""
    flags = ["--engine", engine, "--executor", "driver", "--concurrency", "2", "--safe-interval", "0", "--gcttl", "1m"]
    command = [
        sys.executable,
        "-m",
        "tikv_br.cli.main",
        "backup",
        "raw",
        "--pd",
        live.pd,
        "-s",
        str(place),
        *flags,
        *more,
    ]
    return subprocess.Popen(
        [*command, "--output", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env=environment(),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, object]]:
    """Wait for the end; exit code and last line."""
    out, err = process.communicate(timeout=120)
    assert out, err
    return process.returncode, json.loads(out.splitlines()[-1])


def ledger_at(place: Path) -> dict[str, LedgerEntry]:
    """Return what is recorded as done, by interval."""
    return {str(entry.interval): entry for entry in read_entries(open_store(StorageLocation("local", str(place))))}


def content(place: Path, engine: str, scratch: Path) -> Rows:
    """Return the rows as RocksDB reads them; the scan engine's without ts, which is each run's own backup-ts."""
    rows = rocksdb_rows(place, scratch)
    return rows if engine == "store" else {key[:-TS_SIZE]: value for key, value in rows.items()}


@pytest.mark.parametrize("engine", ["store", "scan"])
def test_killed_at_random_moments(engine: str, live: LiveCluster, tmp_path: Path) -> None:
    """SIGKILL ten times over: no interval that was done is done again, the result is that of a quiet run, nothing else stays."""
    for name in ("warm", "quiet"):  # the first run is slower than those that follow
        began = time.monotonic()
        assert finish(start(live, engine, tmp_path / name))[0] == 0
        longest = time.monotonic() - began
    expected = content(tmp_path / "quiet", engine, tmp_path)
    assert len(expected) == ROWS
    seed = random.randrange(1 << 32)
    print(f"seed {seed}, a run takes {longest:.1f} s")  # noqa: T201 - shown when the test fails
    chance, kills, number = random.Random(seed), 0, 0
    while kills < KILLS:
        place, done = tmp_path / f"killed-{number}", dict[str, LedgerEntry]()
        number += 1
        while not (place / "backupmeta").exists() and kills < KILLS:
            with start(live, engine, place) as process:
                time.sleep(chance.uniform(0.3, longest))
                process.kill()
            kills += 1
            if not (place / "backupmeta").exists():
                now = ledger_at(place)
                assert all(now[interval] == entry for interval, entry in done.items())
                done = now
        check_finished(live, engine, place, done)
        assert content(place, engine, tmp_path) == expected


def check_finished(live: LiveCluster, engine: str, place: Path, done: dict[str, LedgerEntry]) -> None:
    """Run once more, to the end, and hold the backup against what had been done."""
    code, last = finish(start(live, engine, place))
    if code:  # the last kill came when all was over
        assert (code, last["message"]) == (BackupPathInUse.exit_code, f"local://{place} already holds a backup")
    else:
        sums = live.raw().checksum()
        assert (last["crc64xor"], last["total_kvs"]) == (sums.crc64xor, sums.total_kvs)
    kept = BackupSet.open(open_store(StorageLocation("local", str(place))))
    names = {file.name for file in kept.files}
    assert names >= {file.name for entry in done.values() for file in entry.files}
    there = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert there == {"backupmeta", "backup.lock", "tikv-br/manifest.json"} | names
    assert not [path for path in place.rglob("*") if path.is_dir() and not any(path.iterdir())]


def test_two_runs_at_one_path(live: LiveCluster, tmp_path: Path) -> None:
    """One wins, and the other leaves with its exit code and says whose the path is."""
    both = [start(live, "scan", tmp_path / "shared") for _ in range(2)]
    ends = [finish(process) for process in both]
    assert sorted(code for code, _last in ends) in ([0, LeaseHeld.exit_code], [0, BackupPathInUse.exit_code])
    winner = next(process for process, (code, _last) in zip(both, ends, strict=True) if code == 0)
    loser = next(last for code, last in ends if code)
    assert str(winner.pid) in str(loser["message"]) or loser["name"] == "BackupPathInUse"


def test_waiting_run_goes_on_where_the_other_was_killed(live: LiveCluster, tmp_path: Path) -> None:
    """With --lock-wait the second run waits; when the first is killed, it goes on from what that has done."""
    place = tmp_path / "shared"
    live.heal()
    live.fail("backup.region", {"delay": {"seconds": 1}}, skip=REGIONS // 3, count=-1)
    with start(live, "store", place) as first:
        until_done(place)
        with start(live, "store", place, "--lock-wait", "2m") as second:
            assert second.stdout is not None
            reported = next(line for line in second.stdout if "waiting for the lock of the path" in line)
            assert str(first.pid) in reported
            first.kill()
            slow_down(live)
            last = json.loads(list(second.stdout)[-1])
    assert second.returncode == 0
    assert last["resumed_ranges"] > 0
    assert last["total_kvs"] == ROWS


def until_done(place: Path) -> None:
    """Wait for the first interval."""
    end = time.monotonic() + 120
    while not (place / "tikv-br" / "ledger").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
