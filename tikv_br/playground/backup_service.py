"""``backup.Backup`` of one store: it writes SSTs of the regions it leads to external storage, one or two files a region."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import grpc

from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, errorpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import RAW_MODE, RAW_MODE_END, KeyCodec
from tikv_br.playground.backup_files import RawBackup, RegionSpan, bounds_codec
from tikv_br.playground.encoding import DeadlyData, from_memcomparable
from tikv_br.playground.external_storage import ExternalStorage, StorageFault, open_for
from tikv_br.playground.failpoints import BACKUP_REGION
from tikv_br.playground.node import BACKUP_BOUND, BACKUP_EMPTY_RANGE, StoreNode, crash_store
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import VERSION_NAMES, check_region
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.txn.backup import TxnBackup
from tikv_br.playground.txn.state import TxnState

_RPC: Final = "Backup"
_COLUMN_FAMILIES: Final = frozenset({"", "default", "lock", "write", "raft"})


def _flush_failed(fault: TimestampFault) -> str:
    cause = f"[components/backup/src/endpoint.rs:1155]: fail to flush causal ts, {fault}"
    return f"Other({json.dumps(cause)})"


class BackupService(brpb_pb2_grpc.BackupServicer):
    """Serves one store."""

    def __init__(self, node: StoreNode, transactions: TxnState) -> None:
        self._node = node
        self._transactions = transactions

    def add_to(self, server: grpc.Server) -> None:
        brpb_pb2_grpc.add_BackupServicer_to_server(self, server)

    def backup(
        self, request: brpb_pb2.BackupRequest, context: grpc.ServicerContext
    ) -> Iterator[brpb_pb2.BackupResponse]:
        """Yield one response per region. A failure is a response too, and does not end the others."""
        if request.cf not in _COLUMN_FAMILIES:
            context.abort(grpc.StatusCode.UNKNOWN, f'InvalidCf {{ cf: "{request.cf}" }}')
        if not self._node.release.counts_backups:
            request.dst_api_version = kvrpcpb_pb2.APIVersion.Value(self._node.api_version.name)  # the field is unknown
        if request.is_raw_kv and (refusal := self._check_version(request)):
            yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=refusal))
            return
        ranges = [(each.start_key, each.end_key) for each in request.sub_ranges]
        ranges = ranges or [(request.start_key, request.end_key)]
        self._check_fatal(request, ranges, context)
        if request.is_raw_kv and self._node.api_version is ApiVersion.V2 and self._node.release.flushes:
            try:
                self._node.causal.flush()  # even if what follows fails
            except TimestampFault as fault:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=_flush_failed(fault)))
                return
        try:
            storage = open_for(self._node, request.storage_backend)
        except StorageFault as fault:
            yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=fault.debug))
            return
        yield from self._back_up(request, ranges, storage, context)

    def _back_up(
        self,
        request: brpb_pb2.BackupRequest,
        ranges: list[tuple[bytes, bytes]],
        storage: ExternalStorage,
        context: grpc.ServicerContext,
    ) -> Iterator[brpb_pb2.BackupResponse]:
        raw = request.is_raw_kv
        task = (
            RawBackup(self._node, request, storage)
            if raw
            else TxnBackup(self._node, request, storage, self._transactions)
        )
        codec = bounds_codec(self._node) if raw else KeyCodec(ApiVersion.V2)
        for span in [span for start, end in ranges for span in self._led_spans(codec, start, end)]:
            if not context.is_active():
                return
            error = self._region_error(span.region, context)
            if error is not None:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(region_error=error))
                continue
            try:
                yield task.run(span)
            except DeadlyData as damage:
                crash_store(self._node, context, _RPC, str(damage))

    def _check_version(self, request: brpb_pb2.BackupRequest) -> str | None:
        """Return why the store cannot write that API version, or (V2) has no raw data in such a range."""
        source, target = self._node.api_version, request.dst_api_version
        start, end = request.start_key, request.end_key
        in_raw_mode = start.startswith(RAW_MODE) and (end.startswith(RAW_MODE) or end == RAW_MODE_END)
        if target in {source.value, ApiVersion.V2.value} and (in_raw_mode or source is not ApiVersion.V2):
            return None
        refusal = f"invalid backup version, cur: {VERSION_NAMES[source]}, dst: {VERSION_NAMES[target]}"
        return f'Other("[components/backup/src/endpoint.rs:1136]: {refusal}")'

    def _check_fatal(
        self, request: brpb_pb2.BackupRequest, ranges: list[tuple[bytes, bytes]], context: grpc.ServicerContext
    ) -> None:
        for start, end in ranges:
            if start == end and start:
                crash_store(self._node, context, _RPC, f"{BACKUP_EMPTY_RANGE}: {start.hex()}")
            if not request.is_raw_kv:
                self._check_bounds(start, end, context)

    def _check_bounds(self, start: bytes, end: bytes, context: grpc.ServicerContext) -> None:
        """A store decodes the bounds within the range of the regions that it leads."""
        codec = KeyCodec(ApiVersion.V2)
        first, last = codec.bound(start), codec.bound(end)
        for region in self._node.regions.overlapping(first, last):
            if region.leader_store == self._node.store_id:
                for bound in (region.start, region.end):
                    is_within = first < bound and (not last or bound < last)
                    if is_within and from_memcomparable(bound) is None:
                        crash_store(self._node, context, _RPC, f"{BACKUP_BOUND}: {bound.hex()}")

    def _led_spans(self, codec: KeyCodec, start: bytes, end: bytes) -> Iterator[RegionSpan]:
        """The parts of [start, end) that this store leads now; none of a reversed range."""
        if end and start > end:
            return
        for region in self._node.regions.overlapping(codec.bound(start), codec.bound(end)):
            if region.leader_store == self._node.store_id:
                region_start, region_end = map(codec.from_bound, (region.start, region.end))
                yield RegionSpan(region, max(start, region_start), min(filter(None, (end, region_end)), default=b""))

    def _region_error(self, region: Region, context: grpc.ServicerContext) -> errorpb_pb2.Error | None:
        """Return the region error if a region has changed since the range was divided, or a failpoint's error."""
        node = self._node
        error = node.failpoints.intercept(BACKUP_REGION, store_id=node.store_id, region_id=region.id, context=context)
        if error is not None:
            return error
        sent = kvrpcpb_pb2.Context(
            region_id=region.id, region_epoch=region.to_pb().region_epoch, peer=region.leader.to_pb()
        )
        return check_region(node.regions, sent, node.store_id, read=True)
