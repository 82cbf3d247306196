"""Servers that hang while commands work: it is said after some 10 s, by the clock, and nothing is done again for it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment, succeed
from tests.integration.s3_servers import versitygw_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS = {b"key%05d" % number: b"value" * 20 for number in range(100)}
SLOW: dict[str, Any] = {"delay": {"seconds": 1}}
LONG: dict[str, Any] = {"delay": {"seconds": 12}}
AWAY_SECONDS = 19.0
LATEST = 14.0
"""Seconds after which a silence must have been said."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCluster]:
    """A V2 cluster with regions of 20 rows."""
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as running:
        running.raw().batch_put(ROWS)
        codec = running.raw().codec
        running.split(*(codec.bound(codec.rpc_key(key)) for key in sorted(ROWS)[20::20]))
        yield running


class Running:
    """A command and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def said(self) -> str:
        """Output and log."""
        return self._log.read_text()

    def silences(self) -> dict[str, str]:
        """The servers of which it was said that they do not answer, with the seconds."""
        return dict(re.findall(r"(PD|store|storage) \S+.* has not answered for (\d+) s, trying until", self.said))

    def notices(self, frozen: contextlib.AbstractContextManager[None], *servers: str) -> None:
        """While servers are frozen, see that it is said in time; afterwards, that they answer again."""
        before = self.said
        with frozen:
            began = time.monotonic()
            while not set(servers) <= self.silences().keys():
                seconds = time.monotonic() - began
                assert seconds < AWAY_SECONDS, self.said
                time.sleep(0.05)
            time.sleep(max(AWAY_SECONDS - seconds, 0))
            assert self.process.poll() is None, self.said
        assert 9 < seconds < LATEST, self.said[len(before) :]
        for server in servers:
            eventually(lambda server=server: re.search(f"{server} .* answers again, after", self.said))  # type: ignore[misc]

    def end(self) -> None:
        """Wait for a command that succeeds."""
        assert self.process.wait(PATIENCE * 2) == 0, self.said


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Running]:
    """Run a command beside the test."""
    with (folder / "output").open("w") as log:
        process = subprocess.Popen(
            [str(PROGRAM), *arguments], stdout=log, stderr=log, env=environment(), cwd="/", text=True
        )
    try:
        yield Running(process, folder / "output")
    finally:
        process.kill()
        process.wait()


def calls(live: LiveCluster, rpc: str) -> int:
    """Number of calls of an RPC at the stores."""
    return int(live.calls()["rpcs"].get(rpc, {"calls": 0})["calls"])


def backup_of(live: LiveCluster, url: str) -> tuple[str, ...]:
    """A backup that the stores write, in one request."""
    options = ("--engine", "store", "--executor", "driver", "--concurrency", "1", "--safe-interval", "0s")
    return ("backup", "raw", "--pd", live.pd, "-s", url, *options)


def test_a_backup_by_stores_that_hang(live: LiveCluster, tmp_path: Path) -> None:
    """Its stream is silent; it continues where it was."""
    live.fail("backup.region", SLOW, count=-1)
    with started(tmp_path, *backup_of(live, f"local://{tmp_path}/b")) as running:
        eventually(lambda: any((tmp_path / "b").glob("**/*.sst")))
        sent = calls(live, "backup")
        running.notices(live.frozen(), "store")
        running.end()
    assert calls(live, "backup") == sent + 1, "a call is counted when it has ended"
    succeed("verify", f"local://{tmp_path}/b", "--level", "data", "--executor", "driver")


def test_a_backup_of_large_regions(live: LiveCluster, tmp_path: Path) -> None:
    """A store that says nothing for 12 s because it works is not called silent."""
    live.fail("backup.region", LONG, count=2)
    with started(tmp_path, *backup_of(live, f"local://{tmp_path}/b")) as running:
        running.end()
        assert "not answered" not in running.said


def test_a_backup_by_stores_whose_storage_hangs(live: LiveCluster, tmp_path: Path) -> None:
    """Only the stores write there."""
    live.fail("backup.region", SLOW, count=-1)
    with versitygw_server(tmp_path) as server, started(tmp_path, *backup_of(live, server.url("b"))) as running:
        eventually(lambda: any((tmp_path / "backups" / "b").glob("sst/**/*.sst")))
        running.notices(server.frozen(), "storage")
        running.end()


def test_a_sync_from_stores_that_hang(live: LiveCluster, tmp_path: Path) -> None:
    """Resolved-ts stand still; PD is silent as well."""
    sink = tmp_path / "changes"

    def is_synced(key: bytes) -> bool:
        return sink.exists() and key.hex() in sink.read_text()

    options = (
        "--sink",
        f"file://{sink}",
        "--start-ts",
        "now",
        "--state-dir",
        str(tmp_path / "state"),
        "--hold-back",
        "0s",
    )
    with started(tmp_path, "sync", "--pd", live.pd, *options) as running:
        eventually(lambda: "starting at" in running.said)
        live.raw().put(b"before", b"value")
        eventually(lambda: is_synced(b"before"))
        running.notices(live.frozen(), "store", "PD")
        live.raw().put(b"later", b"value")
        eventually(lambda: is_synced(b"later"))


def test_a_restore_into_stores_that_hang(live: LiveCluster, tmp_path: Path) -> None:
    """In the middle of downloads, which may take minutes."""
    succeed(*backup_of(live, f"local://{tmp_path}/b"))
    live.raw().delete_range(EVERY_KEY)
    live.fail("Download", SLOW, count=-1)
    options = ("-s", f"local://{tmp_path}/b", "--executor", "driver", "--concurrency", "1")
    with started(tmp_path, "restore", "raw", "--pd", live.pd, *options) as running:
        eventually(lambda: calls(live, "Download") > 1)
        running.notices(live.frozen(), "store")
        running.end()
    assert contents(live) == ROWS
