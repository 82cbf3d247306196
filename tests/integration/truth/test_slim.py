"""Every command without the packages that ``tikv-br-core`` leaves out: it does its work, or names the package to install."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.command import environment
from tests.integration.truth import conftest
from tests.integration.truth.calls import CALLS
from tests.integration.truth.conftest import Ended, made
from tests.integration.truth.proofs import PROOFS, with_more
from tests.support.tools import ROOT
from tikv_br.cli.command import CommandPath

pytestmark = pytest.mark.slow
BLOCKED = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
lacking = {"boto3", "botocore", "confluent_kafka", "pandas", "py4j", "pyspark", "rocksdict"}  # numba: kernels are compiled
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in lacking else find(name, *more)
from tikv_br.cli import main
"""
ONE_BY_ONE = f"""{BLOCKED}
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
"""Runs commands in one process, which imports once."""
LAST = (("prune",), ("backup", "abort"))
LACKING: dict[CommandPath, tuple[int, str]] = {
    ("drill", "run"): (56, "rocksdict"),
    ("playground", "start"): (56, "rocksdict"),
    ("kafka", "replay"): (56, "confluent-kafka"),
    ("spark", "pack"): (56, "pandas"),
}
"""Packages to install, for commands that need one."""
WITHOUT: set[CommandPath] = {
    ("drill", "list"),
    ("drill", "show"),
    ("playground", "list"),
    ("playground", "status"),
    ("playground", "stop"),
}
"""They show or stop what a command above would have made."""
RUNNING: dict[CommandPath, str] = {
    ("sync",): "starting at",
    ("log", "start"): "starting at",
    ("gc", "run"): "advanced the GC safe point",
    ("changefeed", "capture"): "joined the group",
    ("serve",): "listening",
}
"""Commands that run until stopped, and what they write when they work."""


def check_running(program: list[str], own: dict[str, str]) -> None:
    """Start a command that runs until stopped, and stop it once it works."""
    path = tuple(word for word in program if not word.startswith("-"))
    marker = next(text for words, text in RUNNING.items() if path[: len(words)] == words)
    with subprocess.Popen(
        [sys.executable, "-c", f"{BLOCKED}\nsys.exit(main.run(sys.argv[1:]))", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=own,
    ) as process:
        assert process.stdout is not None
        said, stopped = "", False
        for line in process.stdout:
            said += line
            if marker in line and not stopped:  # one signal is to be enough, whatever it meets
                process.terminate()
                stopped = True
    assert (process.returncode, "terminated (SIGTERM)" in said) == (143, True), said


def test_each_command_works_or_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With proofs of what it did; if Spark is demanded, those that use it name it and change nothing."""
    assert PROOFS.keys() | LACKING.keys() | WITHOUT | RUNNING.keys() == CALLS.keys()
    own = environment(PYTHONUNBUFFERED="1", PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state-home"))
    with (
        made(tmp_path) as world,
        subprocess.Popen(
            [sys.executable, "-c", ONE_BY_ONE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=own,
        ) as slim,
    ):

        def run(*words: str) -> Ended:
            assert slim.stdin is not None
            assert slim.stdout is not None
            slim.stdin.write(json.dumps(words) + "\n")
            slim.stdin.flush()
            ended = Ended(*json.loads(slim.stdout.readline()))
            assert "unexpected" not in ended.out + ended.err, (words, ended)
            assert "Traceback" not in ended.out + ended.err, (words, ended)
            return ended

        with_more(world, monkeypatch)
        monkeypatch.setattr(conftest, "tikv_br", run)
        for path in sorted(CALLS.keys() - LACKING.keys() - {("check",)}):
            if "--executor driver" in CALLS[path] or path == ("load", "raw"):
                refused = world.call(path, "--executor", "spark", "--output", "json")
                assert (refused.code, "'pyspark>=" in refused.last["hint"]) == (50, True), (path, refused)
        for path in [*(each for each in [*PROOFS, ("kafka", "replay")] if each not in LAST), *LAST]:
            instead = {"pd": world.target.pd} if path == ("raw", "import") else {}
            ended = world.call(path, "--output", "json", **instead)
            if path in LACKING:
                code, package = LACKING[path]
                assert (ended.code, f"'{package}>=" in ended.last["hint"]) == (code, True), (path, ended)
            elif path in WITHOUT:
                assert ended.code in {0, 31}, (path, ended)
            else:
                assert ended.code == 0, (path, ended)
                assert PROOFS[path](world, ended), (path, ended)
        assert slim.stdin is not None
        slim.stdin.close()
        with ThreadPoolExecutor(len(RUNNING)) as pool:
            calls = [[*path, *CALLS[path].format_map(world.names).split(), "--output", "json"] for path in RUNNING]
            calls = [[*words, "--resolve-locks"] if words[:2] == ["gc", "run"] else words for words in calls]
            for done in [pool.submit(check_running, words, own) for words in calls]:
                done.result()
