"""``tikv-br serve`` as a user runs it, on what the other commands have made; its values are those that they print."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.support.documented import assert_documented
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import eventually
from tests.unit.drill.samples import passed
from tests.unit.serve.samples import entry
from tikv_br.backupset.index import Index
from tikv_br.drill.report import write_json
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

TOKEN = "a-token-of-the-test"


@contextlib.contextmanager
def running(*arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command with JSON output that does not outlive the test."""
    command = [str(PROGRAM), *arguments, "--output", "json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(**more), cwd="/", stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def listening(process: subprocess.Popen[str], *command: str) -> str:
    """Host and port that it says it listens at."""
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert line["message_type"] == "listening", line
    assert_documented(command, [line])
    url: str = line["url"]
    return url.removeprefix("http://").rstrip("/")


def get(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Code and body of an answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    """Exit code, and the rest of both outputs."""
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.slow
def test_the_overview_is_what_the_commands_say(tmp_path: Path) -> None:
    """Backups with their chain and window, a log archive, its writer, drills and safe points, of a playground and a directory."""
    root, logs, home = tmp_path / "backups", tmp_path / "log", tmp_path / "drills"
    write_json(open_store(parse(str(home))), passed(2))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1) as live:
        live.raw().batch_put({b"a": b"1", b"b": b"2"})
        state = {"XDG_STATE_HOME": str(tmp_path / "state")}  # in which the key of the status page is
        log = ("log", "start", "--pd", live.pd, "-s", str(logs), "--id", "east", "--start-ts", "now")
        with running(
            *log, "--flush-interval", "200ms", "--scratch-dir", str(tmp_path), "--status-addr", "0", **state
        ) as writer:
            status = listening(writer, "log", "start")
            eventually((logs / "east" / "log.json").exists, 120)
            backup = ("backup", "raw", "--pd", live.pd, "--executor", "driver", "--safe-interval", "0s", "-s")
            succeed(*backup, str(root / "full"))
            live.raw().batch_put({b"c": b"3"})
            succeed(*backup, str(root / "more"), "--base", str(root / "full"))
            sources = (
                "-s",
                str(root),
                "--log",
                f"{logs}?id=east",
                "--drills",
                str(home),
                "--pd",
                live.pd,
                "--status",
                status,
            )
            with running("serve", *sources, "--listen", "127.0.0.1:0", "--refresh", "1s", **state) as server:
                address = listening(server, "serve")
                check_live(address, live)
                assert end(writer, signal.SIGTERM)[0] == 143
                check_stored(address, root, logs)
                check_answers(address)
                code, out, err = end(server, signal.SIGINT)
                assert (code, json.loads(out)["code"]) == (130, 130)
                assert "Traceback" not in err


def overview(address: str) -> dict[str, Any]:
    """Overview of the server."""
    found: dict[str, Any] = json.loads(get(address, "/api/overview.json")[1])
    return found


def windows(address: str) -> list[tuple[int, int]]:
    """The windows of the last backup of the chain."""
    found = overview(address)["storages"][0]["backups"][-1]["windows"]
    return [(each["from_ts"], each["to_ts"]) for each in found]


def check_live(address: str, live: LiveCluster) -> None:
    """The sync, the safe points that PD lists, and a window that gets longer."""
    eventually(lambda: overview(address)["status_pages"][0]["syncs"][0]["name"] == "east", 120)
    listed = live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
    services = {each["service"] for each in overview(address)["gc"][0]["services"]}
    assert services == {each["service_id"] for each in listed} - {"gc_worker"}
    eventually(lambda: any(first < last for first, last in windows(address)), 120)


def check_stored(address: str, root: Path, logs: Path) -> None:
    """Backups and log are those of the commands, when nobody writes any more."""
    eventually(lambda: "does not answer" in overview(address)["status_pages"][0]["source"]["error"], 120)
    of_log = succeed("log", "status", "-s", str(logs), "--id", "east", "--output", "json").last
    eventually(lambda: overview(address)["archives"][0]["status"]["end_ts"] == of_log["end_ts"], 120)
    found = overview(address)
    figures = {name: value for name, value in found["archives"][0]["status"].items() if name != "rpo_seconds"}
    assert figures == {name: of_log[name] for name in figures}
    backups = {each["path"]: each for each in found["storages"][0]["backups"]}
    for line in succeed("list", "-s", str(root), "--output", "json").lines:
        same = {"id", "url", "backup_ts", "finished_ms", "total_kvs", "total_bytes", "backup_size", "parent"}
        assert {name: backups[line["path"]][name] for name in same} == {name: line[name] for name in same}
    assert [(name, each["depth"]) for name, each in backups.items()] == [("full", 0), ("more", 1)]
    shown = succeed("show", "-s", str(root / "more"), "--log", str(logs), "--log-id", "east", "--output", "json").last
    eventually(lambda: windows(address) == [(shown["window_start"], shown["window_end"])], 120)
    assert [each["id"] for each in found["drills"][0]["drills"]] == [passed(2).id]


def check_answers(address: str) -> None:
    """The page, its health, and what it refuses."""
    code, page = get(address, "/")
    assert code == 200
    assert all(said in page for said in ("increment", "with log east", "full", passed(2).id))
    assert get(address, "/", "DELETE")[0] == 405
    assert get(address, "/", Host="rebound.example")[0] == 403
    assert get(address, "/healthz")[1].startswith("degraded\ncannot read http://127.0.0.1")


@pytest.mark.core("serve")
def test_the_token(tmp_path: Path) -> None:
    """From the environment or a file; nobody gets anything without it, and no log has it."""
    Index(open_store(parse(str(tmp_path)))).add(entry("monday", 1.0))
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    ways: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
        (("--token-file", str(file)), {}),
        ((), {"TIKV_BR_SERVE_TOKEN": TOKEN}),
    )
    for options, more in ways:
        with running(
            "serve", "-s", str(tmp_path), "--listen", "0.0.0.0:0", "--log-level", "debug", *options, **more
        ) as server:
            address = f"127.0.0.1:{listening(server, 'serve').rpartition(':')[2]}"
            assert get(address, "/")[0] == get(address, "/api/overview.json", Authorization="Bearer another")[0] == 401
            code, body = get(address, "/api/overview.json", Authorization=f"Bearer {TOKEN}")
            assert (code, json.loads(body)["storages"][0]["backups"][0]["path"]) == (200, "monday")
            code, out, err = end(server, signal.SIGTERM)
            assert code == 143
            assert TOKEN not in out + err
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        taken = tikv_br("serve", "-s", str(tmp_path), "--listen", address, "--output", "json")
    assert taken.code == 2
    assert taken.last["message"].startswith(f"cannot listen on --listen {address}: ")


LATE_SIGNAL = """
import signal, sys, threading, time
from tikv_br.cli.main import run

def send():
    while not any(thread.name == "status" for thread in threading.enumerate()):
        time.sleep(0.05)
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=send, daemon=True).start()
sys.exit(run(["serve", "-s", sys.argv[1], "--listen", "127.0.0.1:0"]))
"""


def test_a_signal_that_does_not_interrupt_the_wait_ends_it(tmp_path: Path) -> None:
    """As one that comes just before the wait begins, which is handled only after it."""
    command = [sys.executable, "-c", LATE_SIGNAL, str(tmp_path)]
    assert (
        subprocess.run(command, check=False, env=environment(), cwd="/", timeout=100, capture_output=True).returncode
        == 143
    )
