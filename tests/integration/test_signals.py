"""SIGTERM at the worst moment ends every command that runs long, with its code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.logs import write_log
from tests.support.ports import reserved_ports
from tests.support.worst_moment import run_struck
from tikv_br.backupset.index import Index
from tikv_br.cli.main import run
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import Terminated
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import cluster, launcher
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

FOLLOWERS = {
    "sync-diff": ["sync", "--mode", "diff", "--sink", "tikv://{target}"],
    "gc": ["gc", "run"],
    "capture": ["changefeed", "capture"],
    "serve": ["serve", "-s", "{folder}", "--listen", "127.0.0.1:0"],
}
COLUMNS = ["--input", "{folder}/rows.csv", "--key-column", "k", "--value-column", "v", "--allow-overwrite"]
OPERATIONS = {
    "sync": ["sync", "--sink", "blackhole://", "--state-dir", "{folder}/state", "--start-ts", "now"],
    "log": ["log", "start", "-s", "{folder}/log", "--start-ts", "now"],
    "backup": ["backup", "raw", "-s", "{folder}/new"],
    "restore": ["restore", "raw", "-s", "{folder}/backup", "--allow-overwrite"],
    "verify": ["verify", "-s", "{folder}/backup", "--level", "restore"],
    "export": ["export", "raw", "-s", "{folder}/out", "--format", "csv"],
    "diff": ["diff", "--other-pd", "{target}"],
    "load": ["load", "raw", *COLUMNS, "--staging", "{folder}/staging"],
    "load-put": ["load", "raw", *COLUMNS, "--mode", "put", "--bad-rows", "{folder}/bad"],
    "import": ["raw", "import", "--count", "10"],
    "base": ["backup", "raw", "--base", "{folder}/backup", "-s", "{folder}/next", "--safe-interval", "0"],
    "backup-txn": ["backup", "txn", "-s", "{folder}/txn"],
    "merge": ["backup", "merge", "--base", "{folder}/backup", "--log", "{folder}/log", "-s", "{folder}/merged"],
    "compact": ["log", "compact", "-s", "{folder}/log"],
    "prune": ["prune", "-s", "{folder}", "--keep-last", "1", "--yes"],
    "rebuild": ["list", "{folder}", "--rebuild"],
    "drill": [
        "drill",
        "run",
        "-s",
        "{folder}/backups",
        "--reports",
        "{folder}/home",
        "--target",
        "cluster",
        "--target-keyspace",
        "8",
    ],
}

WITHOUT_CLUSTER = {"serve", "merge", "compact", "prune", "list"}
ON_THREADS = {
    "backup",
    "restore",
    "export",
    "drill",
    "load",
    "load-put",
    "diff",
    "base",
    "backup-txn",
    "merge",
    "compact",
}
"""Commands that would wait for Spark."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Of a process that has imported what the commands need."""
    with Forks("tests.integration.crash.warm", "tests.integration.incremental.forked_sync", __name__) as forks:
        yield forks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[LiveCluster]]:
    """A cluster with rows, and one to write to."""
    with (
        live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as source,
        live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1) as target,
    ):
        source.raw().batch_put({b"key-%d" % number: b"value" for number in range(10)})
        yield source, target


def ends(forks: Forks, arguments: Sequence[str], folder: Path, pair: Sequence[LiveCluster], *, stop_only: bool) -> None:
    """Run a command that gets the signal, and see how it ends."""
    filled = [argument.format(folder=folder, target=pair[1].pd) for argument in arguments]
    pd = [] if WITHOUT_CLUSTER & {*arguments} else ["--pd", pair[0].pd]
    forks.start(partial(run_struck, partial(run, [*filled, *pd]), folder / "struck", stop_only=stop_only))
    assert forks.wait() == Terminated.exit_code
    assert (folder / "struck").exists()


@pytest.mark.parametrize("command", FOLLOWERS)
def test_a_follower_inside_the_wait_for_its_stop(
    command: str, forks: Forks, pair: Sequence[LiveCluster], tmp_path: Path
) -> None:
    """It holds the lock of the very event that the signal sets."""
    ends(forks, FOLLOWERS[command], tmp_path, pair, stop_only=True)


@pytest.mark.parametrize("command", OPERATIONS)
def test_an_operation_inside_a_wait(command: str, forks: Forks, pair: Sequence[LiveCluster], tmp_path: Path) -> None:
    """The signal raises there, and steps are undone. A sync waits for its feed; only at its start is it inside such a wait."""
    assert run(["backup", "raw", "--pd", pair[0].pd, "-s", str(tmp_path / "backup"), "--executor", "driver"]) == 0
    (tmp_path / "rows.csv").write_text("k,v\na,1\nb,2\n")
    ts = Index(open_store(parse(str(tmp_path)))).find("newest").entry.backup_ts
    write_log(parse(str(tmp_path / "log")), pair[0].cluster.cluster_id, ts, [ts + 1, minus_seconds(ts, -120)])
    executor = ["--executor", "driver"] if command in ON_THREADS else []
    ends(forks, [*OPERATIONS[command], *executor], tmp_path, pair, stop_only=False)


def test_a_capture_that_follows_a_changefeed(forks: Forks, pair: Sequence[LiveCluster], tmp_path: Path) -> None:
    """The threads of its tasks end with it."""
    create = ["changefeed", "create", "--id", "feed", "--pd", pair[0].pd, "--sink", "blackhole://", "--start-ts", "now"]
    assert run(create) == 0
    try:
        ends(forks, ["changefeed", "capture"], tmp_path, pair, stop_only=True)
    finally:
        assert run(["changefeed", "remove", "feed", "--pd", pair[0].pd]) == 0


def test_a_playground_inside_the_wait_for_its_end(forks: Forks, tmp_path: Path) -> None:
    """Its process ends as if nothing had held a lock."""
    launcher.prepare(tmp_path / "cluster", {"stores": 1})
    work = partial(cluster.main, [str(tmp_path / "cluster")])
    forks.start(partial(run_struck, work, tmp_path / "struck", stop_only=True))
    assert forks.wait() == 0
    assert (tmp_path / "struck").exists()


def test_a_replay_inside_the_wait_for_its_stop(forks: Forks, pair: Sequence[LiveCluster], tmp_path: Path) -> None:
    """Of a broker that does not answer."""
    with reserved_ports(1) as [port]:
        source = f"kafka://127.0.0.1:{port}/topic?protocol=open-protocol"
        command = ["kafka", "replay", "--from", source, "--sink", f"tikv://{pair[1].pd}", "--kafka-patience", "1h"]
        forks.start(partial(run_struck, partial(run, command), tmp_path / "struck", stop_only=False))
        assert forks.wait() == Terminated.exit_code
        assert (tmp_path / "struck").exists()
