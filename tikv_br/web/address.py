"""Address and key of the status server; only the owner may read the file with the key."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from tikv_br.errors import StorageReadOnly, UsageError
from tikv_br.formats.numbers import parse_decimal
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.local import Hints, storage_errors

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]+)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen at; port 0 = any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str = "--status-addr") -> Address:
        """Parse ``HOST:PORT``, ``[IPV6]:PORT``, or a port alone, which means loopback. Raises `UsageError`, which names `flag`."""
        host, _, digits = text.rpartition(":")
        if (port := parse_decimal(digits, 65535)) is None:
            raise UsageError(f"{flag} {text!r} is not an address", hint="Pass HOST:PORT, for example 127.0.0.1:8300.")
        return cls(host.removeprefix("[").removesuffix("]") or LOOPBACK, port)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can connect to it. Of names, only localhost is known to be local."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def reachable(self) -> Address:
        """The address to show to other machines: the host name if it listens on all addresses."""
        with suppress(ValueError):  # a host name
            if ip_address(self.host).is_unspecified:
                return Address(socket.gethostname(), self.port)
        return self

    def is_named_by(self, host: str) -> bool:
        """Whether a Host header names a server at this address: by an IP address, localhost, the name that it listens at, or this machine's.

        A site that rebinds its own name to this machine's address sends that name.
        """
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower().rstrip(".")
        with suppress(ValueError):
            return bool(ip_address(name))
        own = socket.gethostname().lower()
        return name in {"localhost", self.host.lower(), own, own.partition(".")[0], socket.getfqdn().lower()}

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_HINTS: Hints = {StorageReadOnly: "Pass another file with --status-key-file, or pass --no-status-key."}
KEY_BYTES = 32
MIN_KEY_CHARACTERS = 16
_CREATE_HINT = "Create one, for example: openssl rand -hex 32 >FILE"


def load_or_create_key(path: Path) -> SecretText:
    """The key in our own file, which is created if it does not exist. Raises `UsageError` if others may read it, or made it."""
    with storage_errors(path, "written", _HINTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create_key(path)
    with storage_errors(path, "read"):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in {os.getuid(), 0}:
            raise UsageError(
                f"the status key file {path} is no file of this user", hint="Pass another one with --status-key-file."
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(f"the status key file {path} is readable by other users", hint=f"Run: chmod 600 {path}")
    return read_key(path)


def read_key(path: Path) -> SecretText:
    """The key in a file, without the white space around it. Raises `StorageError`, `UsageError`."""
    if not path.exists():
        raise UsageError(f"the status key file {path} does not exist", hint=_CREATE_HINT)
    with storage_errors(path, "read"):
        raw = path.read_bytes().strip()
    if len(raw) < MIN_KEY_CHARACTERS or not all(0x21 <= each <= 0x7E for each in raw):
        raise UsageError(
            f"{path} does not contain a valid status key: a key has at least {MIN_KEY_CHARACTERS} printable ASCII characters",
            hint=_CREATE_HINT,
        )
    return SecretText(raw.decode("ascii"))


def _create_key(path: Path) -> None:
    """Write a new key atomically: of several processes one wins, and no partial key is ever read."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
