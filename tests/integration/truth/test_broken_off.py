"""Commands that are ended from outside, or lose what they need on the way: a code of its own, and nothing that looks whole."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import resource
import signal
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration.truth.calls import CALLS, NEEDS_STORES
from tests.integration.truth.conftest import ROWS, World, check_failure
from tests.support.accepting import accepting
from tikv_br.backupset import lease
from tikv_br.cli import main
from tikv_br.cli.command import CommandPath
from tikv_br.cli.shared import ClusterFlags
from tikv_br.dataflow import steps
from tikv_br.dataflow.context import BackupContext
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ASKS_PD = [path for path, words in CALLS.items() if "{pd}" in words and path not in {("check",), ("drill", "run")}]
"""`check` and the drill's probes take a silent PD for a failed probe; see test_refused.py."""
BROKEN_OFF = [*ASKS_PD[::4], ("sync",), ("log", "start"), ("log", "stop")]
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
        ClusterFlags, "config", lambda flags: dataclasses.replace(config(flags), retry_budget=60.0)
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


def test_a_lost_lease_makes_no_backup(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody breaks the lease between the last file and the commit: 36, no backup, and the next run makes one."""
    before, place = world.picture(), str(world.folder / "backups" / "lost")
    prove = steps.verify_coverage

    def prove_and_lose(context: BackupContext) -> None:
        prove(context)
        lease.break_lease(context.store, force=True)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "verify_coverage", prove_and_lose)
        check_failure(world.call(("backup", "raw"), "--output", "json", new=place), 36, "lost lease", is_json=True)
    assert world.picture() == before
    held = lease.acquire(open_store(parse(place)), "somebody else")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_held", {held._lease.token})
            check_failure(world.call(("backup", "raw"), "--output", "json", new=place), 38, "held lease", is_json=True)
    finally:
        held.release()
    assert world.picture() == before
    assert world.call(("backup", "raw"), new=place).code == 0
    assert world.call(("verify",), sound=place).code == 0


def test_a_full_disk_makes_no_backup(world: World) -> None:
    """The disk fills up within the first file: 22, and no backup."""
    before, place = world.picture(), str(world.folder / "backups" / "full")
    tables = ("--engine", "scan", "--compression", "none", "--output", "json")
    warm = world.call(("backup", "raw"), *tables, new=str(world.folder / "warm" / "backup"))
    assert warm.code == 0  # kernels that are compiled now are kept, which takes room on the disk
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        ended = world.call(("backup", "raw"), *tables, new=place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_failure(ended, 22, "full disk", is_json=True)
    assert world.picture() == before
    assert not list(Path(place).rglob("backupmeta"))


def test_a_store_that_is_down(world: World) -> None:
    """Stores that do not come back within the time for trying: 3 or 8, and nothing is done by halves."""
    before = world.picture()
    for (
        store_id
    ) in world.source.store_ids:  # all, else others take the lead while a slow machine gets through the commands
        world.source.run("kill-store", store_id=store_id)
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
