"""A playground in the state in which a recording of golden/wire began."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.golden.wire_replay import Entry, Target
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.encoding import encoding_of
from tikv_br.playground.region import Peer, Region
from tikv_br.playground.regions import RegionTable

KEYS = 300
DELETED, LONG_LIVED, EXPIRED = 8, 9, 10
LONG_TTL = 100_000_000
SCAN_OF_A_REGION = "limit 1000"
"""The condition of the first recorded scan of a whole region."""


@contextlib.contextmanager
def cluster_as_recorded(
    entries: list[Entry], api_version: ApiVersion, folder: Path
) -> Iterator[tuple[Playground, Target]]:
    """One store, PD's own splits done, k0000..k0299 written; the same cluster id and so the same ids everywhere."""
    cluster_id = next(
        int(message["header"]["cluster_id"])
        for entry in entries
        if entry.rpc == "PD/GetMembers"
        for message in entry.outcome().messages
    )
    playground = open_playground(
        folder, api_version=api_version.value, stores=1, cluster_id=cluster_id, keyspace_split_delay=0.0
    )
    playground.start()
    try:
        _await(lambda: len(playground.regions.all()) == 5)
        _write_rows(playground, entries, api_version)
        node = playground.nodes[1]
        target = Target(playground.state.address, node.address, node.status_address)
        try:
            yield playground, target
        finally:
            target.close()
    finally:
        playground.stop()


def _write_rows(playground: Playground, entries: list[Entry], api_version: ApiVersion) -> None:
    """Rows that were recorded get their recorded values, the others any; k0008 is deleted, k0010 has expired."""
    encoding = encoding_of(api_version)
    prefix = b"r\0\0\0" if api_version is ApiVersion.V2 else b""
    values = _recorded_values(entries)
    rows = []
    now = int(time.time())
    for number in range(KEYS):
        key = prefix + b"k%04d" % number
        ts = playground.nodes[1].causal.next_ts()
        if number == DELETED:
            rows += encoding.delete(key, ts)[0]
        elif number == EXPIRED and api_version.has_ttl:
            rows.append(encoding.put(key, b"expired", now - 1, ts))
        else:
            expire = now + LONG_TTL if number == LONG_LIVED and api_version.has_ttl else 0
            rows.append(encoding.put(key, values.get(key, b"value of " + key), expire, ts))
    playground.engine.write(rows)


def _recorded_values(entries: list[Entry]) -> dict[bytes, bytes]:
    """Values of the first recorded scan of a whole region."""
    entry = next(entry for entry in entries if entry.fields.get("condition") == SCAN_OF_A_REGION)
    [response] = entry.messages("response")
    return {pair.key: pair.value for pair in response.kvs}


def adopt_regions(table: RegionTable, recorded: Sequence[Region]) -> None:
    """Replace regions of a playground by recorded ones, with the recorded bounds, ids, epochs and peers.

    For before the first request: no data are moved, and nobody is notified.
    """
    table.alloc_id(max(each for region in recorded for each in (region.id, *(peer.id for peer in region.peers))))
    for region in recorded:
        for bound in filter(None, (region.start, region.end)):
            table.split(table.locate(bound).id, [bound])
        inside = table.overlapping(region.start, region.end)
        namesake = table.get(region.id)
        if namesake is not None and namesake not in inside:
            peers = tuple(Peer(table.alloc_id(), peer.store_id) for peer in namesake.peers)
            table._apply([namesake], [replace(namesake, id=table.alloc_id(), peers=peers)])
        table._apply(inside, [region])


def _await(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the playground did not come into the recorded state")
        time.sleep(0.02)
