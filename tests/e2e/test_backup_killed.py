"""Backups that are stopped, and backups whose workers die."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.backup_command import ROWS, TIKV_BR, files_at, noisy_cluster
from tests.support.live_cluster import LiveCluster
from tikv_br.errors import Terminated

SLOW_SECONDS = 3
LONG_SECONDS = 12
"""In which a worker must be found and killed, on a busy machine as well."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """See `noisy_cluster`."""
    with noisy_cluster(tmp_path_factory.mktemp("v1")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("engine", "executor"),
    [
        ("scan", "driver"),
        ("store", "driver"),
        pytest.param("scan", "spark", marks=pytest.mark.slow),
        pytest.param("store", "spark", marks=pytest.mark.slow),
    ],
)
def test_a_terminated_backup_leaves_nothing(engine: str, executor: str, live: LiveCluster, tmp_path: Path) -> None:
    """SIGTERM while tasks scan, or stores write: exit code 143, and no file of ours stays."""
    rpc = "RawScan" if engine == "scan" else "backup.region"
    slow = live.fail(rpc, {"delay": {"seconds": SLOW_SECONDS}}, count=-1)
    place = tmp_path / "backup"
    command = [*TIKV_BR, "backup", "raw", "-u", live.pd, "-s", str(place), "--engine", engine]
    command += ["--executor", executor, "--output", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        before = 0
        while live.hits(slow) <= before:  # of a task: the look for rows before the lock scans, too
            assert process.poll() is None
            assert time.monotonic() < deadline
            if "backup.lock" not in files_at(place):
                before = live.hits(slow)
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
        live.heal()
    assert process.returncode == Terminated.exit_code
    assert json.loads(output.splitlines()[-1])["name"] == "Terminated"
    time.sleep(SLOW_SECONDS + 0.5)  # no task goes on without its driver
    late = files_at(place)
    if engine == "store":  # a store cannot be stopped within a region: each may finish one, and nothing names it
        assert len(late) <= len(live.store_ids)
        late = [name for name in late if not name.startswith("sst/")]
    assert late == []


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(live: LiveCluster, tmp_path: Path) -> None:
    """A Spark worker is killed with files already written: its task runs again, and only one attempt's files stay."""
    slow = live.fail("RawScan", {"delay": {"seconds": LONG_SECONDS}}, skip=3, count=2)
    place = tmp_path / "backup"
    command = [*TIKV_BR, "backup", "raw", "-u", live.pd, "-s", str(place), "--file-size", "10KiB", "--output", "json"]
    process = subprocess.Popen(
        [*command, "--executor", "spark", "--concurrency", "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120  # a JVM takes its time on a busy machine
        while not list(place.glob("sst/*.sst")) or not live.hits(slow):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = set(place.glob("sst/*.sst"))
        live.relent(slow)  # delayed calls stay so; the next attempt is not
        for worker in spark_workers(process.pid):
            worker.kill()
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
        live.heal()
    summary = json.loads(output.splitlines()[-1])
    assert summary["message_type"] == "summary", output
    assert summary["total_kvs"] == ROWS
    assert not before & set(place.glob("sst/*.sst"))
    assert len(list(place.glob("sst/*.sst"))) == summary["files"]


def spark_workers(pid: int) -> list[psutil.Process]:
    """Return the Python workers of a driver: the leaves below its daemon."""
    below = psutil.Process(pid).children(recursive=True)
    return [child for child in below if is_spark_worker(child)]


def is_spark_worker(process: psutil.Process) -> bool:
    """Whether it is a leaf below the daemon, and alive."""
    try:
        return "pyspark.daemon" in process.cmdline() and not process.children()
    except psutil.NoSuchProcess:  # it has ended, or waits to be reaped
        return False
