"""Commands as a user runs them, by the clock and by the processor.

As where pip has installed it, Python finds every module compiled, whatever the environment says of writing such files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.e2e.command import PROGRAM, environment
from tests.support.background import Background
from tests.support.tools import CACHE

TOO_LONG = 1800
TIKV_BR = str(PROGRAM)
_MODULES = "tikv_br.cli.main, tikv_br.cli.backup_cmd, tikv_br.cli.restore_cmd, tikv_br.backup.run, tikv_br.restore.run"


class Took(NamedTuple):
    """Resources that a command has used."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of processor time."""
    peak_mib: float
    """The most memory that its process has held."""


def timed(
    *arguments: str, tree: str = "", program: str = TIKV_BR, on_line: Callable[[bytes], None] = lambda _line: None
) -> Took:
    """Run a command, which must succeed, from its start to its end; with ``tree``, that of another work tree.

    ``on_line`` gets each line of its output as it comes.
    """
    variables = environment(**_compiled(), **({"PYTHONPATH": tree} if tree else {}))
    before, began = _children_cpu(), time.perf_counter()
    with subprocess.Popen(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd="/",
    ) as process:
        alarm = threading.Timer(TOO_LONG, process.kill)
        alarm.start()
        said: deque[bytes] = deque(maxlen=50)
        try:
            with MemoryWatch(process.pid) as memory:
                for line in process.stdout or ():
                    said.append(line)
                    on_line(line)
                process.wait()
        finally:
            alarm.cancel()
            process.kill()
    if process.returncode:
        raise SystemExit(f"{[program, *arguments]}: exit code {process.returncode}\n{b''.join(said).decode()}")
    return Took(time.perf_counter() - began, _children_cpu() - before, memory.peak_mib)


class MemoryWatch(Background):
    """Watches the most memory that a process has held, as the kernel counts it, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.peak_mib = 0.0
        """Memory of this program alone: before it starts, the process has the memory of its parent."""
        super().__init__([(self._look, 0.02)])

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            if found := re.search(r"^VmHWM:\s*(\d+) kB", self._status.read_text(), re.MULTILINE):
                self.peak_mib = int(found[1]) / 1024


def _children_cpu() -> float:
    """CPU time of all ended children: that of running servers does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@functools.cache
def _compiled() -> dict[str, str]:
    """Variables by which Python finds compiled modules, kept from one bench to the next."""
    more = {"PYTHONPYCACHEPREFIX": str(CACHE.parent / "bench-modules"), "PYTHONDONTWRITEBYTECODE": ""}
    script = f"import {_MODULES}; tikv_br.cli.main.run(['version'])"
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, env={**os.environ, **more}, timeout=300, stdout=subprocess.DEVNULL)
    return more
