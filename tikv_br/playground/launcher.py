"""Starts, stops and finds playgrounds. Light to import: the servers run in a process of their own."""

from __future__ import annotations

import dataclasses
import http.client
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tikv_br.environment import is_installed, missing_package
from tikv_br.errors import PlaygroundError, Stopped
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.home import Home, open_own, registered_homes, write_atomically
from tikv_br.playground.settings import SETTINGS_FILE, Settings, TlsSettings

_SERVER: Final = "tikv_br.playground.cluster"


START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_FIXED: Final[Mapping[str, Callable[[Settings], object]]] = {
    "--api-version": lambda settings: settings.version.label,
    "--stores": lambda settings: settings.stores,
    "--replicas": lambda settings: settings.voters,
    "cluster id": lambda settings: settings.cluster_id,
}
"""Settings that cannot be changed once a playground has data."""


_children: list[subprocess.Popen[bytes]] = []
"""References to the processes, because a garbage-collected Popen warns about a process that is still running."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartedPlayground:
    """A playground that answers: its process and its published state."""

    process: subprocess.Popen[bytes]
    state: dict[str, Any]

    def wait(self) -> None:
        """Wait until it ends; stop it on a signal. Raises `PlaygroundError` if it fails."""
        try:
            while (code := self.process.poll()) is None:
                time.sleep(_POLL_SECONDS)  # a signal that comes just before a wait is handled only after it
        except Stopped:
            stop(Path(self.state["dir"]))
            self.process.wait()
            return
        if code != 0:
            raise PlaygroundError(f"the playground in {self.state['dir']} failed with exit code {code}")


def prepare(directory: Path, changes: Mapping[str, Any]) -> Home:
    """Save the settings of a playground to start: the saved ones, updated with ``changes`` (fields of `Settings`).

    Raises `PlaygroundError` if a playground is running there, or has data that do not fit the settings.
    """
    home = Home(directory)
    with home.locked():
        path = home.directory / SETTINGS_FILE
        saved = Settings.from_json(path.read_text()) if path.exists() else None
        settings = dataclasses.replace(
            saved or Settings(str(home.directory)), **{**changes, "directory": str(home.directory)}
        )
        if saved is not None:
            for name, value in _FIXED.items():
                if value(saved) != value(settings):
                    raise PlaygroundError(
                        f"the playground in {home.directory} was created with {name} {value(saved)}, not {value(settings)}",
                        hint="Pass another --dir, or omit the option.",
                    )
        write_atomically(path, settings.to_json())
        home.clear_state()
    return home


def start(directory: Path, changes: Mapping[str, Any], *, detached: bool = True) -> StartedPlayground:
    """Start a playground; returns once PD and every store answer. Detached, it outlives this process and its terminal.

    Raises `PlaygroundError` with the last line of its log if it does not start.
    """
    if not is_installed("rocksdict"):
        raise missing_package("rocksdict", "the playground requires")
    if changes.get("etcd"):
        find_etcd()
    home = prepare(directory, changes)
    with os.fdopen(open_own(home.log), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, str(home.directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=detached,
        )
    _children[:] = [child for child in _children if child.poll() is None] + [process]
    try:
        return StartedPlayground(process, _await_answers(home, process))
    except BaseException:  # including signals: leave no half-started process
        process.terminate()
        raise


def find_etcd() -> str:
    """The program: ``ETCD_BINARY``, or the first on PATH. Raises `PlaygroundError` if there is none."""
    found = shutil.which(os.environ.get("ETCD_BINARY") or "etcd")
    if found is None:
        raise PlaygroundError(
            "there is no program etcd on PATH",
            hint="Install it (Debian, Ubuntu: apt-get install etcd-server), or set ETCD_BINARY to its path.",
        )
    return found


def start_detached(directory: Path, api_version: ApiVersion, stores: int) -> str:
    """Start a playground that outlives this process; returns its PD address. Raises `PlaygroundError`."""
    return str(start(directory, {"api_version": api_version.value, "stores": stores}).state["pd"])


def _await_answers(home: Home, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PlaygroundError(f"the playground in {home.directory} did not start: {last_line(home.log)}")
        state = home.state()
        if state is not None and answers(state, _tls(home)):
            return state
        time.sleep(_POLL_SECONDS)
    raise PlaygroundError(f"the playground in {home.directory} did not answer within {START_SECONDS:.0f} s")


def stop(directory: Path) -> bool:
    """Stop the playground in a directory and wait for its end; False if none was running.

    Raises `PlaygroundError` if the recorded process is not a playground, or does not end.
    """
    home = Home(directory)
    if not home.is_running():
        home.unregister()
        return False
    pid = (home.state() or {}).get("pid")
    if not isinstance(pid, int) or not _is_ours(pid, home):
        raise PlaygroundError(
            f"cannot stop the playground in {home.directory}: its lock is held, but process {pid} is not its server",
            hint="Stop the process that holds the lock.",
        )
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while home.is_running():
        if time.monotonic() > deadline:
            raise PlaygroundError(
                f"the playground in {home.directory} (process {pid}) did not stop within {STOP_SECONDS:.0f} s",
                hint=f"See {home.log}; kill -9 {pid} loses no data.",
            )
        time.sleep(_POLL_SECONDS)
    for child in _children:
        if child.pid == pid:
            child.wait(STOP_SECONDS)
    return True


def status(directory: Path) -> dict[str, Any]:
    """The state of the playground in a directory, with ``running`` and ``answers``."""
    home = Home(directory)
    running = home.is_running()
    state = home.state() or {}
    return {
        **state,
        "dir": str(home.directory),
        "running": running,
        "answers": running and bool(state) and answers(state, _tls(home)),
    }


def running_playgrounds() -> list[dict[str, Any]]:
    """The status of every running playground of this user."""
    return [found for home in registered_homes() if (found := status(home.directory))["running"]]


def answers(state: Mapping[str, Any], tls: TlsSettings | None) -> bool:
    """Return whether PD and every store of a state answer."""
    return (
        http_ok(state["pd"], "/pd/api/v1/health", tls)
        and all(http_ok(store["status_address"], "/status", tls) for store in state["stores"])
        and all(_accepts(store["address"]) for store in state["stores"])
    )


def http_ok(address: str, path: str, tls: TlsSettings | None) -> bool:
    """Return whether a GET is answered with status 200."""
    if tls is None:
        connection = http.client.HTTPConnection(address, timeout=5)
    else:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(address, timeout=5, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _tls(home: Home) -> TlsSettings | None:
    return Settings.from_json((home.directory / SETTINGS_FILE).read_text()).tls


def _is_ours(pid: int, home: Home) -> bool:
    """Return whether a process is the server of that directory, not a later process with the same id."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False
    return _SERVER.encode() in command and os.fsencode(home.directory) in command


def last_line(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log}"
