"""Clients that write to a source while it is followed."""

from __future__ import annotations

import random

from tests.support.background import Background
from tests.support.live_cluster import LiveCluster

KEYS = 200


class Writer(Background):
    """Puts, overwrites, deletes and writes batches without pause; no key gets the same value twice."""

    def __init__(self, live: LiveCluster, seed: int, pause: float = 0.005) -> None:
        """Each seed has keys of its own; `pause` is in seconds, between two requests."""
        super().__init__([(self._write, pause)])
        self._live = live
        self._chance = random.Random(seed)
        self._prefix = b"%d" % seed
        self._requests = 0

    def _write(self) -> None:
        self._requests += 1
        raw = self._live.raw()
        key = self._prefix + b"%03d" % self._chance.randrange(KEYS)
        match self._chance.randrange(4):
            case 0:
                raw.delete(key)
            case 1:
                raw.batch_put({key + b"-%d" % at: b"%d" % self._requests for at in range(20)})
            case _:
                raw.put(key, b"%d" % self._requests, ttl=self._chance.choice([0, 0, 5000]))
