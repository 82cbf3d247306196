"""Starts, stops and finds playgrounds. Light to import: the servers run in a process of their own."""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tikv_br.errors import PlaygroundError
from tikv_br.playground.etcd import find_etcd
from tikv_br.playground.home import Home, registered
from tikv_br.playground.settings import SETTINGS_FILE, Settings, TlsSettings

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_FIXED: Final[Mapping[str, Callable[[Settings], object]]] = {
    "--api-version": lambda settings: settings.version.label,
    "--stores": lambda settings: settings.stores,
    "--replicas": lambda settings: settings.voters,
    "cluster id": lambda settings: settings.cluster_id,
}
"""What cannot be changed once a playground has data."""


_children: list[subprocess.Popen[bytes]] = []
"""Kept here, because a Popen that is thrown away complains of a process that outlives it, as these shall."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A playground that answers: its process and what it says of itself."""

    process: subprocess.Popen[bytes]
    state: dict[str, Any]


def prepare(directory: Path, changes: Mapping[str, Any]) -> Home:
    """Write down the settings of a playground to start: the kept ones, then ``changes`` (fields of `Settings`).

    Raises `PlaygroundError` when a playground runs there, or holds data of another kind.
    """
    home = Home(directory)
    with home.locked():
        path = home.directory / SETTINGS_FILE
        kept = Settings.from_json(path.read_text()) if path.exists() else None
        settings = dataclasses.replace(kept or Settings(str(home.directory)), **changes, directory=str(home.directory))
        if kept is not None:
            _check_unchanged(home, kept, settings)
        path.write_text(settings.to_json())
        home.clear_state()
    return home


def _check_unchanged(home: Home, kept: Settings, asked: Settings) -> None:
    for name, value in _FIXED.items():
        if value(kept) != value(asked):
            raise PlaygroundError(
                f"the playground in {home.directory} was made with {name} {value(kept)}, not {value(asked)}",
                hint="Use another --dir, or leave the flag out.",
            )


def start(directory: Path, changes: Mapping[str, Any], *, detached: bool = True) -> Started:
    """Start a playground; returns once PD and every store answer. Detached, it outlives us and our terminal.

    Raises `PlaygroundError`, with the last line of the log, when it does not come up.
    """
    if importlib.util.find_spec("rocksdict") is None:
        raise PlaygroundError(
            "the playground needs the package rocksdict, which is not installed",
            hint="Install tikv-br with its extra: tikv-br[playground]",
        )
    if changes.get("etcd"):
        find_etcd()
    home = prepare(directory, changes)
    with home.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tikv_br.playground.server", str(home.directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=detached,
        )
    _children[:] = [child for child in _children if child.poll() is None] + [process]
    try:
        return Started(process, _await_answers(home, process))
    except BaseException:  # also when we are told to end meanwhile: leave nothing half started
        process.terminate()
        raise


def _await_answers(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PlaygroundError(f"the playground in {home.directory} did not start: {_last_line(home)}")
        state = home.state()
        if state is not None and answers(state, _tls(home)):
            return state
        time.sleep(_POLL_SECONDS)
    raise PlaygroundError(f"the playground in {home.directory} did not answer within {START_SECONDS:.0f} s")


def stop(directory: Path) -> bool:
    """End the playground of a folder and wait until it is gone; False when none ran.

    Raises `PlaygroundError` when the process that is written down is not ours, or does not end.
    """
    home = Home(directory)
    if not home.is_running():
        home.unregister()
        return False
    pid = (home.state() or {}).get("pid")
    if pid is None or not _is_ours(pid, home):
        raise PlaygroundError(f"{home.directory} is in use, but not by a playground that is known here (pid {pid})")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while home.is_running():
        if time.monotonic() > deadline:
            raise PlaygroundError(f"process {pid} does not end", hint=f"See {home.log}; kill -9 {pid} loses no data.")
        time.sleep(_POLL_SECONDS)
    for child in _children:
        if child.pid == pid:
            child.wait(STOP_SECONDS)
    return True


def status(directory: Path) -> dict[str, Any]:
    """``running`` and ``answers`` with the state of a folder's playground."""
    home = Home(directory)
    running = home.is_running()
    state = home.state() or {}
    return {
        **state,
        "dir": str(home.directory),
        "running": running,
        "answers": running and bool(state) and answers(state, _tls(home)),
    }


def running() -> list[dict[str, Any]]:
    """The status of every running playground of this user."""
    return [found for home in registered() if (found := status(home.directory))["running"]]


def answers(state: Mapping[str, Any], tls: TlsSettings | None) -> bool:
    """Whether PD and every store of a state answer."""
    try:
        return (
            _get(state["pd"], "/pd/api/v1/health", tls) == http.client.OK
            and all(_get(store["status_address"], "/status", tls) == http.client.OK for store in state["stores"])
            and all(_accepts(store["address"]) for store in state["stores"])
        )
    except (OSError, http.client.HTTPException):
        return False


def _get(address: str, path: str, tls: TlsSettings | None) -> int:
    """The HTTP status of a GET."""
    if tls is None:
        connection = http.client.HTTPConnection(address, timeout=5)
    else:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(address, timeout=5, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        return True


def _tls(home: Home) -> TlsSettings | None:
    return Settings.from_json((home.directory / SETTINGS_FILE).read_text()).tls


def _is_ours(pid: int, home: Home) -> bool:
    """Whether a process is the server of that folder, and not another that got its id later."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False
    return b"tikv_br.playground.server" in command and os.fsencode(home.directory) in command


def _last_line(home: Home) -> str:
    lines = home.log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {home.log}"
