"""Rows that are hard on codecs: lengths around groups of eight, runs of 00 and FF, values that look like metadata."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.live_cluster import LiveCluster
from tikv_br.progress_events import Event, StepFinished, StepStarted


def hard_rows(seed: int = 3, count: int = 3000) -> dict[bytes, bytes]:
    """Return rows with keys of many lengths; the same for the same seed."""
    chance = random.Random(seed)
    keys = {bytes([byte]) * length for byte in (0, 1, 0x7F, 0xFE, 0xFF) for length in (1, 7, 8, 9, 15, 16, 17, 200)}
    keys |= {b"prefix", b"prefix\0", b"prefix\0\0", "schlüssel-鍵".encode()}
    keys |= {b"row%05d" % number for number in range(count)}
    keys |= {chance.randbytes(chance.randrange(1, 40)) for _ in range(count)}
    tails = [b"", b"\0", b"\1", b"\2", b"\3", (1).to_bytes(8, "big") + b"\1", bytes(8)]
    rows = {key: chance.randbytes(chance.randrange(120)) + chance.choice(tails) for key in sorted(keys)}
    rows[b"row00007"] = b""
    rows[b"row00008"] = chance.randbytes(300_000)
    return rows


def load(live: LiveCluster, rows: dict[bytes, bytes], keyspace_id: int = 0, ttl: int = 0) -> None:
    """Put the rows."""
    live.raw(keyspace_id).batch_put(rows, ttl)


def when(event: type[StepStarted | StepFinished], step: str, act: Callable[[], object]) -> Callable[[Event], None]:
    """Return a reporter that acts when a step begins or ends: the moment between two steps, made exact."""

    def report(seen: Event) -> None:
        if isinstance(seen, event) and seen.name == step:
            act()

    return report
