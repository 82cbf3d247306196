"""A playground as a process: started, found, stopped and killed, by the command line and by the launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import accepts, reserved_ports
from tests.support.tools import find_tool
from tests.support.waiting import PATIENCE, eventually
from tikv_br.cluster.etcd import Etcd
from tikv_br.errors import PlaygroundError
from tikv_br.playground import launcher
from tikv_br.playground.home import Home

FAST = {"keyspace_split_delay": 0.0, "balance": False}


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own playgrounds out of sight."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A playground's folder; what still runs there at the end is stopped."""
    yield tmp_path / "playground"
    launcher.stop(tmp_path / "playground")


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``tikv-br playground …`` and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "tikv_br.cli.main", "playground", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def admin(state: dict[str, Any], path: str) -> Any:  # noqa: ANN401 - JSON
    """GET from PD's HTTP port."""
    import urllib.request

    with urllib.request.urlopen(f"http://{state['pd']}{path}", timeout=PATIENCE) as answer:
        return json.load(answer)


@pytest.mark.core("playground")
def test_the_command_lines_life(folder: Path) -> None:
    """Start --detach prints one JSON object and returns when all answers; status and list find it; stop ends it."""
    started = cli("start", "--dir", str(folder), "--api-version", "v2", "--stores", "2", "--detach", "--output", "json")
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    assert state["api_version"] == "v2"
    assert state["dir"] == str(folder)
    assert len(state["stores"]) == 2
    assert set(state["stores"][0]) >= {"id", "address", "status_address"}
    assert admin(state, "/pd/api/v1/stores")["count"] == 2
    found = json.loads(cli("status", "--dir", str(folder), "--output", "json").stdout)
    assert (found["running"], found["answers"], found["pid"]) == (True, True, state["pid"])
    assert [json.loads(line)["pd"] for line in cli("list", "--output", "json").stdout.splitlines()] == [state["pd"]]
    assert state["pd"] in cli("list").stdout
    stopped = json.loads(cli("stop", "--dir", str(folder), "--output", "json").stdout)
    assert (stopped["message_type"], stopped["dir"], stopped["stopped"]) == ("stopped", str(folder), True)
    assert json.loads(cli("status", "--dir", str(folder), "--output", "json").stdout)["running"] is False
    assert cli("list", "--output", "json").stdout == ""
    assert cli("stop", "--dir", str(folder)).returncode == 0


def test_told_to_end_while_it_is_stopped_it_ends_once_it_goes_on(folder: Path) -> None:
    """As after Ctrl-Z: the kernel may give the signal to any thread then."""
    process = launcher.start(folder, {"stores": 1, **FAST}).process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE) == 0


def test_a_second_start_is_refused(folder: Path) -> None:
    """Two playgrounds in one folder would share its data: the second names the first, and ends with 53."""
    state = launcher.start(folder, {"stores": 1}).state
    second = cli("start", "--dir", str(folder), "--detach", "--output", "json")
    error = json.loads(second.stdout)
    assert second.returncode == error["code"] == PlaygroundError.exit_code
    assert str(state["pid"]) in error["message"]
    assert admin(state, "/pd/api/v1/health")[0]["health"] is True


def addresses(state: dict[str, Any]) -> list[str]:
    """All of a playground."""
    of_stores = [store[name] for store in state["stores"] for name in ("address", "status_address")]
    return [state["pd"], *of_stores]


def assert_the_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """A restarted playground is unchanged, except for its process, and for ports that another program uses."""
    if any(map(is_of_another, set(addresses(before)) - set(addresses(after)))):
        return
    assert {**after, "pid": 0} == {**before, "pid": 0}


