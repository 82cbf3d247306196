"""Commands that are ended from outside, or lose what they need on the way: a code of its own, and nothing that looks whole."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import time
from contextlib import AbstractContextManager

import msgspec
import msgspec.structs
import pytest

from tests.integration.truth.calls import CALLS, NEEDS_STORES
from tests.integration.truth.conftest import ROWS, World, check_failure
from tests.support.accepting import accepting
from tikv_br.cli import main
from tikv_br.cli.command import CommandPath
from tikv_br.cli.shared import ClusterFlags

ASKS_PD = [path for path, words in CALLS.items() if "{pd}" in words and path not in {("check",), ("drill", "run")}]
"""`check` and the drill's probes take a silent PD for a failed probe; see test_refused.py."""
BROKEN_OFF = [*ASKS_PD[::4], ("sync",), ("log", "start"), ("log", "end")]
"""Enough of them: what they do until PD has answered is the same code."""
LET_IT_WAIT = 0.7
"""Seconds from the connection until the command certainly waits for an answer."""
SPEAKS = [
    ("list",),
    ("show",),
    ("show", "--log"),
    ("log", "status"),
    ("log", "metadata"),
    ("cat",),
    ("raw", "scan"),
    ("raw", "get"),
    ("changefeed", "list"),
    ("version",),
    ("diff",),
]


def silent_pd(number: int) -> AbstractContextManager[str]:
    """An address that takes a connection, has this process sent a signal, and never says anything."""
    reported: list[int] = []

    def greet(_connection: socket.socket) -> None:
        if not reported:
            reported.append(number)
            time.sleep(LET_IT_WAIT)
            os.kill(os.getpid(), number)

    return accepting(greet)


@pytest.mark.parametrize("command", BROKEN_OFF, ids=" ".join)
def test_a_signal_ends_it_with_the_signal_s_code(world: World, command: CommandPath) -> None:
    """SIGINT and SIGTERM, by turns, while it waits for a cluster that says nothing."""
    number, code = ((signal.SIGINT, 130), (signal.SIGTERM, 143))[BROKEN_OFF.index(command) % 2]
    before = world.picture()
    with silent_pd(number) as address:
        ended = world.call(command, "--output", "json", pd=address, target=address)
    check_failure(ended, code, f"{command}", is_json=True)
    assert world.picture() == before


@pytest.mark.parametrize("command", SPEAKS, ids=" ".join)
def test_nobody_listens(world: World, command: CommandPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of the output has gone before the first word: 141, and no word on stderr."""
    config = ClusterFlags.config
    monkeypatch.setattr(  # all is well: a cluster that is only slow is waited for
        ClusterFlags, "config", lambda flags: msgspec.structs.replace(config(flags), retry_budget=60.0)
    )
    before = world.picture()
    reader, writer = os.pipe()
    os.close(reader)
    words = [word.format_map(world.names) for word in CALLS[command].split()]
    said = io.StringIO()
    with os.fdopen(writer, "w") as stream:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(said):
            code = main.run([*command, *words, "--output", "json"])
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    assert (code, said.getvalue()) == (141, "")
    assert world.picture() == before


def test_a_store_that_is_down(world: World) -> None:
    """Stores that do not come back within the time for trying: 3 or 8, and nothing is done by halves."""
    before = world.picture()
    for (
        store_id
    ) in world.source.store_ids:  # all, else others take the lead while a slow machine gets through the commands
        world.source.kill_store(store_id)
    try:
        for command in NEEDS_STORES:
            ended = world.call(command, "--output", "json", target=world.source.pd, new=str(world.folder / "down"))
            assert ended.code in {3, 8}, (command, ended)
            check_failure(ended, ended.code, f"{command}", is_json=True)
    finally:
        world.source.heal()
    assert world.picture() == before
    assert not list((world.folder / "down").rglob("backupmeta"))
    assert len(ROWS) == len(before["source"])  # type: ignore[arg-type]
