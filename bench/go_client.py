"""client-go's scan loop, in a Go program of its own that does nothing with the rows."""

from __future__ import annotations

import contextlib
import sys

from bench.harness import Work
from tests.interop.line_client import LineClient
from tests.support.tools import CACHE

PAGE_ROWS = 10_240
"""The most that client-go lets a scan return."""


def scan_loop(address: str, stack: contextlib.ExitStack) -> Work | None:
    """A run of the loop over all rows, in the program's own seconds of processor time; None where it is not built."""
    program = CACHE / "client_go"
    if not program.exists():
        sys.stderr.write("left out: client-go, for scripts/install_client_go.sh has not built it\n")
        return None
    client = stack.enter_context(LineClient([str(program), address, "v1"]))
    return lambda: client.scan_loop(PAGE_ROWS).cpu_seconds
