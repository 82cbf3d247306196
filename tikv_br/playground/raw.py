"""RawKV reads of one store. Scans build their answer's bytes by hand: no message object per row.

RawKV writes of one store.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Final

from fastcrc import crc64

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.playground import region_errors
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.encoding import Encoding, Row, Stored, data_range
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import (
    RegionFault,
    RequestChecks,
    RequestFault,
    check_within,
    key_outside,
    out_of_region,
)

# Tags of kvrpcpb.RawScanResponse.kvs, RawBatchGetResponse.pairs (both field 2), KvPair.key and KvPair.value.
_ROW: Final = b"\x12"
_KEY: Final = b"\x12"
_VALUE: Final = b"\x1a"


_SMALL: Final = [encode_varint(number) for number in range(1 << 14)]


def _length(data: bytes) -> bytes:
    size = len(data)
    return _SMALL[size] if size < len(_SMALL) else encode_varint(size)


def serialize_rows(rows: Iterable[Row], *, key_only: bool = False) -> bytes:
    """The bytes of a message with a KvPair for each row in its repeated field 2."""
    parts: list[bytes] = []
    for key, value in rows:
        pair = _KEY + _length(key) + key if key else b""
        if value and not key_only:
            pair += _VALUE + _length(value) + value
        parts += (_ROW, _length(pair), pair)
    return b"".join(parts)


class RawReads:
    """RawGet, RawBatchGet, RawScan, RawBatchScan, RawGetKeyTTL and RawChecksum."""

    def __init__(self, node: StoreNode, encoding: Encoding, checks: RequestChecks) -> None:
        self._node = node
        self._encoding = encoding
        self._checks = checks

    def get(self, request: kv.RawGetRequest) -> kv.RawGetResponse:
        region = self._region(request, "raw_get", [request.key])
        stored = self._newest(region, request.key)
        if stored is None or not stored.is_live(self._node.now()):
            return kv.RawGetResponse(not_found=True)
        return kv.RawGetResponse(value=stored.value)

    def batch_get(self, request: kv.RawBatchGetRequest) -> bytes:
        """The keys that are found, in the order of the request, duplicates kept."""
        region = self._region(request, "raw_batch_get", request.keys)
        now = self._node.now()
        found = ((key, self._newest(region, key, batch=True)) for key in request.keys)
        return serialize_rows((key, stored.value) for key, stored in found if stored and stored.is_live(now))

    def key_ttl(self, request: kv.RawGetKeyTTLRequest) -> kv.RawGetKeyTTLResponse:
        """Seconds until a key expires, 0 = never. In V2 a deleted key counts as found, as in TiKV."""
        region = self._region(request, "raw_get_key_ttl", [request.key])
        stored = self._newest(region, request.key)
        now = self._node.now()
        if stored is None or 0 < stored.expire <= now:
            return kv.RawGetKeyTTLResponse(not_found=True)
        return kv.RawGetKeyTTLResponse(ttl=stored.expire - now if stored.expire else 0)

    def scan(self, request: kv.RawScanRequest) -> bytes:
        """Live rows of one region: [start, end), in reverse from start (exclusive) down to end."""
        self._checks.ranges(request.context, "raw_scan", [(request.start_key, request.end_key or None)])
        self._checks.column_family(request.cf)
        region = self._checks.region(request.context, read=True)
        rows = self._rows(region, request.start_key, request.end_key, reverse=request.reverse)
        return serialize_rows(itertools.islice(rows, request.limit), key_only=request.key_only)

    def batch_scan(self, request: kv.RawBatchScanRequest) -> bytes:
        bounds = [(each.start_key, each.end_key) for each in request.ranges]
        self._checks.ranges(request.context, "raw_batch_scan", bounds)
        self._checks.column_family(request.cf)
        region = self._checks.region(request.context, read=True)
        rows = [
            itertools.islice(
                self._rows(region, each.start_key, each.end_key, reverse=request.reverse), request.each_limit
            )
            for each in request.ranges
        ]
        return serialize_rows(itertools.chain(*rows), key_only=request.key_only)

    def checksum(self, request: kv.RawChecksumRequest) -> kv.RawChecksumResponse:
        """XOR of CRC-64/XZ(key ‖ value), number and bytes of the live rows, summed over the ranges."""
        bounds = [(each.start_key, each.end_key) for each in request.ranges]
        self._checks.ranges(request.context, "raw_checksum", bounds)
        region = self._checks.region(request.context, read=True)
        bound = self._encoding.bound if self._node.release.sums_v2 else bytes
        crc, kvs, size = 0, 0, 0
        for start, end in bounds:
            for key, value in self._rows(region, start, end, reverse=False, bound=bound):
                crc ^= crc64.xz(key + value)
                kvs += 1
                size += len(key) + len(value)
        return kv.RawChecksumResponse(checksum=crc, total_kvs=kvs, total_bytes=size)

    def _region(
        self,
        request: kv.RawGetRequest | kv.RawBatchGetRequest | kv.RawGetKeyTTLRequest,
        name: str,
        keys: Iterable[bytes],
    ) -> Region:
        self._checks.keys(request.context, name, keys)
        self._checks.column_family(request.cf)
        return self._checks.region(request.context, read=True)

    def _newest(self, region: Region, key: bytes, *, batch: bool = False) -> Stored | None:
        bound = self._encoding.bound(key)
        if not region.contains(bound):
            if self._node.api_version is not ApiVersion.V2:
                raise out_of_region(region, bound)
            raise _debug_key_not_in_region(region, bound) if batch else key_outside(region, bound)
        return self._encoding.newest(self._node.engine, key)

    def _rows(
        self,
        region: Region,
        start: bytes,
        end: bytes,
        *,
        reverse: bool,
        bound: Callable[[bytes], bytes] | None = None,
    ) -> Iterator[Row]:
        """Live rows of the part of a scan's range that lies in the region; the scan must begin there."""
        bound = bound or self._encoding.bound
        first, last = bound(start), bound(end)
        if first < region.start or (region.end and first > region.end):
            raise key_outside(region, first)
        if reverse and not first:
            return iter(())
        lower, upper = (last, first) if reverse else (first, last)
        lower = max(lower, region.start)
        upper = min(upper or region.end, region.end or upper)
        return self._encoding.live(self._node.engine, lower, upper, now=self._node.now(), reverse=reverse)


