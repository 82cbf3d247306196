"""Files that the previous version wrote (tests/data/previous): backups restore, unfinished work is resumed, the rest is read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.tools import PREVIOUS, ROOT, unpack_golden
from tests.support.waiting import eventually
from tikv_br.cluster.etcd import Etcd
from tikv_br.errors import TargetNotEmpty
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

SOURCE_ID, TARGET_ID = 7000000000000000001, 7000000000000000002
ROWS = {b"key%04d" % number: (b"value %d " % number) * 4 for number in range(120)}
ENGINES = {
    "scan": ["--engine", "scan"],
    "store": ["--engine", "store"],
    "parquet": ["--engine", "scan", "--file-format", "parquet"],
}
DRIVER = ["--executor", "driver"]


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """A copy of the files."""
    unpacked = unpack_golden(PREVIOUS, ROOT / ".cache" / "previous")
    return shutil.copytree(unpacked, tmp_path / "previous", copy_function=copy_file)


def copy_file(source: str, copy: str) -> None:
    """A copy that may be changed; leases are old by the storage's clock, too, else their runs could be alive."""
    shutil.copyfile(source, copy)
    if "/lease/" in copy:
        os.utime(copy, (0, 0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """The cluster that was backed up and followed."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1, cluster_id=SOURCE_ID) as live:
        codec = live.raw().codec
        live.raw().batch_put(ROWS)
        live.split(*(codec.bound(codec.rpc_key(key)) for key in sorted(ROWS)[3::3]))
        yield live


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """The cluster that a restore was killed in."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1, cluster_id=TARGET_ID) as live:
        yield live


@pytest.fixture(autouse=True)
def emptied(target: LiveCluster) -> None:
    """No rows in the target."""
    target.raw().delete_range(EVERY_KEY)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until the end of the block, then ends by SIGTERM."""
    command = [str(PROGRAM), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd="/") as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143


@pytest.mark.parametrize("name", ENGINES)
def test_a_backup_is_verified_and_restored(previous: Path, target: LiveCluster, name: str) -> None:
    """Byte by byte and row by row."""
    url = f"local://{previous}/backups/{name}"
    succeed("verify", url, "--level", "data", *DRIVER)
    succeed("restore", "raw", "--pd", target.pd, "-s", url, *DRIVER)
    assert contents(target) == ROWS


@pytest.mark.parametrize("name", ENGINES)
def test_an_unfinished_backup_is_resumed(previous: Path, source: LiveCluster, target: LiveCluster, name: str) -> None:
    """Its finished tasks are not repeated."""
    url = f"local://{previous}/unfinished/{name}"
    place = ["--pd", source.pd, "-s", url, "--safe-interval", "0", "--output", "json"]
    done = succeed("backup", "raw", *place, *DRIVER, *ENGINES[name])
    summary = next(line for line in done.lines if line["message_type"] == "summary")
    assert (summary["resumed_ranges"], summary["total_kvs"]) == (2, len(ROWS))
    succeed("verify", url, "--level", "data", *DRIVER)
    succeed("restore", "raw", "--pd", target.pd, "-s", url, *DRIVER)
    assert contents(target) == ROWS


def test_an_unfinished_restore_is_done_again(previous: Path, target: LiveCluster) -> None:
    """It left no mark in the cluster, so its rows are only overwritten on request; nothing of it stays behind."""
    target.raw().batch_put({key: ROWS[key] for key in sorted(ROWS)[:6]})
    state = previous / "restore-state"
    places = ["--pd", target.pd, "-s", f"local://{previous}/backups/store", "--state", f"local://{state}"]
    refused = tikv_br("restore", "raw", *places, *DRIVER)
    assert refused.code == TargetNotEmpty.exit_code
    done = succeed("restore", "raw", *places, *DRIVER, "--allow-overwrite", "--output", "json")
    summary = next(line for line in done.lines if line["message_type"] == "summary")
    assert (summary["files"], summary["resumed_files"]) == (40, 0)
    assert contents(target) == ROWS
    assert [path for path in state.rglob("*.json") if "lease" not in str(path)] == []


def test_a_sync_starts_at_its_checkpoint(previous: Path, source: LiveCluster) -> None:
    """And takes the state over: the next epoch is its own."""
    folder = previous / "sync-state" / "default"
    old = checkpoint_ts((folder / "checkpoint-0000000001.json").read_bytes())
    ours = folder / "checkpoint-0000000002.json"
    place = ["--pd", source.pd, "--sink", "blackhole://", "--hold-back", "0s", "--output", "json"]
    source.raw().batch_put(ROWS)  # the same, as other tests back this cluster up
    with running("sync", *place, "--state-dir", str(previous / "sync-state")):
        eventually(lambda: ours.exists() and checkpoint_ts(ours.read_bytes()) > old, 180)


def test_syncs_and_changefeeds_in_etcd_are_resumed(previous: Path, source: LiveCluster, tmp_path: Path) -> None:
    """Progress and status are those that a capture left, until a capture of this version takes the task over."""
    stored: dict[str, str] = json.loads((previous / "etcd.json").read_text())
    root = f"/tikv-br/{SOURCE_ID}"
    with real_etcd(tmp_path / "etcd") as server, Etcd.connect([server.address]) as etcd:
        for key, value in stored.items():
            etcd.put(key, value.encode())
        place = ["--pd", source.pd, "--etcd", server.address]
        query = succeed("changefeed", "query", "feed", *place, "--output", "json").lines[0]
        assert query["checkpoint_ts"] == checkpoint_ts(stored[f"{root}/status/feed"].encode())
        sync = ["sync", *place, "--sink", "blackhole://", "--hold-back", "0s", "--state-dir", "etcd://"]
        with running("capture", "start", *place), running(*sync):
            for key in (*(f"{root}/progress/feed/000{task}" for task in (0, 1)), f"{root}/sync/default/checkpoint"):
                eventually(advanced(etcd, key, checkpoint_ts(stored[key].encode())), 180)


def advanced(etcd: Etcd, key: str, old: int) -> Callable[[], bool]:
    """Whether a checkpoint in etcd is beyond the old one."""

    def look() -> bool:
        found = etcd.get(key)
        return found is not None and checkpoint_ts(found.value) > old

    return look


def checkpoint_ts(record: bytes) -> int:
    """Timestamp of a checkpoint."""
    return int(json.loads(record)["content"]["checkpoint_ts"])


def test_index_pins_and_drill_reports_are_read(previous: Path) -> None:
    """A pinned backup is kept by prune; an old drill is listed and shown."""
    root = ["-s", f"local://{previous}/backups"]
    listed = {line["path"]: line for line in succeed("list", *root, "--output", "json").lines}
    assert {path: line["pinned"] for path, line in listed.items()} == {"scan": True, "store": False, "parquet": False}
    succeed("prune", *root, "--keep-last", "1", "--confirm")
    assert "scan" in {line["path"] for line in succeed("list", *root, "--output", "json").lines}
    reports = ["--reports", f"local://{previous}/drills"]
    [drill] = succeed("drill", "list", *reports, "--output", "json").lines
    assert drill["scenario"] == "deleted-range"
    shown = succeed("drill", "show", drill["id"], *reports, "--output", "json").last
    assert shown["report"]["verdict"] == "passed"
