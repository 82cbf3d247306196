"""Ports for servers that take a number."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """So many ports of 127.0.0.1 that are given to nobody else for the length of the block.

    They are bound, and nobody listens: connections are refused, until a server listens there that lets itself be bound beside
    us (SO_REUSEADDR), as those in Go and Python do.
    """
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [holder.getsockname()[1] for holder in holders]
