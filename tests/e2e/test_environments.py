"""Environments of people: odd variables, no home, closed streams, small limits. Each command works or says what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed
from tests.e2e.conftest import Playgrounds
from tests.support.live_cluster import contents, live_cluster
from tests.support.tools import ROOT
from tests.support.waiting import PATIENCE, eventually
from tikv_br.errors import Terminated
from tikv_br.formats.api_version import ApiVersion

SCRIPT = """
import contextlib, io, json, sys
from tikv_br.cli import main
answers = []
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main.run(words)
    answers.append([words, code, err.getvalue()])
with open(sys.argv[1], "w") as file:
    json.dump(answers, file)
"""
"""Runs commands one after the other: a process for each would import everything again. Standard output is as the environment has it."""
pytestmark = pytest.mark.slow
ABSENT = ""
"""A variable with this value is removed."""
KUBERNETES = {
    "TIKV_BR_PORT": "tcp://10.0.0.1:8080",
    "TIKV_BR_SERVICE_HOST": "10.0.0.1",
    "TIKV_BR_SERVICE_PORT": "8080",
    "TIKV_BR_SERVICE_PORT_HTTP": "8080",
    "TIKV_BR_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "TIKV_BR_PORT_8080_TCP_PROTO": "tcp",
    "TIKV_BR_PORT_8080_TCP_PORT": "8080",
    "TIKV_BR_PORT_8080_TCP_ADDR": "10.0.0.1",
    "TIKV_BR_PLAYGROUND_START_PORT": "tcp://10.0.0.1:2379",
}
VARIABLES: dict[str, dict[str, str]] = {
    "ascii": {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "not-numbers": {"NUMBA_NUM_THREADS": "many", "NUMBA_OPT": "17", "OMP_NUM_THREADS": "x", "COLUMNS": "x"},
    "libraries": {
        "NUMBA_DISABLE_JIT": "1",
        "NUMBA_NUM_THREADS": "0",
        "OMP_NUM_THREADS": "0",
        "GRPC_POLL_STRATEGY": "nonsense",
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "cpp",
        "ARROW_DEFAULT_MEMORY_POOL": "nonsense",
    },
    "terminal": {
        "COLUMNS": "0",
        "LINES": "-1",
        "TERM": "dumb",
        "TZ": "Nowhere/Nothing",
        "NUMBA_CACHE_DIR": "/proc/nowhere",
        "PYTHONDEVMODE": "1",
    },
    "relative-folders": {"XDG_CONFIG_HOME": "a", "XDG_STATE_HOME": "b", "XDG_CACHE_HOME": "c", "HOME": "d"},
    "no-folders": {"TMPDIR": "/nowhere", "XDG_STATE_HOME": "/proc/1/x", "HOME": "/etc/passwd"},
}
SHELL = {
    "no-streams": 'exec "$@" <&- >&- 2>&-',
    "few-files": 'umask 077; ulimit -n 40; exec "$@"',
    "no-folder": 'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
}


def answers(shell: str, pd: str, folder: Path, variables: dict[str, str]) -> list[tuple[list[str], int, str]]:
    """Run cheap commands in a process of an environment, and return exit code and messages of each."""
    (folder / "rows.jsonl").write_text('{"key": "6b", "value": "76"}\n')
    commands = [
        ["help", "storage"],
        ["config", "check"],
        ["config", "show", "backup", "raw"],
        ["playground", "list"],
        ["list", "--storage", str(folder / "backups")],
        ["raw", "import", "--pd", pd, str(folder / "rows.jsonl")],
        ["raw", "scan", "--pd", pd, "--limit", "1"],
        ["gc", "status", "--pd", pd],
        ["backup", "raw", "--pd", pd, "--storage", str(folder / "backup"), "--executor", "driver", "--allow-empty"],
    ]
    found = folder / "answers.json"
    wanted = environment(
        TIKV_BR_BACKUP_RAW_SAFE_INTERVAL="0s", PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", **variables
    )
    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", SCRIPT, str(found), json.dumps(commands)],
        env={name: value for name, value in wanted.items() if value != ABSENT},
        capture_output=True,
        check=False,
        timeout=PATIENCE,
        cwd=folder,
    )
    assert found.exists(), done.stderr.decode(errors="replace")
    found_answers: list[tuple[list[str], int, str]] = json.loads(found.read_text())
    assert len(found_answers) == len(commands)
    return found_answers


def assert_plain(found: list[tuple[list[str], int, str]], *, failing: dict[str, int]) -> None:
    """Each command succeeds, or ends with the code expected of its first words; no message is a program's."""
    wrong = [
        each
        for each in found
        if each[1] != failing.get(" ".join(each[0]).split(" -")[0], 0)
        or any(word in each[2] for word in ("unexpected", "Traceback"))
    ]
    assert not wrong


