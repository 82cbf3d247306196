"""Every command without flags, with a wrong flag and with ``--help``, in a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import environment
from tests.support.waiting import PATIENCE

SCRIPT = """
import contextlib, io, json, sys
import typer.main
from tikv_br.cli import main
from tikv_br.cli.command import leaves
starts_servers = {("playground", "start"), ("serve",)}
answers = []


class Screen(io.StringIO):
    def isatty(self):
        return sys.stdin.isatty()


for path, _command in leaves(typer.main.get_command(main.app)):
    groups = {path[:length] for length in range(1, len(path))} - {tuple(answer[0]) for answer in answers}
    for words in [*sorted(groups), path]:
        for more in ([], ["--no-such-flag"], ["--help"]):
            if more or words not in starts_servers:
                said, shown = Screen(), Screen()
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
                    code = main.run([*words, *more])
                answers.append([words, more, code, shown.getvalue(), said.getvalue()])
with open(sys.argv[1], "w") as file:
    json.dump(answers, file)
"""
BARE = (
    ["drill", "list"],
    ["playground", "list"],
    ["config", "show"],
    ["config", "init"],
    ["config", "check"],
    ["help"],
    ["version"],
)
"""Commands that need no flag."""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.slow
def test_every_command_answers_bare_or_misused(terminal: bool, tmp_path: Path) -> None:
    """Each exits with a documented code and one short message, help exits with 0, and no error is unexpected."""
    answers = tmp_path / "answers.json"
    command = [sys.executable, "-c", SCRIPT, str(answers)]
    own = {name: str(tmp_path) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME")}
    nowhere = environment(TIKV_BR_PD="127.0.0.1:1", **own)
    parent, child = pty.openpty()
    streams = child if terminal else subprocess.DEVNULL
    try:
        subprocess.run(command, check=True, timeout=PATIENCE, env=nowhere, stdin=streams, cwd=str(tmp_path))
    finally:
        os.close(parent)
        os.close(child)
    wrong = []
    for words, more, code, shown, said in json.loads(answers.read_text()):
        if more == ["--help"]:
            right = code == 0 and shown.startswith("Usage: tikv-br") and not said
        elif more:
            right = code == 2 and more[0] in said and said.count("\n") == 2
        elif words in BARE:
            right = code == 0
        else:
            right = code != 0 and said.count("\n") <= 5 and "unexpected" not in said and "Usage" not in said
        if not right:
            wrong.append((words, more, code, said))
    assert not wrong
