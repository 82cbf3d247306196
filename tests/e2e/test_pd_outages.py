"""PD that is gone while commands work: a signal ends them at once, and what could not be undone is not called undone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment, succeed
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.errors import Terminated
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS = {b"key%05d" % number: b"value" * 20 for number in range(400)}
REFUSES: dict[str, Any] = {"abort": {"code": "UNAVAILABLE", "details": "gone"}}
FROZEN: dict[str, Any] = {"delay": {"seconds": 120}}
SLOW: dict[str, Any] = {"delay": {"seconds": 0.5}}
GONE = pytest.mark.parametrize("gone", [REFUSES, FROZEN], ids=["refuses", "frozen"])
NOT_THE_BUDGET = 20.0
"""Seconds within which even a busy machine does what a quiet one does in 5; a budget is three times as many."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCluster]:
    """A V2 cluster with regions of 20 rows."""
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as running:
        running.raw().batch_put(ROWS)
        codec = running.raw().codec
        running.split(*(codec.bound(codec.rpc_key(key)) for key in sorted(ROWS)[20::20]))
        yield running


def end_by_signal(live: LiveCluster, gone: object, has_begun: Callable[[], bool], *arguments: str) -> str:
    """Start a command, let PD go once it works, and terminate the command 2 s later; what it printed."""
    with subprocess.Popen(
        [str(PROGRAM), *arguments, "--pd", live.pd],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd="/",
    ) as running:
        try:
            eventually(has_begun, PATIENCE)
            live.fail("*", gone, store_id=0, count=-1)
            time.sleep(2)
            assert running.poll() is None, running.communicate()[0]
            running.send_signal(signal.SIGTERM)
            began = time.monotonic()
            said, _ = running.communicate(timeout=PATIENCE)
            seconds = time.monotonic() - began
        finally:
            running.kill()
            live.disarm()
    assert running.returncode == Terminated.exit_code, said
    assert seconds < NOT_THE_BUDGET, said
    return said


def calls(live: LiveCluster, rpc: str) -> int:
    """Number of calls of an RPC at the stores."""
    return int(live.calls()["rpcs"].get(rpc, {"calls": 0})["calls"])


@GONE
def test_a_backup_without_pd_ends_at_a_signal(live: LiveCluster, gone: object, tmp_path: Path) -> None:
    """The remaining safe point is reported, with the time after which it expires."""
    live.fail("backup.region", SLOW, count=-1)
    options = ("-s", f"local://{tmp_path}/b", "--engine", "store", "--executor", "driver", "--concurrency", "1")
    said = end_by_signal(
        live, gone, lambda: any((tmp_path / "b").glob("**/*.sst")), "backup", "raw", *options, "--safe-interval", "0s"
    )
    assert "NOT undone: protect from GC: the safe point tikv-br-backup-" in said
    assert "\nundone: protect from GC" not in said


@GONE
def test_a_restore_without_pd_ends_at_a_signal(live: LiveCluster, gone: object, tmp_path: Path) -> None:
    """Its limit is lifted without PD, which is not needed to know the stores."""
    place = ("-s", f"local://{tmp_path}/b", "--executor", "driver")
    succeed("backup", "raw", *place, "--pd", live.pd, "--safe-interval", "0s")
    live.raw().delete_range(EVERY_KEY)
    live.fail("Ingest", SLOW, count=-1)
    options = (*place, "--concurrency", "1", "--ratelimit", "100")
    said = end_by_signal(live, gone, lambda: calls(live, "Ingest") > 2, "restore", "raw", *options)
    assert "\nundone: set the download limit" in said
    assert not any(store["download_limit"] for store in live.get("/playground/stores"))


@GONE
def test_a_sync_without_pd_ends_at_a_signal(live: LiveCluster, gone: object, tmp_path: Path) -> None:
    """Also while it looks for regions; its safe point stays for the TTL that it had."""
    sink = tmp_path / "out"
    end_by_signal(
        live,
        gone,
        lambda: any(sink.glob("**/*")),
        *("sync", "--sink", f"local://{sink}", "--start-ts", "now", "--scratch-dir", str(tmp_path)),
    )


