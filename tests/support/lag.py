"""Lag of a sync as its user sees it: from before a put is sent until a read of the target finds it."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tests.support.background import Background
from tests.support.live_cluster import LiveCluster
from tikv_br.cluster.rawkv import RawClient

VALUE_BYTES = 100
POLL_SECONDS = 0.02
"""Between two reads of the target: lags are that much too long at most."""


class Load(Background):
    """Puts rows at a steady rate, as far as the cluster takes them."""

    def __init__(self, raw: RawClient, rate: float, *, batch: int = 10, writers: int = 4, keys: int = 100_000) -> None:
        """`rate` is in rows a second of all writers; each of their requests has `batch` rows of one region or two."""
        super().__init__()
        self.rate = rate
        self._raw, self._batch, self._writers, self._keys = raw, batch, writers, keys
        self._counts = [0] * writers
        for writer in range(writers):
            self._spawn(self._write, writer)

    @property
    def written(self) -> int:
        """Rows that the cluster has confirmed."""
        return sum(self._counts)

    def _write(self, writer: int) -> None:
        chance = np.random.default_rng(writer)
        value = chance.bytes(VALUE_BYTES)
        due = time.monotonic()
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            first = int(chance.integers(self._keys - self._batch + 1))
            self._raw.batch_put({_spread(first + at, self._keys): value for at in range(self._batch)})
            self._counts[writer] += self._batch
            due = max(due + self._writers * self._batch / self.rate, time.monotonic() - 1.0)


class Target(Protocol):
    """Target that a probe reads its puts from."""

    def batch_get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those of the keys that exist."""


class Probe(Background):
    """Overwrites some keys with rising numbers, and looks for them at the target."""

    def __init__(self, source: RawClient, target: Target, *, keys: int = 8, every: float = 0.05) -> None:
        """`every` is in seconds; the keys lie apart, so that they are in different regions."""
        super().__init__()
        self._source, self._target, self._every = source, target, every
        self._keys = [_spread(at, keys) + b"-probe" for at in range(keys)]
        self._sent: dict[bytes, deque[tuple[int, float]]] = {key: deque() for key in self._keys}
        self._seen: list[tuple[float, float]] = []
        self._spawn(self._put)
        self._spawn(self._look)

    def lags(self, since: float = 0.0, until: float = math.inf) -> list[float]:
        """Seconds from put to visible, of what was put between two monotonic times; what is not seen yet counts as of now."""
        now = time.monotonic()
        waiting = [(at, now) for sent in self._sent.values() for _, at in list(sent)]
        return [seen - at for at, seen in [*self._seen, *waiting] if since <= at < until]

    @property
    def seen(self) -> int:
        """Number of puts seen at the target."""
        return len(self._seen)

    @property
    def oldest(self) -> float:
        """When (monotonic) the oldest put was sent that has not been seen at the target; now if there is none."""
        now = time.monotonic()
        waiting = [list(sent) for sent in self._sent.values()]  # as another thread takes from them
        return min((sent[0][1] for sent in waiting if sent), default=now)

    @property
    def behind(self) -> float:
        """For how long that put has waited, in seconds."""
        return time.monotonic() - self.oldest

    def _put(self) -> None:
        first = time.time_ns()  # above what a probe before this one has left
        for number, key in enumerate(itertools.cycle(self._keys), first):
            if self._enough.wait(self._every):
                return
            self._sent[key].append((number, time.monotonic()))
            self._source.put(key, b"%d" % number)

    def _look(self) -> None:
        while not self._enough.wait(POLL_SECONDS):
            found = self._target.batch_get(self._keys)
            now = time.monotonic()
            for key, value in found.items():
                sent = self._sent[key]
                while sent and sent[0][0] <= int(value):
                    self._seen.append((sent.popleft()[1], now))


def put_many(raw: RawClient, rows: int) -> None:
    """Put as many distinct rows, in batches of a hundred neighbours, all over the keyspace."""
    value = np.random.default_rng(rows).bytes(VALUE_BYTES)
    for first in range(0, rows, 100):
        raw.batch_put({_spread(at, rows): value for at in range(first, min(first + 100, rows))})


def spread_leaders(live: LiveCluster) -> None:
    """Let each store lead as many regions as any other; neighbours are led by different ones."""
    for region, store_id in zip(live.regions(), itertools.cycle(live.store_ids)):
        if region["leader_store"] != store_id:
            live.transfer_leader(region_id=region["id"], store_id=store_id)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of lags, in seconds."""

    count: int
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, lags: Sequence[float]) -> Distribution:
        """Compute the distribution of at least one lag."""
        p50, p90, p99, most = np.percentile(lags, [50, 90, 99, 100]).tolist()
        return cls(len(lags), p50, p90, p99, most)

    def __str__(self) -> str:
        return (
            f"p50 {self.p50:.2f} s, p90 {self.p90:.2f} s, p99 {self.p99:.2f} s, max {self.most:.2f} s of {self.count}"
        )


def _spread(number: int, count: int) -> bytes:
    """A key of eight bytes; of `count` keys, each region of a playground that is split by first byte has its share."""
    return (number * (1 << 64) // count).to_bytes(8, "big")
