"""The most memory that this process has held, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_mib() -> float:
    """Return the peak of this program alone: ``ru_maxrss`` also counts what the process was before it became this program."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
