"""Commands as a user runs them, by the clock and by the processor.

As where pip has installed it, Python finds every module compiled, whatever the environment says of writing such files.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import time

from tests.e2e.command import succeed
from tests.tools import CACHE

TOO_LONG = 1800
_MODULES = "tikv_br.cli.main, tikv_br.cli.backup_cmd, tikv_br.cli.restore_cmd, tikv_br.backup.run, tikv_br.restore.run"


def timed(*arguments: str) -> tuple[float, float]:
    """Seconds of wall and of processor time of a command that must succeed, from its start to its end."""
    environment = _compiled()
    before, began = _children_cpu(), time.perf_counter()
    succeed(*arguments, timeout=TOO_LONG, **environment)
    return time.perf_counter() - began, _children_cpu() - before


def _children_cpu() -> float:
    """Of all ended children: those of servers, which go on, do not count."""
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