NO_BACKUP = {"list": 31}


@pytest.mark.parametrize("name", VARIABLES)
def test_odd_variables(name: str, playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Variables that belong to others, or that their programs cannot read, stop no command."""
    assert_plain(answers('exec "$@"', playgrounds["v1"], tmp_path, VARIABLES[name]), failing=NO_BACKUP)


@pytest.mark.parametrize("name", SHELL)
def test_odd_processes(name: str, playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Closed streams, small limits, a strict umask and a directory that is gone stop no command."""
    assert_plain(answers(SHELL[name], playgrounds["v1"], tmp_path, {}), failing=NO_BACKUP)


def test_services_of_kubernetes_are_no_settings(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """`config check` reports a misspelt variable beside them, and only that."""
    found = answers('exec "$@"', playgrounds["v1"], tmp_path, {**KUBERNETES, "TIKV_BR_SERVICE_PORTS": "1"})
    assert_plain(found, failing=NO_BACKUP | {"config check": 2})
    assert next(err for words, _, err in found if words == ["config", "check"]).startswith("Error: 1 mistake in")


STRANGER = (
    "setpriv --reuid 123456 --regid 0 --clear-groups --inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search"
)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root may become another user")
def test_user_without_entry_in_passwd(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """As in OpenShift: commands work without a home directory; what needs one or Spark says so."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    found = answers(f'exec {STRANGER} "$@"', playgrounds["v1"], tmp_path, {"HOME": ABSENT, "XDG_CONFIG_HOME": ABSENT})
    assert_plain(found, failing=NO_BACKUP)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root may become another user")
@pytest.mark.parametrize(
    ("command", "code", "needed"),
    [
        ("config init", 2, "Set HOME or XDG_CONFIG_HOME"),
        ("drill list", 2, "Set HOME or XDG_STATE_HOME"),
        ("backup raw --executor spark --engine scan --storage {folder}/b", 50, "/etc/passwd"),
    ],
)
def test_what_such_a_user_needs(command: str, code: int, needed: str, playgrounds: Playgrounds, tmp_path: Path) -> None:
    """One sentence says what is missing and how to go on."""
    tmp_path.chmod(0o777)
    bare = {name: value for name, value in environment().items() if name not in {"HOME", "XDG_CONFIG_HOME"}}
    done = subprocess.run(
        [*STRANGER.split(), sys.executable, "-m", "tikv_br.cli.main", *command.format(folder=tmp_path).split()],
        env={**bare, "PYTHONPATH": str(ROOT), "TIKV_BR_PD": playgrounds["v1"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=tmp_path,
    )
    assert (done.returncode, needed in done.stderr) == (code, True), done.stderr


NOWHERE = "basic-pd-0.basic-pd-peer.ns.invalid:2379"


def test_commands_reach_a_pd_that_advertises_a_name_of_its_own_network(tmp_path: Path) -> None:
    """As behind a forwarded port: each works by the given address, and says once which name does not resolve."""
    rows, url = {b"k%d" % number: b"v" for number in range(9)}, f"local://{tmp_path}/b"
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1, pd_advertises=NOWHERE) as live:
        live.raw().batch_put(rows)
        place = ("-s", url, "--executor", "driver")
        commands = [
            ("check",),
            ("backup", "raw", *place),
            ("restore", "raw", *place, "--allow-overwrite"),
            ("raw", "scan"),
        ]
        for command in commands:
            done = succeed(*command, "--pd", live.pd)
            assert done.err.count(f"PD advertises {NOWHERE}, a name that does not resolve here") == 1, done
            assert f"{live.pd} is used instead" in done.err
        output, sink = tmp_path / "output", tmp_path / "changes"
        options = ("--sink", f"file://{sink}", "--state-dir", str(tmp_path / "state"), "--start-ts", "now")
        with output.open("w") as log:
            sync = subprocess.Popen(
                [str(PROGRAM), "sync", "--pd", live.pd, *options], stdout=log, stderr=log, env=environment(), cwd="/"
            )
        try:
            eventually(lambda: "starting at" in output.read_text())
            live.raw().put(b"later", b"v")
            eventually(lambda: sink.exists() and b"later".hex() in sink.read_text())
        finally:
            sync.terminate()
            assert sync.wait(PATIENCE) == Terminated.exit_code
        assert output.read_text().count(f"PD advertises {NOWHERE}") == 1
        assert contents(live) == rows | {b"later": b"v"}
