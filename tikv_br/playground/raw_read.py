"""RawKV reads of one store. Scans build their answer's bytes by hand: no message object per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fastcrc import crc64

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.playground import region_errors
from tikv_br.playground.encoding import Encoding, Row, Stored
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import RequestChecks, RequestFault, key_outside, out_of_region

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
