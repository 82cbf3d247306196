"""Memory of tasks: what is freed stays with the process, for the next page needs as much."""

from __future__ import annotations

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_KEPT = 32 << 20
"""Bytes of one allocation; the most that glibc takes. Pages of a scan have 4 MiB."""
_MOST_KEPT = 256 << 20
"""Bytes that may lie free at the end of the heap."""


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc reuse what tasks free instead of giving it back; False where the C library knows no such thing.

    A task allocates and frees the same few MiB for every page. Given back to the kernel each time, they cost a page
    fault for every 4 KiB: a quarter of all processor time of a scan. The process's peak is what it was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT))
