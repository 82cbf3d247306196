"""Whether a store is in import mode: entered by SwitchMode, left by it or by itself after a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

TIMEOUT: Final = 600.0
"""Seconds after the last SwitchMode(Import) at which a store returns to Normal (`import.import-mode-timeout`)."""


class ImportMode:
    """The mode of one store. Thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0

    def switch(self, *, importing: bool) -> None:
        """Enter import mode (or stay in it for another ten minutes), or leave it."""
        with self._lock:
            self._until = self._clock() + TIMEOUT if importing else 0.0

    def expire(self) -> None:
        """Let the time run out now."""
        self.switch(importing=False)

    @property
    def importing(self) -> bool:
        """Whether import mode is on."""
        with self._lock:
            return self._clock() < self._until
