"""The machine of the figures, and its other load."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and Python."""
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "processor": model.partition(":")[2].strip() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory) // 1024,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


class Load:
    """Load of the machine between two moments, from the kernel's counters."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _ticks()
        self._load_before = os.getloadavg()

    def until_now(self) -> dict[str, Any]:
        """Load averages of both moments, and shares of all processor time: busy, and stolen by other machines."""
        ticks = [now - before for now, before in zip(_ticks(), self._before, strict=True)]
        total = max(sum(ticks), 1)
        idle, stolen = ticks[3] + ticks[4], ticks[7]
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            "load_before": list(self._load_before),
            "load_after": list(os.getloadavg()),
            "busy_share": round(1 - idle / total, 3),
            "stolen_share": round(stolen / total, 3),
        }


def _ticks() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq and steal, of all processors."""
    return [int(number) for number in _lines("/proc/stat")[0].split()[1:9]]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