def is_of_another(address: str) -> bool:
    """Whether a port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            return True
    return False


def test_data_and_ports_survive_stop_and_kill(folder: Path) -> None:
    """Regions, safe points and addresses are the same after stop and start, and after SIGKILL and start."""
    first = launcher.start(folder, {"stores": 2, **FAST}).state
    eventually(lambda: len(admin(first, "/playground/regions")) == 5)
    regions = admin(first, "/playground/regions")
    assert launcher.stop(folder)
    second = launcher.start(folder, {}).state
    assert_the_same(first, second)
    assert admin(second, "/playground/regions") == regions
    os.kill(second["pid"], signal.SIGKILL)
    eventually(lambda: not Home(folder).is_running())
    assert launcher.status(folder)["running"] is False
    third = launcher.start(folder, {}).state
    assert_the_same(second, third)
    assert admin(third, "/playground/regions") == regions


def test_settings_that_data_depend_on_cannot_change(folder: Path) -> None:
    """A folder with a V2 cluster's data is not started as V1; the flag may be left out."""
    launcher.start(folder, {"api_version": 2, "stores": 1})
    launcher.stop(folder)
    with pytest.raises(PlaygroundError, match="--api-version v2, not v1"):
        launcher.start(folder, {"api_version": 0})
    assert launcher.start(folder, {}).state["api_version"] == "v2"


def test_a_wanted_port_is_used_or_refused(folder: Path, tmp_path: Path) -> None:
    """--port is PD's port; when it is taken the start fails with the reason instead of moving elsewhere."""
    state = launcher.start(folder, {"stores": 1}).state
    port = int(state["pd"].rpartition(":")[2])
    with pytest.raises(PlaygroundError, match=str(port)):
        launcher.start(tmp_path / "other", {"stores": 1, "pd_port": port})
    with reserved_ports(1) as [port]:
        found = launcher.start(tmp_path / "other", {"stores": 1, "pd_port": port}).state["pd"]
        launcher.stop(tmp_path / "other")
    assert found == f"127.0.0.1:{port}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_foreground_ends_with_a_signal(folder: Path, number: signal.Signals) -> None:
    """Without --detach the command stays, prints where it is, and a signal ends command and servers in order."""
    command = [sys.executable, "-m", "tikv_br.cli.main", "playground", "start", "--dir", str(folder), "--stores", "1"]
    with subprocess.Popen([*command, "--output", "json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        state = json.loads(process.stdout.readline())
        assert launcher.status(folder)["answers"] is True
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    assert launcher.status(folder)["running"] is False
    with pytest.raises(ProcessLookupError):
        os.kill(state["pid"], 0)


def test_stop_leaves_foreign_processes_alone(folder: Path) -> None:
    """A state file with the pid of a foreign process (its id was used again) does not get that process killed."""
    home = Home(folder)
    with home.locked():
        home.write_state({"pid": os.getpid()})
        with pytest.raises(PlaygroundError, match="is not its server"):
            launcher.stop(folder)


def test_an_etcd_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --etcd a real one runs at an address that stays, keeps its keys, and ends with the playground, killed or not."""
    monkeypatch.setenv("ETCD_BINARY", find_tool("etcd", hint="run scripts/install_etcd.sh", variable="ETCD_BINARY"))
    started = cli("start", "--dir", str(folder), "--stores", "1", "--etcd", "--detach", "--output", "json")
    assert started.returncode == 0, started.stderr
    state = json.loads(started.stdout)
    with Etcd.connect([state["etcd"]]) as etcd:
        etcd.put("key", b"kept")
    os.kill(state["pid"], signal.SIGKILL)
    eventually(lambda: not Home(folder).is_running() and not accepts(state["etcd"]))
    again = launcher.start(folder, {}).state
    assert again["etcd"] == state["etcd"] or is_of_another(state["etcd"])
    with Etcd.connect([again["etcd"]]) as etcd:
        found = etcd.get("key")
        assert found is not None
        assert found.value == b"kept"
    launcher.stop(folder)
    assert not accepts(again["etcd"])


def test_without_an_etcd_to_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--etcd on a machine without etcd describes how to get it, before anything is made."""
    monkeypatch.setenv("ETCD_BINARY", "/nowhere/etcd")
    failed = cli("start", "--dir", str(folder), "--etcd", "--detach")
    assert failed.returncode == PlaygroundError.exit_code
    assert "etcd-server" in failed.stderr
    assert not folder.exists()
