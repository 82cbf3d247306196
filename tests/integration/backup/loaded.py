"""Clusters of each API version with rows of every kind that matters to a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.integration.backup.data import load
from tests.support.live_cluster import LiveCluster
from tikv_br.formats.api_version import ApiVersion

YEAR = 365 * 86400


@dataclass(frozen=True)
class Loaded:
    """A cluster with rows; those of `expiring` expire a year after ``at`` (seconds), some seconds more or less."""

    live: LiveCluster
    at: float
    tso: tuple[int, int]
    """PD's timestamps: one below those of all rows, one above."""


Sources = Callable[[ApiVersion], Loaded]


def fill(live: LiveCluster, version: ApiVersion, rows: dict[bytes, bytes]) -> Loaded:
    """Load, with every kind of row that must not appear in a backup, and split."""
    live.cluster.flush_timestamps()
    before = live.cluster.pd.tso() - (4000 << 18)  # a store that has begun to stamp may be 3 s behind
    live.raw().batch_put(dict.fromkeys(list(rows)[::3], b"old") | {b"row-gone": b"x", b"rox": b"y"})
    load(live, rows)
    live.raw().batch_delete([b"row-gone", b"rox"])
    at = time.time()
    if version.has_ttl:
        live.raw().batch_put(expiring(), YEAR)
        at = (at + time.time()) / 2
        live.raw().put(b"row-expired", b"x", 1)
        time.sleep(2.1)
    codec = live.raw().codec
    bounds = [codec.bound(codec.rpc_key(key)) for key in (b"\1" * 8, b"row00500", b"row00500\0", b"row01", b"\xfe")]
    live.split(*bounds)
    live.scatter()
    return Loaded(live, at, (before, live.cluster.pd.tso()))


def expiring() -> dict[bytes, bytes]:
    """Return the rows with a TTL of a year."""
    return {b"ttl%04d" % number: b"value-%d" % number for number in range(500)}
