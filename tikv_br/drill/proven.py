"""Removes what was proven to be a drill's rows and nothing else, by the stores' own sums, without reading it.

RawKV has no deletion under a condition. So each part, a region's, is summed and deleted at once: whoever writes there in
that moment loses it, and nobody who has written before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

from formats.checksum import Checksum
from formats.errors import DamagedBytes
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.shared import shared_cluster
from tikv_br.drill.landing import Landing, delete_all
from tikv_br.proof.ranges import codec_of, user_range

THREADS = 8


def sums_of(landing: Landing, span: KeyRange) -> Checksum:
    """The stores' own checksum of a part of the claims."""
    codec = codec_of(landing.api_version, span)
    return shared_cluster(landing.cluster).raw(codec.keyspace_id).checksum(*user_range(codec, span))


def all_sums(landing: Landing) -> Checksum:
    """Of all that lies there."""
    return reduce(Checksum.merge, (sums_of(landing, claim) for claim in landing.claims), Checksum())


def remove_proven(landing: Landing, proven: Checksum) -> None:
    """Where all that lies there has the sums that were proven, delete each part that still has its own; any other stays."""
    parts = [part for claim in landing.claims for part in parts_of(landing, claim)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="remove") as pool:
        found = list(pool.map(lambda part: sums_of(landing, part), parts))
        if reduce(Checksum.merge, found, Checksum()) == proven:
            list(pool.map(lambda pair: _remove(landing, *pair), zip(parts, found, strict=True)))


def parts_of(landing: Landing, claim: KeyRange) -> Iterator[KeyRange]:
    """A claim, cut where regions begin; at a bound that is no key it is not."""
    codec, start = codec_of(landing.api_version, claim), claim.start
    for region in shared_cluster(landing.cluster).pd.scan_regions(codec.bound(claim.start), codec.bound(claim.end)):
        try:
            cut = codec.from_bound(region.start)
        except DamagedBytes:
            continue
        if start < cut and (not claim.end or cut < claim.end):
            yield KeyRange(start, cut)
            start = cut
    yield KeyRange(start, claim.end)


def _remove(landing: Landing, part: KeyRange, known: Checksum) -> None:
    if sums_of(landing, part) == known:
        delete_all(landing.cluster, landing.api_version, part)
