"""The process that holds a lease."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_START_FIELD = 19
"""Field of /proc/PID/stat, counted after the name: start of the process, in ticks since boot."""


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """A process on a machine."""

    host: str
    machine: str
    """Boot and process namespace, in which a pid means something; ``""`` = not known."""
    pid: int
    started: int
    """Start of the process, to distinguish processes with the same pid; 0 = unknown."""

    @classmethod
    def this_process(cls) -> LeaseOwner:
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Return whether the process has certainly ended: only the machine that it ran on can know."""
        if not self.machine or self.machine != _machine():
            return False
        started = _started(self.pid)
        return started == 0 if not self.started else started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@functools.cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> int:
    """0 = there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in {"Z", "X"} else int(fields[_START_FIELD])