LONG_COMMANDS = {
    "backup": (
        "RawScan",
        "backup raw -s {folder}/new --engine scan --executor driver --concurrency 1 --safe-interval 0s",
    ),
    "restore": ("Ingest", "restore raw -s {folder}/b --executor driver --concurrency 1 --allow-overwrite"),
    "sync": ("", "sync --sink file://{folder}/changes --state-dir {folder}/state --start-ts now"),
    "log": ("", "log start -s {folder}/log --start-ts now"),
    "gc": ("", "gc run"),
}
"""What each calls while it works, and its arguments."""
SECONDS_TO_END = 5.0


def test_commands_without_servers_end_within_five_seconds(live: LiveCluster, tmp_path: Path) -> None:
    """PD and all stores are stopped by SIGSTOP."""
    succeed(
        *("backup", "raw", "-s", f"local://{tmp_path}/b", "--executor", "driver", "--pd", live.pd),
        *("--safe-interval", "0s"),
    )
    seconds: dict[str, float] = {}
    for name, (rpc, arguments) in LONG_COMMANDS.items():
        live.fail(rpc or "RawScan", SLOW, count=-1)
        before, sign = calls(live, rpc), {"gc": "leads", "": "starting at"}.get(name if name == "gc" else rpc)

        def has_begun(said: str, rpc: str = rpc, before: int = before, sign: str | None = sign) -> bool:
            return calls(live, rpc) > before + 1 if sign is None else sign in said

        command = (*arguments.format(folder=tmp_path).split(), "--pd", live.pd)
        seconds[name] = seconds_to_end(command, tmp_path / f"{name}.output", has_begun, live.frozen)
        live.disarm()
    assert max(seconds.values()) <= SECONDS_TO_END, seconds


def seconds_to_end(
    command: Sequence[str],
    output: Path,
    has_begun: Callable[[str], bool],
    frozen: Callable[[], contextlib.AbstractContextManager[None]],
) -> float:
    """Start a command, stop its servers once it works, and terminate it 2 s later; the seconds that it took to end."""
    with output.open("w") as file:
        running = subprocess.Popen([str(PROGRAM), *command], stdout=file, stderr=file, env=environment(), cwd="/")
    try:
        eventually(lambda: has_begun(output.read_text()))
        with frozen():
            time.sleep(2)
            assert running.poll() is None, output.read_text()
            running.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert running.wait(PATIENCE) == Terminated.exit_code, output.read_text()
            return time.monotonic() - began
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("owns_etcd", [False, True], ids=["etcd of PD", "other etcd"])
def test_a_capture_without_servers_ends_within_five_seconds(
    live: LiveCluster, tmp_path: Path, *, owns_etcd: bool
) -> None:
    """PD, all stores and etcd are stopped by SIGSTOP while it owns its group and has tasks; the target answers."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(live_cluster(tmp_path / "target", ApiVersion.V2, stores=1))
        place = ["--pd", live.pd]
        etcd = stack.enter_context(real_etcd(tmp_path / "etcd")) if owns_etcd else None
        if etcd is not None:
            place += ["--etcd", etcd.address]
        sink = f"tikv://{target.pd}"
        succeed("changefeed", "create", *place, "--sink", sink, "--id", "watched", "--start-ts", "now")

        @contextlib.contextmanager
        def frozen() -> Iterator[None]:
            with live.frozen():
                if etcd is not None:
                    etcd.process.send_signal(signal.SIGSTOP)
                try:
                    yield
                finally:
                    if etcd is not None:
                        etcd.process.send_signal(signal.SIGCONT)

        command = ("changefeed", "capture", *place, "--scratch-dir", str(tmp_path))
        output = tmp_path / "output"
        seconds = seconds_to_end(command, output, lambda said: said.count("started, epoch") > 1, frozen)
        assert seconds <= SECONDS_TO_END, output.read_text()
        assert not owns_etcd or "cannot revoke the etcd lease" in output.read_text()
        assert "rejoining" not in output.read_text()
