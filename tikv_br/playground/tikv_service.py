"""The ``tikvpb.Tikv`` service of one store: its RPCs, and how faults become responses.

RawKV is here. Its scans build their answer's bytes by hand: no message object per row.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias

import grpc
from fastcrc import crc64
from google.protobuf.message import Message

from tikv_br.cluster.pb import coprocessor_pb2, errorpb_pb2, tikvpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.formats.sst.coding import encode_varint
from tikv_br.playground import region_errors
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.encoding import DeadlyData, Encoding, Row, Stored, data_range, encoding_of
from tikv_br.playground.node import GET_TTL_WITHOUT_TTL, StoreNode, crash_store
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import (
    RegionFault,
    RequestChecks,
    RequestFault,
    check_within,
    key_outside,
    out_of_region,
)
from tikv_br.playground.servers import bidi, unary
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.txn.prewrite import FirstPhase
from tikv_br.playground.txn.reads import RangeDeletes, TxnReads
from tikv_br.playground.txn.resolve import SecondPhase
from tikv_br.playground.txn.state import KeyFault, TxnState

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


_NO_KEYS: Final = '"[components/raftstore/src/store/util.rs:1873]: [region {region}] {peer} no split key is specified."'
_NO_VALID_KEY: Final = (
    "Coprocessor [components/raftstore/src/coprocessor/split_observer.rs:153]: no valid key found for split."
)


def _split(node: StoreNode, encoding: Encoding, request: kv.SplitRegionRequest) -> kv.SplitRegionResponse:
    """Split a region that the store leads. Raw keys are RPC keys, others become memcomparable in every API version."""
    context = request.context
    region = node.regions.get(context.region_id)
    if region is None or region.peer_on(node.store_id) is None:
        raise RegionFault(region_errors.region_not_found(context.region_id, read=False))
    if region.leader_store != node.store_id:
        raise RegionFault(region_errors.not_leader(region.id, region.leader))
    keys = list(request.split_keys) or ([request.split_key] if request.split_key else [])
    if not keys:
        message = _NO_KEYS.format(region=region.id, peer=region.leader.id)
        raise RegionFault(errorpb_pb2.Error(message=message))
    if context.region_epoch.version != region.version:
        raise RegionFault(region_errors.epoch_not_match(region, context.region_epoch, [region], split=True))
    bounds = [encoding.bound(key) if request.is_raw_kv else codec.encode(key) for key in keys]
    check_within(region, bounds)
    pieces = node.regions.split(region.id, bounds)
    if len(pieces) == 1:
        node.regions.alloc_id(len(bounds) * (1 + len(region.peers)))  # TiKV gets ids from PD before it finds out
        raise RegionFault(errorpb_pb2.Error(message=_NO_VALID_KEY))
    metas = [piece.to_pb() for piece in pieces]
    left, right = metas if len(metas) == 2 else (None, None)
    return kv.SplitRegionResponse(left=left, right=right, regions=metas)


_Command: TypeAlias = tikvpb_pb2.BatchCommandsRequest.Request
_WAITING: Final = "PessimisticLock"
"""The batched command that may wait for another one."""

Call = Callable[[Any], Message | bytes]


@dataclass(frozen=True, slots=True)
class _Method:
    """One unary RPC: its messages, its implementation, and the response to a refused request."""

    request: type[Message]
    response: type[Message]
    call: Call
    refuse: Callable[[RequestFault], Message]


class TikvService:
    """Serves one store."""

    def __init__(self, node: StoreNode, changes: ChangeHub, transactions: TxnState) -> None:
        self._node = node
        self._methods = _methods(node, changes, transactions)

    def add_to(self, server: grpc.Server) -> None:
        handlers = {name: unary(method.request, partial(self._answer, name)) for name, method in self._methods.items()}
        handlers["BatchCommands"] = bidi(tikvpb_pb2.BatchCommandsRequest, self._batch_commands)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("tikvpb.Tikv", handlers)])

    def _answer(self, name: str, request: Any, context: grpc.ServicerContext) -> Message | bytes:  # noqa: ANN401
        method = self._methods[name]
        if self._node.release.checks_cluster and request.context.cluster_id not in {0, self._node.cluster_id}:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the cluster id of the request does not match the TiKV cluster"
            )
        if name == "RawGetKeyTTL" and self._node.api_version is ApiVersion.V1:
            crash_store(self._node, context, name, GET_TTL_WITHOUT_TTL)
        try:
            return method.call(request)
        except RegionFault as fault:
            return method.response(region_error=fault.error)
        except RequestFault as fault:
            return method.refuse(fault)
        except TimestampFault as fault:
            return method.refuse(RequestFault(f'"[src/storage/mod.rs:3066]: Fail to get ts: {fault}"'))
        except DeadlyData as damage:
            crash_store(self._node, context, name, str(damage))

    def _batch_commands(
        self, requests: Iterator[tikvpb_pb2.BatchCommandsRequest], context: grpc.ServicerContext
    ) -> Iterator[tikvpb_pb2.BatchCommandsResponse]:
        for number, batch in enumerate(requests):
            if any(request.HasField(_WAITING) for request in batch.requests):
                yield from self._concurrently(itertools.chain([batch], requests), context)
                return
            answer = self._answer_batch(batch.requests, batch.request_ids, context)
            if number == 0:
                feedback = kv.HealthFeedback(store_id=self._node.store_id, feedback_seq_no=1, slow_score=1)
                answer.health_feedback.CopyFrom(feedback)
            yield answer

    def _concurrently(
        self, batches: Iterator[tikvpb_pb2.BatchCommandsRequest], context: grpc.ServicerContext
    ) -> Iterator[tikvpb_pb2.BatchCommandsResponse]:
        """Answer commands that may wait for others on threads of their own, so that these others are answered meanwhile."""
        answers: SimpleQueue[tikvpb_pb2.BatchCommandsResponse | None] = SimpleQueue()

        def answer(requests: Sequence[_Command], ids: Sequence[int]) -> None:
            answers.put(self._answer_batch(requests, ids, context))

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # the call was cancelled
                for batch in batches:
                    for request, number in zip(batch.requests, batch.request_ids, strict=True):
                        if request.HasField(_WAITING):
                            Thread(target=answer, args=([request], [number]), daemon=True).start()
                        else:
                            answer([request], [number])
            answers.put(None)

        Thread(target=read, name="batch-commands", daemon=True).start()
        while (response := answers.get()) is not None:
            yield response

    def _answer_batch(
        self, requests: Sequence[_Command], ids: Sequence[int], context: grpc.ServicerContext
    ) -> tikvpb_pb2.BatchCommandsResponse:
        answer = tikvpb_pb2.BatchCommandsResponse(request_ids=ids, transport_layer_load=1)
        for request in requests:
            self._command(request, answer.responses.add(), context)
        return answer

    def _command(
        self,
        request: _Command,
        response: tikvpb_pb2.BatchCommandsResponse.Response,
        context: grpc.ServicerContext,
    ) -> None:
        field = request.WhichOneof("cmd")
        if field == "Empty":
            response.Empty.test_id = request.Empty.test_id
            return
        name = next((name for name in (field, f"Kv{field}", f"KV{field}") if name in self._methods), None)
        if field is None or name is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"batched command {field} is not known here")
        command = getattr(request, field)
        node = self._node
        answer: Message | bytes | None = node.failpoints.answer(name, command, store_id=node.store_id, context=context)
        if answer is None:
            answer = self._answer(name, command, context)
        place = getattr(response, field)
        place.SetInParent()
        if isinstance(answer, bytes):
            place.MergeFromString(answer)
        else:
            place.CopyFrom(answer)


def _methods(node: StoreNode, changes: ChangeHub, transactions: TxnState) -> Mapping[str, _Method]:
    encoding = encoding_of(node.api_version, node.release)
    checks = RequestChecks(node)
    reads, writes = RawReads(node, encoding, checks), RawWrites(node, encoding, checks, changes)
    shared = node, checks, transactions
    first, second, txn_reads, ranges = (
        FirstPhase(*shared),
        SecondPhase(*shared),
        TxnReads(*shared),
        RangeDeletes(*shared),
    )

    def method(request: type[Message], response: Callable[..., Message], call: Call) -> _Method:
        """The response has an ``error`` field."""
        return _Method(request, response, call, lambda fault: response(error=fault.text))  # type: ignore[arg-type]

    def transactional(request: type[Message], response: Callable[..., Message], call: Call) -> _Method:
        """The response has an ``error`` field with a key error, or several."""
        is_list = "errors" in response.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]

        def refuse(fault: RequestFault) -> Message:
            error = fault.error if isinstance(fault, KeyFault) else kv.KeyError(abort=fault.debug)
            return response(errors=[error]) if is_list else response(error=error)

        return _Method(request, response, call, refuse)  # type: ignore[arg-type]

    def refuse_coprocessor(fault: RequestFault) -> Message:
        if isinstance(fault, KeyFault):
            return coprocessor_pb2.Response(locked=fault.error.locked)
        return coprocessor_pb2.Response(other_error=fault.text)

    def paired(request: type[Message], response: Callable[..., Message], field: str, call: Call) -> _Method:
        """The response has a place for the error only in its first pair."""

        def refuse(fault: RequestFault) -> Message:
            return response(**{field: [kv.KvPair(error=kv.KeyError(abort=fault.debug))]})

        return _Method(request, response, call, refuse)  # type: ignore[arg-type]

    return {
        "RawGet": method(kv.RawGetRequest, kv.RawGetResponse, reads.get),
        "RawBatchGet": paired(kv.RawBatchGetRequest, kv.RawBatchGetResponse, "pairs", reads.batch_get),
        "RawPut": method(kv.RawPutRequest, kv.RawPutResponse, writes.put),
        "RawBatchPut": method(kv.RawBatchPutRequest, kv.RawBatchPutResponse, writes.batch_put),
        "RawDelete": method(kv.RawDeleteRequest, kv.RawDeleteResponse, writes.delete),
        "RawBatchDelete": method(kv.RawBatchDeleteRequest, kv.RawBatchDeleteResponse, writes.batch_delete),
        "RawDeleteRange": method(kv.RawDeleteRangeRequest, kv.RawDeleteRangeResponse, writes.delete_range),
        "RawScan": paired(kv.RawScanRequest, kv.RawScanResponse, "kvs", reads.scan),
        "RawBatchScan": paired(kv.RawBatchScanRequest, kv.RawBatchScanResponse, "kvs", reads.batch_scan),
        "RawGetKeyTTL": method(kv.RawGetKeyTTLRequest, kv.RawGetKeyTTLResponse, reads.key_ttl),
        "RawCompareAndSwap": method(kv.RawCASRequest, kv.RawCASResponse, writes.compare_and_swap),
        "RawChecksum": method(kv.RawChecksumRequest, kv.RawChecksumResponse, reads.checksum),
        "KvGet": transactional(kv.GetRequest, kv.GetResponse, txn_reads.get),
        "KvBatchGet": transactional(kv.BatchGetRequest, kv.BatchGetResponse, txn_reads.batch_get),
        "KvScan": transactional(kv.ScanRequest, kv.ScanResponse, txn_reads.scan),
        "KvScanLock": transactional(kv.ScanLockRequest, kv.ScanLockResponse, txn_reads.scan_lock),
        "KvPrewrite": transactional(kv.PrewriteRequest, kv.PrewriteResponse, first.prewrite),
        "KvPessimisticLock": transactional(
            kv.PessimisticLockRequest, kv.PessimisticLockResponse, first.pessimistic_lock
        ),
        "KVPessimisticRollback": transactional(
            kv.PessimisticRollbackRequest, kv.PessimisticRollbackResponse, second.pessimistic_rollback
        ),
        "KvCommit": transactional(kv.CommitRequest, kv.CommitResponse, second.commit),
        "KvCleanup": transactional(kv.CleanupRequest, kv.CleanupResponse, second.cleanup),
        "KvBatchRollback": transactional(kv.BatchRollbackRequest, kv.BatchRollbackResponse, second.batch_rollback),
        "KvTxnHeartBeat": transactional(kv.TxnHeartBeatRequest, kv.TxnHeartBeatResponse, second.heart_beat),
        "KvCheckTxnStatus": transactional(kv.CheckTxnStatusRequest, kv.CheckTxnStatusResponse, second.check_txn_status),
        "KvCheckSecondaryLocks": transactional(
            kv.CheckSecondaryLocksRequest, kv.CheckSecondaryLocksResponse, second.check_secondary_locks
        ),
        "KvResolveLock": transactional(kv.ResolveLockRequest, kv.ResolveLockResponse, second.resolve_lock),
        "KvDeleteRange": method(kv.DeleteRangeRequest, kv.DeleteRangeResponse, ranges.delete_range),
        "UnsafeDestroyRange": method(
            kv.UnsafeDestroyRangeRequest, kv.UnsafeDestroyRangeResponse, ranges.unsafe_destroy_range
        ),
        "Coprocessor": _Method(
            coprocessor_pb2.Request, coprocessor_pb2.Response, txn_reads.coprocessor, refuse_coprocessor
        ),
        "SplitRegion": method(
            kv.SplitRegionRequest, kv.SplitRegionResponse, lambda request: _split(node, encoding, request)
        ),
    }
