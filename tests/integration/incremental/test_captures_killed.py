"""Captures as processes: killed, frozen, brought back, judged by what every key has been at the source and the target."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment
from tests.integration.incremental.members import wait_for_state
from tests.integration.incremental.writer import Writer
from tests.support import history
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import ChangefeedInfo, GroupState
from tikv_br.incremental.group.store import GroupStore
from tikv_br.playground.etcd import EtcdServer

V2 = ApiVersion.V2
LEASE = 10  # so long that a busy machine renews it in time
PATIENCE = 90.0
"""Seconds that a slow machine may take for anything."""
NAME = "watched"


class Captures:
    """The processes of a group, and what etcd says of them."""

    def __init__(self, source: LiveCluster, target: LiveCluster, server: EtcdServer, etcd: Etcd, folder: Path) -> None:
        self.source, self.target, self.server, self.folder = source, target, server, folder
        self.store = GroupStore(etcd, source.cluster.cluster_id)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self) -> int:
        """One more; its pid."""
        place = ["--pd", self.source.pd, "--etcd", self.server.address, "--scratch-dir", str(self.folder)]
        command = [str(PROGRAM), "capture", "start", *place, "--lease", f"{LEASE}s", "--status-addr", "0"]
        command.append("--no-status-key")
        log = (self.folder / f"capture-{len(self._running)}.log").open("wb")
        with log:
            process = subprocess.Popen(command, stderr=log, env=environment(XDG_STATE_HOME=str(self.folder)), cwd="/")
        self._running[process.pid] = process
        return process.pid

    def send(self, pid: int, number: signal.Signals) -> int:
        """Send a signal to one, and wait for its end if that ends it; its exit code."""
        os.kill(pid, number)
        return self._running[pid].wait(PATIENCE) if number in {signal.SIGKILL, signal.SIGTERM} else 0

    def kill_all(self) -> None:
        """Leave nobody behind."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def holders(self, state: GroupState) -> set[int]:
        """The processes that have tasks; 0 = nobody has one."""
        return {_pid(task.capture) for task in state.tasks.values()}

    def wait(self, what: str, is_there: Callable[[GroupState], object]) -> GroupState:
        """Wait for a state."""
        return wait_for_state(self.store, what, is_there, PATIENCE)

    def wait_for(self, *pids: int) -> float:
        """Wait until just these processes have tasks, and the checkpoint moves; the seconds until they had them."""
        began = time.monotonic()
        self.wait(f"{pids} work", lambda state: self.holders(state) == set(pids))
        seconds = time.monotonic() - began
        self.wait_for_checkpoint()
        return seconds

    def metrics(self) -> list[str]:
        """Metrics of each capture, at its address in the group."""
        pages = [f"http://{each.address}/metrics" for each in self.store.snapshot().captures.values()]
        return [urllib.request.urlopen(page, timeout=PATIENCE).read().decode() for page in pages]

    def wait_for_checkpoint(self) -> None:
        """Wait until it moves."""
        reached = self.checkpoint()
        self.wait("the checkpoint moves", lambda state: state.checkpoint_ts(NAME) > reached)

    def owner(self) -> int:
        """The owner's pid, once there is one."""
        return _pid(self.wait("somebody owns the group", lambda state: state.owner).owner)

    def checkpoint(self) -> int:
        """Lowest saved checkpoint of all tasks."""
        return self.store.snapshot().checkpoint_ts(NAME)

    def wait_until_equal(self) -> None:
        """Wait for the target to hold what the source holds; writes have stopped."""
        wanted, until = contents(self.source), time.monotonic() + PATIENCE
        while contents(self.target) != wanted:
            assert time.monotonic() < until, "the target does not catch up"
            time.sleep(0.1)


def _pid(capture: str) -> int:
    return int(capture.split("-")[-2]) if capture else 0


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[Captures]:
    """A source under a changefeed of two sub-spans, a target and an etcd; nobody works on it yet."""
    settings = {"stores": 2, "regions": 4, "resolved_ts_interval": 0.2}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(live_cluster(tmp_path / "source", V2, **settings))
        target = stack.enter_context(live_cluster(tmp_path / "target", V2, stores=1, regions=3))
        server = stack.enter_context(real_etcd(tmp_path / "etcd"))
        etcd = stack.enter_context(Etcd.connect([server.address]))
        group = Captures(source, target, server, etcd, tmp_path)
        stack.callback(group.kill_all)
        since = minus_seconds(source.cluster.pd.tso(), 10)
        feed = ChangefeedInfo(
            NAME, f"tikv://{target.pd}", 0, b"", b"", since, created_ms=1, hold_back_ms=0, sorter_bytes=1 << 16
        )
        Changefeeds(group.store, source.cluster.pd).create(feed)
        yield group


@pytest.mark.timeout(500)
def test_killed_and_frozen_captures_lose_and_revert_nothing(captures: Captures, tmp_path: Path) -> None:
    """The owner is killed, then the other, both return, one is frozen and wakes: within three leases others take over."""
    group = captures
    first, second = group.begin(), group.begin()
    with (
        history.CheckpointWatch(group.checkpoint, group.target.cluster.pd.tso, every=0.1) as watch,
        Writer(group.source, 1),
        Writer(group.source, 2),
    ):
        group.wait_for(first, second)
        # The checkpoint of the whole moves with the older half, so the other one may still be about to start.
        eventually(lambda: [text.count("checkpoint_lag_seconds{") for text in group.metrics()] == [1, 1], PATIENCE)
        owner = group.owner()
        other = second if owner == first else first
        group.send(owner, signal.SIGKILL)
        seconds = [group.wait_for(other)]
        third = group.begin()
        joined = [group.wait_for(other, third)]
        assert group.owner() == other
        group.send(other, signal.SIGKILL)
        seconds.append(group.wait_for(third))
        fourth = group.begin()
        joined.append(group.wait_for(third, fourth))
        group.send(fourth, signal.SIGSTOP)
        seconds.append(group.wait_for(third))
        group.send(fourth, signal.SIGCONT)
        group.wait_for(third, fourth)
    group.wait_until_equal()
    for pid in (third, fourth):
        assert group.send(pid, signal.SIGTERM) == 143
    left = group.store.snapshot()
    assert (group.holders(left), dict(left.captures)) == ({0}, {})
    print(f"takeovers after {seconds} s, new ones begin after {joined} s")  # noqa: T201 - shown when the test fails
    assert max(seconds) < 3 * LEASE + max(joined)  # which is more on a slower machine
    before, after = (history.read(tmp_path / name, tmp_path / f"{name}-read") for name in ("source", "target"))
    assert history.check(before, after, watch.passed) > 0
