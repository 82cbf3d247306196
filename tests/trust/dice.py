"""Chance by seed, shared by threads, with a count of what it brought about."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence


class Dice:
    """Throws that repeat with the seed; which thread gets which throw is the machine's."""

    def __init__(self, seed: object) -> None:
        self.thrown = 0
        """Number of throws."""
        self.struck: Counter[str] = Counter()
        """Number of hits, by kind."""
        self._chance = random.Random(str(seed))
        self._lock = threading.Lock()
        self._loaded = True

    def throw(self, rate: float, kinds: Sequence[str]) -> str:
        """One of ``kinds`` at ``rate`` (0 to 1), else ``""``."""
        with self._lock:
            if not self._loaded:
                return ""
            self.thrown += 1
            if self._chance.random() >= rate:
                return ""
            kind = self._chance.choice(kinds)
            self.struck[kind] += 1
            return kind

    def below(self, bound: int) -> int:
        """A number from 0 on."""
        with self._lock:
            return self._chance.randrange(bound)

    def rest(self) -> None:
        """Bring about nothing any more."""
        with self._lock:
            self._loaded = False
