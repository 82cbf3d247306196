"""Ports for servers that take a number."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """So many ports of 127.0.0.1 that are given to nobody else for the length of the block.

    They are bound, and nobody listens: connections are refused, until a server listens there that lets itself be bound beside
    us (SO_REUSEADDR), as those in Go and Python do.
    """
    with contextlib.ExitStack() as stack:
        yield [_port_of(stack.enter_context(_bound())) for _ in range(count)]


def reserve_port(owner: object) -> int:
    """One such port, for as long as there is this object: also when the server has ended whose port it was."""
    holder = _bound()
    port = _port_of(holder)
    weakref.finalize(owner, os.close, holder.detach())
    return port


def accepts(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _bound() -> socket.socket:
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _port_of(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port
