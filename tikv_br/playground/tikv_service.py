"""The ``tikvpb.Tikv`` service of one store: its RPCs, and how faults become responses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from tikv_br.cluster.pb import coprocessor_pb2, errorpb_pb2, tikvpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground import region_errors
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.encoding import DeadlyData, Encoding, encoding_of
from tikv_br.playground.node import GET_TTL_WITHOUT_TTL, StoreNode, crash_store
from tikv_br.playground.raw import RawReads, RawWrites
from tikv_br.playground.request_checks import RegionFault, RequestChecks, RequestFault, check_within
from tikv_br.playground.servers import bidi, unary
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.txn.prewrite import FirstPhase
from tikv_br.playground.txn.reads import RangeDeletes, TxnReads
from tikv_br.playground.txn.resolve import SecondPhase
from tikv_br.playground.txn.state import KeyFault, TxnState

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
