"""A second look at keys that seem to differ: they may have been written, or may have expired, between two reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tikv_br.diff.values import KeyDifference, Kind
from tikv_br.proof.prover import CLOCK_SECONDS

SETTLED_KEYS = 512
"""So many keys of a small range are looked at again; where more differ, it is not by chance."""


class PointReads(Protocol):
    """Single keys of a side."""

    def values(self, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """The values of those that exist."""

    def ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when it is gone."""


def settle(found: Sequence[KeyDifference], a: PointReads, b: PointReads) -> tuple[list[KeyDifference], int]:
    """What differs still, with the seconds until it expires, and how many keys are gone or about to go."""
    if not found:
        return [], 0
    keys = [difference.key for difference in found]
    in_a, in_b = a.values(keys), b.values(keys)
    settled: list[KeyDifference] = []
    expiring = 0
    for key in keys:
        here, there = in_a.get(key), in_b.get(key)
        if here is not None and there is not None:
            settled += [KeyDifference(Kind.VALUE, key)] if here != there else []
            continue
        ttl = None if here is there else (a if there is None else b).ttl(key)
        if ttl is None or 0 < ttl <= CLOCK_SECONDS:
            expiring += 1
        else:
            settled.append(KeyDifference(Kind.ONLY_A if there is None else Kind.ONLY_B, key, ttl))
    return settled, expiring