def _debug_key_not_in_region(region: Region, key: bytes) -> RequestFault:
    """A V2 RawBatchGet outside its region: its response has no field for the region error but a text."""
    error = region_errors.key_not_in_region(region, key)
    fields = (
        f"key: {key.hex().upper()} region_id: {region.id} "
        f"start_key: {region.start.hex().upper()} end_key: {region.end.hex().upper()}"
    )
    return RequestFault(
        error.message, f'Error(Kv(Error(Request(message: "{error.message}" key_not_in_region {{ {fields} }}))))'
    )


MAX_ENTRY_SIZE: Final = 8 << 20
"""``raftstore.raft-entry-max-size``: of the command that a write becomes."""
_ROW_OVERHEAD: Final = 64
"""Upper bound of a command's bytes for a row besides key and value, and for its header."""
_MAX_U64: Final = (1 << 64) - 1
_APPLY = "[components/raftstore/src/store/fsm/apply.rs:2006]"
"""File and line that TiKV 9.0.0-beta.2 names in its message."""


class RawWrites:
    """RawPut, RawBatchPut, RawDelete, RawBatchDelete, RawDeleteRange and RawCompareAndSwap."""

    def __init__(self, node: StoreNode, encoding: Encoding, checks: RequestChecks, changes: ChangeHub) -> None:
        self._node = node
        self._encoding = encoding
        self._checks = checks
        self._changes = changes
        self._atomic = threading.Lock()

    def put(self, request: kv.RawPutRequest) -> kv.RawPutResponse:
        """Write one pair; the TTL counts from the store's clock."""
        self._checks.keys(request.context, "raw_put", [request.key])
        if not request.for_cas:
            self._checks.key_sizes([request.key])
        self._check_ttls([request.ttl])
        self._checks.column_family(request.cf)
        self._put(request.context, [(request.key, request.value)], [request.ttl], atomic=request.for_cas)
        return kv.RawPutResponse()

    def batch_put(self, request: kv.RawBatchPutRequest) -> kv.RawBatchPutResponse:
        """Write pairs of one region at once; of a repeated key the last one wins."""
        pairs = [(pair.key, pair.value) for pair in request.pairs]
        keys = [key for key, _ in pairs]
        self._checks.keys(request.context, "raw_atomic_store" if request.for_cas else "raw_batch_put", keys)
        if not request.for_cas:
            self._checks.key_sizes(keys)
        ttls = self._ttls(list(request.ttls), len(pairs))
        self._checks.column_family(request.cf)
        self._put(request.context, pairs, ttls, atomic=request.for_cas)
        return kv.RawBatchPutResponse()

    def delete(self, request: kv.RawDeleteRequest) -> kv.RawDeleteResponse:
        """Delete one key: the row in V1, a tombstone in V2."""
        self._delete(request, "raw_delete", [request.key])
        return kv.RawDeleteResponse()

    def batch_delete(self, request: kv.RawBatchDeleteRequest) -> kv.RawBatchDeleteResponse:
        self._delete(request, "raw_atomic_store" if request.for_cas else "raw_batch_delete", request.keys)
        return kv.RawBatchDeleteResponse()

    def delete_range(self, request: kv.RawDeleteRangeRequest) -> kv.RawDeleteRangeResponse:
        """Remove all rows of a range physically, in V2 with all their versions."""
        start_key, end_key = request.start_key, request.end_key
        self._checks.key_sizes([start_key, end_key])
        self._checks.ranges(request.context, "raw_delete_range", [(start_key, end_key)])
        self._checks.column_family(request.cf)
        region = self._checks.region(request.context, read=False)
        start, end = self._encoding.bound(start_key), self._encoding.bound(end_key)
        if end and start >= end:
            message = f'"{_APPLY}: invalid delete range command, start_key: {list(start)}, end_key: {list(end)}"'
            raise RegionFault(errorpb_pb2.Error(message=message))
        check_within(region, [start])
        if region.end and (not end or end > region.end):
            raise key_outside(region, end)
        self._node.engine.delete_range(*data_range(start, end))
        self._node.sizes.forget(region.id)
        return kv.RawDeleteRangeResponse()

    def compare_and_swap(self, request: kv.RawCASRequest) -> kv.RawCASResponse:
        """Write the value if the live one is the expected one. The recorded store ignores ``delete``, and so does this one."""
        self._checks.keys(request.context, "raw_compare_and_swap", [request.key])
        self._checks.column_family(request.cf)
        self._check_ttls([request.ttl])
        region = self._checks.region_to_write(request.context, snapshot=True)
        bound = self._encoding.bound(request.key)
        if not region.contains(bound):
            is_v2 = self._node.api_version is ApiVersion.V2
            raise key_outside(region, bound) if is_v2 else out_of_region(region, bound)
        with self._atomic:
            stored = self._encoding.newest(self._node.engine, request.key)
            live = stored if stored is not None and stored.is_live(self._node.now()) else None
            expected = None if request.previous_not_exist else request.previous_value
            succeed = (live.value if live else None) == expected
            if succeed:
                with self._changes.write_ts(self._node) as ts:
                    self._apply(region, [self._encoded(request.key, request.value, request.ttl, ts)])
        return kv.RawCASResponse(
            succeed=succeed, previous_not_exist=live is None, previous_value=live.value if live else b""
        )

    def _put(self, context: kv.Context, pairs: Sequence[Row], ttls: Sequence[int], *, atomic: bool) -> None:
        region = self._checks.region_to_write(context)
        with self._changes.write_ts(self._node) as ts:
            # TiKV pairs keys and TTLs until the shorter list ends.
            puts = [self._encoded(key, value, ttl, ts) for (key, value), ttl in zip(pairs, ttls, strict=False)]
            self._write(region, puts, [], atomic=atomic)

    def _delete(
        self, request: kv.RawDeleteRequest | kv.RawBatchDeleteRequest, name: str, keys: Iterable[bytes]
    ) -> None:
        self._checks.keys(request.context, name, keys)
        if not request.for_cas:
            self._checks.key_sizes(keys)
        self._checks.column_family(request.cf)
        region = self._checks.region_to_write(request.context)
        puts: list[Row] = []
        deletes: list[bytes] = []
        with self._changes.write_ts(self._node) as ts:
            for key in keys:
                tombstones, removed = self._encoding.delete(key, ts)
                puts += tombstones
                deletes += removed
            self._write(region, puts, deletes, atomic=request.for_cas)

    def _write(self, region: Region, puts: Sequence[Row], deletes: Sequence[bytes], *, atomic: bool) -> None:
        if not puts and not deletes:
            raise RequestFault("an empty request")
        with self._atomic if atomic else nullcontext():
            self._apply(region, puts, deletes)

    def _apply(self, region: Region, puts: Sequence[Row], deletes: Sequence[bytes] = ()) -> None:
        size = sum(len(key) + len(value) for key, value in puts) + sum(map(len, deletes))
        if size + _ROW_OVERHEAD * (len(puts) + len(deletes) + 1) > MAX_ENTRY_SIZE:  # the exact size takes its time
            exact = entry_size(region, puts, deletes, flagged=self._node.api_version is ApiVersion.V2)
            if exact > MAX_ENTRY_SIZE:
                too_large = errorpb_pb2.RaftEntryTooLarge(region_id=region.id, entry_size=exact)
                message = f"raft entry is too large, region {region.id}, entry size {exact}"
                raise RegionFault(errorpb_pb2.Error(message=message, raft_entry_too_large=too_large))
        check_within(region, [key[1:] for key, _ in puts])
        check_within(region, [key[1:] for key in deletes])
        self._changes.write(self._node, region, puts, deletes)
        self._node.sizes.written(region.id, size)

    def _encoded(self, key: bytes, value: bytes, ttl: int, ts: int) -> Row:
        expire = min(self._node.now() + ttl, _MAX_U64) if ttl else 0
        return self._encoding.put(key, value, expire, ts)

    def _ttls(self, ttls: list[int], pairs: int) -> list[int]:
        """A TTL for each pair. Raises `RequestFault`."""
        if len(ttls) <= 1:
            ttls = (ttls or [0]) * pairs
        self._check_ttls(ttls)
        if len(ttls) != pairs and self._node.api_version is not ApiVersion.V1:
            raise RequestFault("The length of ttls does not equal to the length of pairs")
        return ttls

    def _check_ttls(self, ttls: Iterable[int]) -> None:
        if self._node.api_version is ApiVersion.V1 and any(ttls):
            raise RequestFault("ttl is not enabled, but get put request with ttl")


def entry_size(region: Region, puts: Iterable[Row], deletes: Iterable[bytes] = (), *, flagged: bool) -> int:
    """Bytes of the ``RaftCmdRequest`` that a write becomes; V2's carries two bytes of flags."""
    epoch = _field(region.conf_ver) + _field(region.version)
    peer = _field(region.leader.id) + _field(region.leader_store)
    header = _field(region.id) + _nested(peer) + _nested(epoch) + (2 if flagged else 0)
    size = _nested(header)
    for key, value in puts:  # the key without z
        size += _nested(2 + _nested(_nested(len(key) - 1) + (_nested(len(value)) if value else 0)))
    for key in deletes:
        size += _nested(2 + _nested(_nested(len(key) - 1)))
    return size


def _field(number: int) -> int:
    return 1 + _varint_size(number) if number else 0


def _nested(size: int) -> int:
    return 1 + _varint_size(size) + size


def _varint_size(number: int) -> int:
    return max(1, (number.bit_length() + 6) // 7)
