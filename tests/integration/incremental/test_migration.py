"""docs/migration.md, rehearsed: its own commands, in their order, under writes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment
from tests.integration.incremental.conftest import Clusters
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents
from tests.support.waiting import eventually
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migration.md"
PATIENCE = 200.0
"""Seconds that a slow machine may take for anything."""
COPY, RESTORE, FOLLOW, REHEARSE, PROVE, WAY_BACK, COPY_TIMES, RESTORE_TIMES = re.findall(
    r"^\$ (tikv-br .*)$", PAGE.read_text(), re.MULTILINE
)
"""The commands of the page."""


class Running:
    """A command that runs on, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def await_(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first line of its output for which ``wanted`` holds, as soon as there is one."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if found := next(filter(wanted, self._said.copy()), None):
                return found
            assert self._process.poll() is None, "it has ended"
            time.sleep(0.05)
        raise AssertionError(f"not said: {self._said[-5:]}")

    def interrupt(self) -> None:
        """Ctrl-C, which it obeys."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(PATIENCE) == 130
        self._reader.join()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._said.append(json.loads(line))


class Shell:
    """Runs commands as they are written, with the page's variables set."""

    def __init__(self, old: LiveCluster, new: LiveCluster, folder: Path) -> None:
        places = {"BACKUP": str(folder / "backup"), "STATE": str(folder / "state"), "START": "sess", "END": "sest"}
        paths = {"PATH": f"{PROGRAM.parent}:/usr/bin:/bin", "V1": old.pd, "V2": new.pd, **places}
        quick = {"INTERVAL": "0.5s", "HOLD_BACK": "0s", "STATUS_EVERY": "0.2s"}
        sync = {f"TIKV_BR_SYNC_{name}": value for name, value in quick.items()}
        self._environment = environment(**paths, **sync, TIKV_BR_EXECUTOR="driver", TIKV_BR_OUTPUT="json")

    def run(self, command: str, *codes: int) -> dict[str, Any]:
        """Run it to its end; returns its summary. It must exit with 0, or one of ``codes``."""
        asked = ["bash", "-c", command]
        done = subprocess.run(
            asked, env=self._environment, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd="/"
        )
        assert done.returncode in {0, *codes}, done.stdout + done.stderr
        said = map(json.loads, done.stdout.splitlines())
        return next((line for line in said if line["message_type"] == "summary"), {})

    @contextlib.contextmanager
    def running(self, command: str) -> Iterator[Running]:
        """Run it beside the block, and end it by Ctrl-C."""
        asked = ["bash", "-c", f"exec {command}"]
        with subprocess.Popen(asked, env=self._environment, stdout=subprocess.PIPE, text=True, cwd="/") as process:
            running = Running(process)
            try:
                yield running
                running.interrupt()
            finally:
                process.kill()


class Application(Background):
    """Puts, overwrites, deletes, and now and then a whole range goes, for the length of a block."""

    def __init__(self, live: LiveCluster, seed: int) -> None:
        super().__init__([(self._write, 0.01)])
        self._raw, self._chance = live.raw(), random.Random(seed)

    def _write(self) -> None:
        raw, chance = self._raw, self._chance
        key = b"row%04d" % chance.randrange(2000)
        match chance.randrange(20):
            case 0:
                raw.delete_range(KeyRange(key, key[:-1] + b"\xff"))
            case 1 | 2 | 3:
                raw.delete(key)
            case _:
                raw.batch_put({key + b"-%d" % at: chance.randbytes(12) for at in range(3)})


@pytest.fixture
def pair(clusters: Clusters, targets: Clusters, request: pytest.FixtureRequest) -> tuple[LiveCluster, LiveCluster]:
    """The old cluster, of the API version that the test says, and the new one; both without rows."""
    both = clusters(request.param), targets(ApiVersion.V2)
    for live in both:
        live.raw().delete_range(EVERY_KEY)
    return both


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", [ApiVersion.V1], indirect=True)
def test_the_procedure(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """Copy, follow, rehearse, stop, prove: no row is missing; then the way back brings what is written to the new."""
    old, new = pair
    shell = Shell(old, new, tmp_path)
    old.raw().batch_put({b"row%04d" % at: b"first" for at in range(2000)})
    with Application(old, 1):
        shell.run(COPY)
        shell.run(RESTORE)
    with shell.running(FOLLOW) as sync:
        with Application(old, 2):
            sync.await_(lambda line: line.get("number") == 2)
            shell.run(REHEARSE, 60)
        stopped_ms = time.time() * 1000
        whole = sync.await_(lambda line: line.get("began_ms", 0) >= stopped_ms)
        assert whole["remaining"] == 0
        assert contents(new) == contents(old)
    proof = shell.run(PROVE)
    assert (proof["puts"], proof["deletes"], proof["remaining"]) == (0, 0, 0)
    with shell.running(WAY_BACK) as back:
        back.await_(lambda line: line["message_type"] == "status")
        with Application(new, 3):
            time.sleep(2)
        # Ranges that are deleted are in no feed; the row is written last, so all before it has arrived, too.
        new.raw().put(b"last", b"row")
        eventually(lambda: old.raw().batch_get([b"last"]), PATIENCE)


@pytest.mark.parametrize("pair", [ApiVersion.V1TTL], indirect=True)
def test_times_that_were_renewed(pair: tuple[LiveCluster, LiveCluster], tmp_path: Path) -> None:
    """The proof does not see them; copied once more they are right, and nothing else is touched."""
    old, new = pair
    shell = Shell(old, new, tmp_path)
    old.raw().batch_put({b"sess%03d" % at: b"user" for at in range(100)}, 3000)
    old.raw().put(b"other", b"row")
    shell.run(COPY)
    shell.run(RESTORE)
    old.raw().batch_put({b"sess%03d" % at: b"user" for at in range(0, 100, 2)}, 9000)
    assert shell.run(PROVE)["puts"] == 0
    shell.run(COPY_TIMES)
    shell.run(RESTORE_TIMES)
    for at in range(100):
        ttl = new.raw().get_ttl(b"sess%03d" % at)
        assert ttl is not None
        assert (ttl > 3000) is (at % 2 == 0)
    assert contents(new) == contents(old)
