"""The tests that run on real servers: as many as expected, and by stand-ins, as there are no real servers here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COLLECTED
from tests.real.plugin import counted, is_whole, load
from tests.support.tools import ROOT
from tests.support.waiting import PATIENCE, eventually

SERVERS = {name: str(ROOT / "tests" / "real" / "servers" / name) for name in ("pd-server", "tikv-server")}
SELECTION = (
    "tests/integration/real/test_contract.py",
    "tests/integration/verify/test_damage.py",
)
"""Modules that share clusters, have one of their own, kill servers, and need no keyspaces of certain ids, which PD chooses itself."""


def environment(folder: Path) -> dict[str, str]:
    """That of somebody who has servers, which are stand-ins."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TIKV_BR_PD_SERVER": SERVERS["pd-server"],
        "TIKV_BR_TIKV_SERVER": SERVERS["tikv-server"],
        "TIKV_BR_REAL_TABLE": str(folder / "table.md"),
        "TMPDIR": str(folder),
    }


def run_pytest(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.real.plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_as_many_tests_as_expected_run_on_both(pytestconfig: pytest.Config) -> None:
    """A change that makes tests need a playground is noticed, feature by feature."""
    if is_whole(pytestconfig.args) and not pytestconfig.getoption("lf"):  # they are collected already, which takes long
        features = load()
        found = counted(features, pytestconfig.stash[COLLECTED])
        assert {name: found[name] for name in features.expected} == features.expected
        return
    ended = run_pytest("--collect-only", "tests/integration", "tests/interop", "tests/e2e", PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_tests_run_on_servers_that_are_processes(tmp_path: Path) -> None:
    """Programs with the command lines of real servers are started, killed, frozen, shared, cleaned and ended; a table has what ran."""
    ended = run_pytest("-m", "not slow or core", *SELECTION, **environment(tmp_path))
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert re.match(r"servers: TiKV \S+ .*, PD v\S+ ", lines[0])
    counts = {row[1].strip(): [int(each) for each in row[2:6]] for row in (line.split("|") for line in lines[4:])}
    passed, failed, skipped, _impossible = counts["all"]
    assert (failed, skipped) == (0, 0)
    assert passed >= 10
    assert counts["verify"][0]
    assert any(line.startswith("| **not proven** log |") for line in lines)
    assert not list(tmp_path.glob("tikv-br-real-*")), "the folders of servers are removed"


@pytest.mark.slow
def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also when it is killed: nobody is left to listen, or to hold memory."""
    start = (
        "import sys, time\n"
        "from tests.support.real_cluster import POOL\n"
        "from tikv_br.formats.api_version import ApiVersion\n"
        "with POOL.lease(ApiVersion.V2, stores=2) as live:\n"
        "    servers = live._servers\n"
        "    print(*(each.process.pid for each in (*servers.pds, *servers.stores)), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start], cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()
    assert len(pids) == 3
    eventually(lambda: not any(is_running(pid) for pid in pids), PATIENCE)


@pytest.mark.slow
def test_ctrl_c_ends_all_servers(tmp_path: Path) -> None:
    """SIGINT in the middle of a test, to all processes of the terminal: pytest says so, and no process and no folder is left."""
    command = ["env", "--default-signal=INT"]  # a shell's background jobs ignore it
    command += [sys.executable, "-m", "pytest", "-q", "-p", "tests.real.plugin", "-p", "no:cacheprovider", SELECTION[0]]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            eventually(
                lambda: len(of_environment(tmp_path)) >= 6
            )  # also one of PD, two stores, the watcher, the playground
            os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in said
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    eventually(lambda: of_environment(tmp_path) == [])
    assert not list(tmp_path.glob("tikv-br-real-*"))


def of_environment(folder: Path) -> list[int]:
    """Processes that were started with `environment`."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if f"TMPDIR={folder}\0".encode() in each.read_bytes() and is_running(int(each.parent.name)):
                found.append(int(each.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
