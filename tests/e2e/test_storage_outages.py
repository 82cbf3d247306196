"""An S3 server that goes away while commands work: for some seconds it only costs time, for longer it is what failed."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed
from tests.integration.s3_servers import S3Server, versitygw_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.ports import reserved_ports
from tests.support.waiting import eventually
from tikv_br.errors import StorageUnreachable
from tikv_br.formats.api_version import ApiVersion

pytestmark = pytest.mark.timeout(400)
START_SECONDS = 180
"""Until a command has started and done some of its work."""
REGIONS = 40
ROWS = {b"key%05d" % number: b"value" * 20 for number in range(REGIONS * 20)}
AWAY_SECONDS = 6
PATIENCE_SECONDS = 8
"""Patience of commands that fail; much less than the default, and more than a request's silence on a busy machine."""
SLOW = {"delay": {"seconds": 0.5}}
ENGINES = pytest.mark.parametrize(("engine", "rpc"), [("scan", "RawScan"), ("store", "backup.region")])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster of many regions."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as live:
        codec = live.raw().codec
        live.raw().batch_put(ROWS)
        live.split(*(codec.bound(codec.rpc_key(key)) for key in sorted(ROWS)[20::20]))
        yield live


@pytest.fixture
def port() -> Iterator[int]:
    """Port of the server, before and after."""
    with reserved_ports(1) as [number]:
        yield number


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command beside the test."""
    command = [str(PROGRAM), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd="/"
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outage(
    folder: Path, port: int, prepare: Callable[[S3Server], list[str]], begun: Callable[[], bool]
) -> tuple[int, str]:
    """Start a command, kill the server once the work has begun, restart it, and wait for the command's end."""
    with contextlib.ExitStack() as stack:
        with versitygw_server(folder, port=port) as server:
            running = stack.enter_context(started(*prepare(server)))
            eventually(begun, START_SECONDS)
            server.kill()
        time.sleep(AWAY_SECONDS)
        assert running.poll() is None, "".join(running.communicate())
        stack.enter_context(versitygw_server(folder, port=port))
        out, err = running.communicate(timeout=120)
        return running.returncode, out + err


def files_in(folder: Path, prefix: str) -> list[Path]:
    """The files of a backup."""
    return list((folder / "backups" / prefix).glob("sst/**/*.sst"))


def backup_arguments(live: LiveCluster, url: str, engine: str) -> list[str]:
    """A backup of one task for each region."""
    return [
        *("backup", "raw", "--pd", live.pd, "-s", url, "--engine", engine, "--executor", "driver"),
        *("--concurrency", "2", "--dst-api-version", "v2", "--safe-interval", "0", "--gcttl", "1m"),
    ]


@ENGINES
def test_a_backup_rides_out_a_restart_of_its_storage(
    source: LiveCluster, tmp_path: Path, port: int, engine: str, rpc: str
) -> None:
    """In the middle of the copy."""
    with source.failing(rpc, SLOW, count=-1):
        code, said = outage(
            tmp_path,
            port,
            lambda server: backup_arguments(source, server.url("b"), engine),
            lambda: len(files_in(tmp_path, "b")) > 2,
        )
    assert code == 0, said
    with versitygw_server(tmp_path, port=port) as server:
        succeed("verify", server.url("b"), "--level", "data", "--executor", "driver")


@pytest.mark.parametrize("via", ["stores", "upload"])
def test_a_restore_rides_out_a_restart_of_its_storage(source: LiveCluster, tmp_path: Path, port: int, via: str) -> None:
    """Neither the stores of the target nor this machine can read during the restart."""
    with versitygw_server(tmp_path, port=port) as server:
        succeed(*backup_arguments(source, server.url("b"), "scan"))
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        with target.failing("Ingest", SLOW, count=-1):
            code, said = outage(
                tmp_path,
                port,
                lambda server: [
                    *("restore", "raw", "--pd", target.pd, "-s", server.url("b"), "--via", via),
                    *("--executor", "driver", "--concurrency", "2"),
                ],
                lambda: target.calls()["rpcs"].get("Ingest", {"calls": 0})["calls"] > 2,
            )
        assert code == 0, said
        assert contents(target) == ROWS


@ENGINES
def test_a_frozen_storage_is_what_failed(source: LiveCluster, tmp_path: Path, port: int, engine: str, rpc: str) -> None:
    """Within the patience and some seconds, clean-up included; not the lease, which nobody has taken."""
    with versitygw_server(tmp_path, port=port) as server, source.failing(rpc, SLOW, count=-1):
        arguments = backup_arguments(source, server.url("b"), engine)
        with started(*arguments, "--storage-patience", f"{PATIENCE_SECONDS}s") as running:
            eventually(lambda: len(files_in(tmp_path, "b")) > 2, START_SECONDS)
            server.freeze()
            began = time.monotonic()
            out, err = running.communicate(timeout=120)
            seconds = time.monotonic() - began
    assert running.returncode == StorageUnreachable.exit_code, out + err
    assert "does not answer: no answer in time; gave up after" in out + err
    assert PATIENCE_SECONDS - 2 < seconds < PATIENCE_SECONDS + 20
