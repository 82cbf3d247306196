"""From a missing part of an interval to requests: each leader's store is asked once, for the span of what it leads. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from formats.sst.compression import Compression
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.regions import Region

_COMPRESSION = {
    Compression.SNAPPY: brpb_pb2.SNAPPY,
    Compression.LZ4: brpb_pb2.LZ4,
    Compression.ZSTD: brpb_pb2.ZSTD,
}


@dataclass(frozen=True, slots=True)
class Span:
    """What one store is asked for: RPC keys of the source, never an empty range."""

    store_id: int
    range: KeyRange


def spans(gap: KeyRange, regions: Iterable[Region], codec: KeyCodec) -> list[Span]:
    """For each store that leads one of the ascending regions, from the first to the last that it leads of the gap.

    Stores skip what others lead: a span with holes costs nothing, many small requests would.
    """
    found: dict[int, KeyRange] = {}
    for region in regions:
        part = intersection(gap, _rpc_range(region, codec))
        if part.is_empty:
            continue
        known = found.get(region.leader.store_id)
        found[region.leader.store_id] = part if known is None else KeyRange(known.start, part.end)
    return [Span(store_id, part) for store_id, part in found.items()]


def request(
    span: KeyRange,
    cluster_id: int,
    target: KeyCodec,
    compression: Compression,
    level: int,
    concurrency: int,
    rate_limit: int = 0,
) -> brpb_pb2.BackupRequest:
    """The request without its storage. ``target`` is that of the files; it must be said also where it is the source's.

    ``rate_limit`` is in bytes a second, of this request alone; 0 = none.
    """
    return brpb_pb2.BackupRequest(
        cluster_id=cluster_id,
        start_key=span.start,
        end_key=span.end,
        is_raw_kv=True,
        cf="default",
        dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(target.api_version),
        compression_type=_COMPRESSION[compression],
        compression_level=level,
        concurrency=concurrency,
        rate_limit=rate_limit,
    )


def _rpc_range(region: Region, codec: KeyCodec) -> KeyRange:
    """The region's RPC keys; wider where PD was made to split at what is no key."""
    return KeyRange(_rpc_key(region.start, codec), _rpc_key(region.end, codec))


def _rpc_key(bound: bytes, codec: KeyCodec) -> bytes:
    try:
        return codec.from_bound(bound)
    except DamagedBytes:
        return b""
