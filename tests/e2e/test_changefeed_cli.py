"""Changefeeds, captures and syncs with their state in etcd, by the command line."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, Done, environment, tikv_br
from tests.support.documented import assert_documented
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.ports import reserved_ports
from tikv_br.cli.main import run
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.handover import service_id


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster with change feeds."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as live:
        yield live


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A second cluster."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1) as live:
        yield live


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an etcd."""
    with real_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.address


class Group:
    """The commands, with the flags that they share, run in this process: each start of another costs a second."""

    def __init__(self, source: LiveCluster, etcd: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._flags = ("--pd", source.pd, "--etcd", etcd)
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> Done:
        """Run one, in JSON form; it must end with that code."""
        done = self._run(*arguments, *self._flags, "--output", "json")
        assert done.code == code, done.out + done.err
        assert_documented(arguments, done.lines)
        return done

    def table(self, *arguments: str) -> str:
        """Table on the console."""
        done = self._run(*arguments, *self._flags)
        assert done.code == 0, done.err
        return done.out

    def _run(self, *arguments: str) -> Done:
        code = run(arguments)
        return Done(code, *self._capsys.readouterr())


@pytest.fixture
def group(source: LiveCluster, etcd: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Group]:
    """A group without captures."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Group(source, etcd, capsys)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.core("changefeed")
def test_the_life_of_a_changefeed(group: Group, source: LiveCluster) -> None:
    """Created, listed, queried, paused, changed, resumed and removed; each wrong step ends with its own code."""
    created = group(
        "changefeed", "create", "--id", "one", "--sink", "blackhole://", "--start-ts", "now", "--end", "m"
    ).last
    assert (created["state"], created["spans"], created["start"], created["end"]) == ("normal", 2, "", b"m".hex())
    assert created["checkpoint_ts"] == created["start_ts"]
    assert 0 < created["checkpoint_lag"] < 600
    assert source.safe_points()[service_id("one")] == created["start_ts"] - 1
    group("changefeed", "create", "--id", "one", "--sink", "blackhole://", "--start-ts", "now", code=74)
    short = ("--start-ts", "now", "--hold-back", "2s")
    refused = group("changefeed", "create", "--id", "short", "--sink", "blackhole://", *short, code=2).last
    assert "stores use timestamps up to 3 s old" in refused["message"]
    assert created["hold_back_ms"] == 3000
    since = ("--from-backup-ts", str(ts := source.cluster.pd.tso()))
    later = group("changefeed", "create", "--id", "two", "--sink", "blackhole://", *since).last
    assert later["start_ts"] == minus_seconds(ts, 5)  # stores hand out older timestamps
    group("changefeed", "remove", "two")
    assert [line["id"] for line in group("changefeed", "list").lines] == ["one"]
    group("changefeed", "update", "one", "--sink-concurrency", "8", code=75)
    assert group("changefeed", "pause", "one").last["state"] == "paused"
    assert (
        group("changefeed", "update", "one", "--sink-concurrency", "8", "--hold-back", "4s").last["hold_back_ms"]
        == 4000
    )
    assert "too short" in group("changefeed", "update", "one", "--hold-back", "1s", code=2).last["message"]
    assert group("changefeed", "update", "one", "--sink-ratelimit", "0.5").last["rate_limit"] == 1 << 19
    resumed = group("changefeed", "resume", "one").last
    assert (resumed["state"], resumed["concurrency"]) == ("normal", 8)
    assert "one  normal" in group.table("changefeed", "list")
    reported = group.table("changefeed", "query", "--id", "one").splitlines()
    assert {"sink              blackhole://", "end               m", "sink-concurrency  8"} <= set(reported)
    assert {"hold-back         4.00s", "sink-ratelimit    512.0 KiB/s"} <= set(reported)
    assert "no setting to change was given" in group("changefeed", "update", "one", code=2).last["message"]
    assert "sub-spans" in group.table("changefeed", "captures")
    assert group("changefeed", "processors").lines == []
    assert group("changefeed", "remove", "one").last["message_type"] == "removed"
    assert service_id("one") not in source.safe_points()
    group("changefeed", "query", "--id", "one", code=73)
    assert group("changefeed", "list").lines == []


def test_the_default_name(group: Group, source: LiveCluster) -> None:
    """It is no log's, whose safe point it would share; beside a changefeed that had the default name of earlier versions another one is refused."""
    create = ("changefeed", "create", "--sink", "blackhole://", "--start-ts", "now")
    group(*create, "--id", "default")
    refused = group(*create, code=74).last
    assert refused["message"] == "a changefeed default already exists"
    assert [line["id"] for line in group("changefeed", "list").lines] == ["default"]
    group("changefeed", "remove", "default")
    assert group(*create).last["id"] == "changefeed"
    assert service_id("changefeed") in source.safe_points()
    group("changefeed", "remove", "changefeed")


def test_another_address_but_no_other_sink(group: Group, source: LiveCluster, target: LiveCluster) -> None:
    """The sink of a changefeed may move to another address; what is another keyspace or cluster there is refused."""
    there = f"tikv://{target.pd}"
    for live in (source, target):
        live.create_keyspace("ks7")
    group("changefeed", "create", "--id", "moving", "--sink", there, "--start-ts", "now")
    group("changefeed", "pause", "moving")
    assert (
        group("changefeed", "update", "moving", "--sink", f"{there},127.0.0.1:1").last["sink"] == f"{there},127.0.0.1:1"
    )
    group("changefeed", "update", "moving", "--sink", f"{there}?keyspace=ks7", code=71)
    group("changefeed", "update", "moving", "--sink", f"tikv://{source.pd}?keyspace=ks7", code=71)
    assert group("changefeed", "query", "moving").lines[0]["sink"] == f"{there},127.0.0.1:1"
    group("changefeed", "remove", "moving")


def test_invalid_changefeeds_are_refused(group: Group, source: LiveCluster, etcd: str) -> None:
    """A wrong etcd, a start before GC's safe point or in the future, an unknown keyspace, the source or nothing as sink."""
    create = ("changefeed", "create", "--id", "never", "--start-ts", "now", "--sink")
    no_etcd = tikv_br(*create, "blackhole://", "--pd", source.pd, "--etcd", source.cluster.pd.stores()[0].address)
    assert no_etcd.code == 81, no_etcd.err
    assert "--etcd" in no_etcd.err
    group(*create, f"tikv://{source.pd}", code=2)
    group(*create, "blackhole://", "--keyspace", "16777216", code=2)
    group("changefeed", "create", "--sink", "blackhole://", "--from-backup-ts", str(1 << 63), code=2)
    with reserved_ports(1) as [port]:
        silent = group(*create, f"tikv://127.0.0.1:{port}", "--sink-patience", "1s", code=3).last["message"]
    assert f"--sink tikv://127.0.0.1:{port} does not answer" in silent
    assert "--sink-patience" in silent
    assert group("changefeed", "list").lines == []
    assert source.safe_points() == {}


@pytest.mark.core("sync")
@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True])
def test_a_dead_broker_is_told_soon(group: Group, *, listens: bool) -> None:
    """Whoever creates a changefeed waits for at most 15 s, whether connections are refused or accepted and never answered."""
    with socket.socket() as broker:
        broker.bind(("127.0.0.1", 0))
        if listens:
            broker.listen()
        sink = f"kafka://127.0.0.1:{broker.getsockname()[1]}/topic?protocol=open-protocol"
        refused = group("changefeed", "create", "--id", "dead", "--sink", sink, "--start-ts", "now", code=83)
    assert 0 < int(re.findall(r"\(for (\d+) s, ", refused.last["message"])[0]) <= 15
    assert "dead" not in group.table("changefeed", "list")


