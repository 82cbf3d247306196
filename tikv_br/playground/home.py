"""The directory of a playground: its lock, its published state, and the list of a user's playgrounds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from tikv_br.environment import STATE, user_folder
from tikv_br.errors import PlaygroundError

STATE_FILE: Final = "state.json"
LOG_FILE: Final = "playground.log"
_LOCK_FILE: Final = "lock"
_log = logging.getLogger(__name__)


class Home:
    """The directory of one playground. A running server holds its lock, which the kernel releases when the process ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self.log = self.directory / LOG_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Raises `PlaygroundError` if another process holds it, or the directory cannot be used."""
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = (self.state() or {}).get("pid", "unknown")
                raise PlaygroundError(
                    f"a playground is already running in {self.directory} (process {pid})",
                    hint=f"Stop it first: tikv-br playground stop --dir {self.directory}",
                ) from None
            yield

    def _lock_file(self) -> TextIO:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: it may contain copies of real data
            # A link in the place of the lock is not followed, and nothing is truncated: the directory may be anybody's.
            return os.fdopen(open_own(self.directory / _LOCK_FILE), "w")
        except OSError as error:
            raise PlaygroundError(f"cannot use the directory {self.directory}: {error.strerror}") from error

    def is_running(self) -> bool:
        if not (self.directory / _LOCK_FILE).exists():
            return False
        try:
            with self.locked():
                return False
        except PlaygroundError:
            return True

    def state(self) -> dict[str, Any] | None:
        """The state that the server wrote when it was ready; None before. It remains after the server's end.

        Raises `PlaygroundError`.
        """
        path = self.directory / STATE_FILE
        try:
            state = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise PlaygroundError(
                f"cannot read {path}: {error}", hint="Stop the playground's process, and remove the directory."
            ) from None
        if not isinstance(state, dict):
            raise PlaygroundError(f"{path} was not written by a playground", hint="Remove the directory.")
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        write_atomically(self.directory / STATE_FILE, json.dumps(state, indent=2))

    def clear_state(self) -> None:
        (self.directory / STATE_FILE).unlink(missing_ok=True)

    def register(self) -> None:
        """Put the playground on the user's list. Without a state directory to write to it is not listed."""
        entry = self._entry()
        try:
            if entry is not None:
                entry.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(entry, json.dumps({"dir": str(self.directory)}))
        except OSError as error:
            _log.warning("`playground list` will not show this playground: %s", error)

    def unregister(self) -> None:
        """Take the playground off the list."""
        entry = self._entry()
        with contextlib.suppress(OSError):
            if entry is not None:
                entry.unlink(missing_ok=True)

    def _entry(self) -> Path | None:
        folder = _registry()
        return folder and folder / f"{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]}.json"


def registered_homes() -> list[Home]:
    """All playgrounds on the list whose directory still exists; other entries are removed."""
    homes = []
    folder = _registry()
    for entry in sorted(folder.glob("*.json")) if folder else ():
        try:
            home = Home(Path(json.loads(entry.read_text())["dir"]))
        except (ValueError, KeyError, TypeError):  # a damaged entry
            entry.unlink(missing_ok=True)
            continue
        if home.directory.is_dir():
            homes.append(home)
        else:
            home.unregister()
    return homes


def _registry() -> Path | None:
    folder = user_folder(STATE)
    return folder and folder / "playgrounds"


def open_own(path: Path) -> int:
    """Open a file of a playground to append, and create it if need be. Raises `OSError` for a symbolic link and what is no file."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return descriptor


def write_atomically(path: Path, text: str) -> None:
    """Write a file that replaces what is there, also a symbolic link."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as fresh:
        fresh.write(text)
    Path(fresh.name).replace(path)
