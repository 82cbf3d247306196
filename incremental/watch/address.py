"""Where the status server listens."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from tikv_br.errors import UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0 = any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT``, ``[IPV6]:PORT``, or a port alone, which means loopback. Raises `UsageError`."""
        host, _, port = text.rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"--status-addr {text}: write HOST:PORT, such as 127.0.0.1:8300")
        return cls(host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port))

    @property
    def reachable(self) -> Address:
        """What others may call it: all addresses of a machine go by its name."""
        with suppress(ValueError):  # a name
            if ip_address(self.host).is_unspecified:
                return Address(socket.gethostname(), self.port)
        return self

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
