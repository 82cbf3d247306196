"""Rows that the interoperability tests write with one client and read with another."""

from __future__ import annotations

from tests.integration.backup.data import hard_rows
from tests.support.live_cluster import LiveCluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange

YEAR = 365 * 86400
BOUNDS = (b"\1" * 8, b"row00100", b"row00100\0", b"row002", b"\xfe")
"""Keys at which regions are split: at rows, right behind one, and between."""


def rows() -> dict[bytes, bytes]:
    """Return rows hard on codecs, few enough for one call of every client."""
    return hard_rows(count=400)


def with_ttls(of: dict[bytes, bytes], version: ApiVersion) -> list[tuple[bytes, bytes, int]]:
    """Return rows with a TTL each: every third 0, and all where the cluster keeps none."""
    return [
        (key, value, number % 3 and YEAR + 1000 * number if version.has_ttl else 0)
        for number, (key, value) in enumerate(of.items())
    ]


def split(live: LiveCluster) -> None:
    """Split a playground at `BOUNDS` and spread the regions over its stores."""
    codec = live.raw().codec
    live.split(*(codec.bound(codec.rpc_key(bound)) for bound in BOUNDS))
    live.scatter()


def our_rows(
    live: LiveCluster, keyspace_id: int = 0, start: bytes = b"", end: bytes = b""
) -> list[tuple[bytes, bytes]]:
    """Return what our scan reads of [start, end), as user keys and values."""
    raw = live.raw(keyspace_id)
    return [
        (raw.codec.user_key(key), value)
        for page in raw.scan_pages(raw.codec.rpc_range(KeyRange(start, end)))
        for key, value in zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True)
    ]
