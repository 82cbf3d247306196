"""Ports that stay ours while nothing of ours listens there: those of a store that is down, or of an etcd that is about to start."""

from __future__ import annotations

import socket
from typing import Final

from tikv_br.errors import PlaygroundError

_LOOPBACK: Final = "127.0.0.1"


class HeldPort:
    """Held by a socket that is bound and does not listen: the port refuses connections, and the kernel gives it to nobody else.

    Servers that set SO_REUSEADDR, as all of ours do, may listen there all the same.
    """

    def __init__(self, port: int = 0) -> None:
        """Port 0 means any. Raises `PlaygroundError` when it is taken."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((_LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise PlaygroundError(f"cannot listen on {_LOOPBACK}:{port}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """Its ``host:port``."""
        return f"{_LOOPBACK}:{self.port}"

    def close(self) -> None:
        """Give it up."""
        self._socket.close()
