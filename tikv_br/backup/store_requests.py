"""Requests to stores for raw and for transactional data: their ranges, their contents, and which files may answer them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.dataflow.plan import cut_at
from tikv_br.dataflow.task import BackupJob, Snapshot
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.sst.compression import Compression

_COMPRESSION = {
    Compression.SNAPPY: brpb_pb2.SNAPPY,
    Compression.LZ4: brpb_pb2.LZ4,
    Compression.ZSTD: brpb_pb2.ZSTD,
}
INTERMEDIATE_COMPRESSION = Compression.LZ4
"""Compression of stores' files that are rewritten and then removed."""


@dataclass(frozen=True, slots=True)
class StoreRange:
    """The range of a request to one store: RPC keys of the source, never empty."""

    store_id: int
    range: KeyRange


def store_ranges(gap: KeyRange, regions: Iterable[Region], codec: KeyCodec) -> list[StoreRange]:
    """Return one range per leader of the ascending ``regions``: from its first to its last region in the gap.

    Stores skip regions that they do not lead, so one wide request is cheaper than many small ones.
    """
    found: dict[int, KeyRange] = {}
    for region in regions:
        part = intersection(gap, KeyRange(cut_at(region.start, codec), cut_at(region.end, codec)))
        if part.is_empty:
            continue
        known = found.get(region.leader.store_id)
        found[region.leader.store_id] = part if known is None else KeyRange(known.start, part.end)
    return [StoreRange(store_id, part) for store_id, part in found.items()]


class StoreRequests:
    """Requests of a task, which differ by the mode of keys. For one thread."""

    families: ClassVar[frozenset[str]]
    """Column families that an answer may have files of."""

    def __init__(self, job: BackupJob, cluster_id: int, target: KeyCodec) -> None:
        """``target`` is the encoding of the stores' files."""
        self._job = job
        self._cluster_id = cluster_id
        self._target = target

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """The request for a range, without its storage."""
        options, rewritten = self._job.options, self._job.rewrites_files
        return brpb_pb2.BackupRequest(
            cluster_id=self._cluster_id,
            start_key=span.start,
            end_key=span.end,
            dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(self._target.api_version),
            compression_type=_COMPRESSION[INTERMEDIATE_COMPRESSION if rewritten else options.compression],
            compression_level=0 if rewritten else options.compression_level,
            concurrency=options.concurrency or 0,
            rate_limit=self._job.rate_limit.bytes_per_second,
        )

    def clear_locks(self, span: KeyRange) -> None:
        """Clear what locked a range for the last request."""


class RawRequests(StoreRequests):
    """Requests for raw data, which has no locks."""

    families = frozenset({"default"})

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """As of `StoreRequests`."""
        message = super().message(span)
        message.is_raw_kv = True
        message.cf = "default"
        return message


class TxnRequests(StoreRequests):
    """Requests for what transactions have committed up to one timestamp."""

    families = frozenset({"default", "write"})

    def __init__(self, job: BackupJob, cluster: Cluster, target: KeyCodec, snapshot: Snapshot) -> None:
        super().__init__(job, cluster.cluster_id, target)
        self._locks = SnapshotLocks(cluster, snapshot.ts, snapshot.resolved_locks, patience=job.options.lock_patience)

    def message(self, span: KeyRange) -> brpb_pb2.BackupRequest:
        """As of `StoreRequests`."""
        message = super().message(span)
        message.end_version = self._locks.ts
        message.context.resolved_locks.extend(sorted(self._locks.resolved))
        return message

    def clear_locks(self, span: KeyRange) -> None:
        """Resolve them, or wait for their transactions. Raises as `SnapshotLocks.clear`."""
        self._locks.clear(span)
