"""A playground's folder: its settings, who runs it, and the list of all playgrounds of this user.

Light to import: the command line asks it before it starts anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from tikv_br.errors import PlaygroundError

STATE_FILE: Final = "state.json"
LOG_FILE: Final = "playground.log"
_LOCK_FILE: Final = "lock"


class Home:
    """The folder of one playground. A running server holds the folder's lock; the kernel lets go of it when it ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self.log = self.directory / LOG_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock. Raises `PlaygroundError` when another process does, or the folder cannot be used."""
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = (self.state() or {}).get("pid", "unknown")
                raise PlaygroundError(
                    f"a playground runs in {self.directory} already (process {pid})",
                    hint=f"Stop it first: tikv-br playground stop --dir {self.directory}",
                ) from None
            yield

    def _lock_file(self) -> TextIO:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # data of others may be tried out in there
            return (self.directory / _LOCK_FILE).open("w")
        except OSError as error:
            raise PlaygroundError(f"cannot use the folder {self.directory}: {error.strerror}") from error

    def is_running(self) -> bool:
        """Whether a server holds the folder's lock."""
        if not (self.directory / _LOCK_FILE).exists():
            return False
        try:
            with self.locked():
                return False
        except PlaygroundError:
            return True

    def state(self) -> dict[str, Any] | None:
        """What the server wrote when it was ready, None before. It stays after the server's end. Raises `PlaygroundError`."""
        path = self.directory / STATE_FILE
        try:
            state = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise PlaygroundError(
                f"{path} cannot be read: {error}", hint="Stop the playground's process, and remove the folder."
            ) from None
        if not isinstance(state, dict):
            raise PlaygroundError(f"{path} is not what a playground writes", hint="Remove the folder.")
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        """Say that the server is ready, and where."""
        _write_atomically(self.directory / STATE_FILE, json.dumps(state, indent=2))

    def clear_state(self) -> None:
        """Forget an earlier server's words."""
        (self.directory / STATE_FILE).unlink(missing_ok=True)

    def register(self) -> None:
        """Enter the folder into the list of this user's playgrounds."""
        _registry().mkdir(parents=True, exist_ok=True)
        _write_atomically(self._entry(), json.dumps({"dir": str(self.directory)}))

    def unregister(self) -> None:
        """Take the folder off the list; no error when it is not on it."""
        self._entry().unlink(missing_ok=True)

    def _entry(self) -> Path:
        return _registry() / f"{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]}.json"


def registered() -> list[Home]:
    """All playgrounds on the list whose folder is still there; entries of others are removed."""
    homes = []
    for entry in sorted(_registry().glob("*.json")):
        try:
            home = Home(Path(json.loads(entry.read_text())["dir"]))
        except (ValueError, KeyError, TypeError):  # names nothing
            entry.unlink(missing_ok=True)
            continue
        if home.directory.is_dir():
            homes.append(home)
        else:
            home.unregister()
    return homes


def _registry() -> Path:
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser() / "tikv-br" / "playgrounds"


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
