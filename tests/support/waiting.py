"""Waiting for asynchronous events."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds that a busy machine may take for what a quiet one does in one."""


def eventually(condition: Callable[[], object], seconds: float = PATIENCE, every: float = 0.02) -> None:
    """Return as soon as ``condition`` holds; fail when it does not within ``seconds``. It is looked at ``every`` so many."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(every)
