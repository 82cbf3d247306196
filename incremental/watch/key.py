"""The key that the status server asks for, in a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from tikv_br.errors import StorageReadOnly, UsageError
from tikv_br.storage.disk_errors import Hints, disk_errors
from tikv_br.storage.secret import SecretText

_ELSEWHERE: Hints = {StorageReadOnly: "Name another file by --status-key-file, or say --no-status-key."}
KEY_BYTES = 32
FEWEST_CHARACTERS = 16
_MAKE_ONE = "Make one, for example by: openssl rand -hex 32"


def own_key(path: Path) -> SecretText:
    """The key in our own file, which is made where it is not there. Raises `UsageError` where others may read it."""
    with disk_errors(path, "written", _ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
    with disk_errors(path, "read"):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UsageError(f"others may read {path}, which holds a key", hint=f"Say: chmod 600 {path}")
    return read_key(path)


def read_key(path: Path) -> SecretText:
    """The key in a file, without the white space around it. Raises `StorageError`, `UsageError`."""
    if not path.exists():
        raise UsageError(f"there is no file {path} to read the status key from", hint=_MAKE_ONE)
    with disk_errors(path, "read"):
        raw = path.read_bytes().strip()
    if len(raw) < FEWEST_CHARACTERS or not all(0x21 <= each <= 0x7E for each in raw):
        raise UsageError(
            f"{path} holds no key: {FEWEST_CHARACTERS} or more printable ASCII characters are wanted",
            hint=_MAKE_ONE,
        )
    return SecretText(raw.decode("ascii"))


def _make(path: Path) -> None:
    """Of processes that make it at once one wins, and no one ever sees half a key."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