def test_a_sync_with_its_state_in_etcd(group: Group, source: LiveCluster, etcd: str, tmp_path: Path) -> None:
    """Stopped and started again it goes on from the checkpoint in etcd; a changefeed cannot have its name."""
    sink = tmp_path / "changes"
    flags = ["--pd", source.pd, "--etcd", etcd, "--state-dir", "etcd://", "--id", "plain", "--sink", f"file://{sink}"]
    refused = tikv_br("sync", *flags)
    assert refused.code == 2
    assert f"etcd://{etcd}" in refused.err
    assert "--etcd" in tikv_br("sync", "--sink", "blackhole://", "--state-dir", "etcd://host:1").err
    for number, start in enumerate((["--start-ts", "now"], [])):
        run_until_written([*flags, *start], source, b"key-%d" % number, sink)
    with Etcd.connect([etcd]) as client:
        kept = {
            item.key.rpartition("/")[2]: item
            for item in client.range(f"/tikv-br/{source.cluster.cluster_id}/sync/plain/").items
        }
    assert kept.keys() == {"owner", "checkpoint"}
    found = json.loads(kept["checkpoint"].value)["content"]
    assert found["epoch"] == kept["owner"].mod_revision
    assert source.safe_points()[service_id("plain")] == found["checkpoint_ts"] - 1
    group("changefeed", "create", "--id", "plain", "--sink", "blackhole://", "--start-ts", "now", code=74)
    source.cluster.pd.update_service_safe_point(service_id("plain"), 0, 0)


def run_until_written(flags: list[str], source: LiveCluster, key: bytes, sink: Path) -> None:
    """Run a sync until a key that is put during it has arrived at its sink, then end it."""
    more = ["--hold-back", "0s", "--status-every", "1s", "--output", "json"]
    command = [str(PROGRAM), "sync", *flags, *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["message_type"] != "status":
                break
            source.raw().put(key, b"value")
            if sink.exists() and key.hex() in sink.read_text():
                process.send_signal(signal.SIGTERM)
                break  # a second signal would end it at once, without a last checkpoint and safe point
        _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
