"""Secrets that were given on the command line: gone from what `ps` shows, a moment after the start."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Places in /proc/self/stat, counted from the field behind the program's name (proc(5): fields 48 and 49)."""


def hide_arguments(secrets: Iterable[str]) -> None:
    """Overwrite ``secrets`` with stars in the memory that the kernel shows as the command line; ``sys.argv`` stays.

    Where there is no such memory (other systems than Linux), nothing is done.
    """
    wanted = {secret.encode() for secret in secrets}
    if not wanted:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        shown = Path("/proc/self/cmdline").read_bytes()
        if not start or len(shown) != end - start or ctypes.string_at(start, len(shown)) != shown:
            return
        for secret in wanted:
            place = shown.find(secret)
            while place >= 0:
                ctypes.memset(start + place, ord("*"), len(secret))
                place = shown.find(secret, place + len(secret))
