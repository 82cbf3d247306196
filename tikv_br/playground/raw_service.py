"""The ``tikvpb.Tikv`` service of one store: its RPCs, and how faults become responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from tikv_br.cluster.pb import errorpb_pb2, tikvpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground import region_errors
from tikv_br.playground.cdc_hub import ChangeHub
from tikv_br.playground.encoding import DeadlyData, Encoding, encoding_of
from tikv_br.playground.node import GET_TTL_WITHOUT_TTL, StoreNode, crash_store
from tikv_br.playground.raw_checks import RawChecks, RegionFault, RequestFault, check_within
from tikv_br.playground.raw_read import RawReads
from tikv_br.playground.raw_write import RawWrites
from tikv_br.playground.servers import bidi, unary
from tikv_br.playground.timestamps import TimestampFault
from tikv_br.playground.transactions import Transactions

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


Call = Callable[[Any], Message | bytes]


@dataclass(frozen=True, slots=True)
class _Method:
    """One unary RPC: its messages, its implementation, and the response to a refused request."""

    request: type[Message]
    response: type[Message]
    call: Call
    refuse: Callable[[RequestFault], Message]


class RawService:
    """Serves one store."""

    def __init__(self, node: StoreNode, changes: ChangeHub) -> None:
        self._node = node
        self._methods = _methods(node, changes)

    def add_to(self, server: grpc.Server) -> None:
        handlers = {name: unary(method.request, self._unary(name)) for name, method in self._methods.items()}
        handlers["BatchCommands"] = bidi(tikvpb_pb2.BatchCommandsRequest, self._batch_commands)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("tikvpb.Tikv", handlers)])

    def _unary(self, name: str) -> Callable[[Any, grpc.ServicerContext], Message | bytes]:
        return lambda request, context: self._answer(name, request, context)

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
            answer = tikvpb_pb2.BatchCommandsResponse(request_ids=batch.request_ids, transport_layer_load=1)
            if number == 0:
                feedback = kv.HealthFeedback(store_id=self._node.store_id, feedback_seq_no=1, slow_score=1)
                answer.health_feedback.CopyFrom(feedback)
            for request in batch.requests:
                self._command(request, answer.responses.add(), context)
            yield answer

    def _command(
        self,
        request: tikvpb_pb2.BatchCommandsRequest.Request,
        response: tikvpb_pb2.BatchCommandsResponse.Response,
        context: grpc.ServicerContext,
    ) -> None:
        name = request.WhichOneof("cmd")
        if name == "Empty":
            response.Empty.test_id = request.Empty.test_id
            return
        if name is None or name not in self._methods:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"batched command {name} is not known here")
        command = getattr(request, name)
        node = self._node
        answer: Message | bytes | None = node.failpoints.answer(name, command, store_id=node.store_id, context=context)
        if answer is None:
            answer = self._answer(name, command, context)
        place = getattr(response, name)
        place.SetInParent()
        if isinstance(answer, bytes):
            place.MergeFromString(answer)
        else:
            place.CopyFrom(answer)


def _methods(node: StoreNode, changes: ChangeHub) -> Mapping[str, _Method]:
    encoding = encoding_of(node.api_version, node.release)
    checks = RawChecks(node)
    reads, writes = RawReads(node, encoding, checks), RawWrites(node, encoding, checks, changes)
    transactions = Transactions(node, checks)

    def method(request: type[Message], response: Callable[..., Message], call: Call) -> _Method:
        """The response has an ``error`` field."""
        return _Method(request, response, call, lambda fault: response(error=fault.text))  # type: ignore[arg-type]

    def transactional(request: type[Message], response: Callable[..., Message], call: Call) -> _Method:
        """The response has an ``error`` field with a key error, or several."""

        def refuse(fault: RequestFault) -> Message:
            error = kv.KeyError(abort=fault.debug)
            return response(errors=[error]) if response is kv.PrewriteResponse else response(error=error)

        return _Method(request, response, call, refuse)  # type: ignore[arg-type]

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
        "KvScan": transactional(kv.ScanRequest, kv.ScanResponse, transactions.scan),
        "KvScanLock": transactional(kv.ScanLockRequest, kv.ScanLockResponse, transactions.scan_lock),
        "KvPrewrite": transactional(kv.PrewriteRequest, kv.PrewriteResponse, transactions.prewrite),
        "KvCommit": transactional(kv.CommitRequest, kv.CommitResponse, transactions.commit),
        "SplitRegion": method(
            kv.SplitRegionRequest, kv.SplitRegionResponse, lambda request: _split(node, encoding, request)
        ),
    }
