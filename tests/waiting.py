"""Waiting for what happens by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 10.0, every: float = 0.02) -> None:
    """Return as soon as ``condition`` holds; fail when it does not within ``seconds``. It is looked at ``every`` so many."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(every)
