"""The ``tikvpb.Tikv`` service of one store: which RPC does what, and how faults become answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.pb import tikvpb_pb2
from tikv_br.playground import answers, crimes
from tikv_br.playground.encoding import DeadlyData, encoding_of
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_checks import RawChecks
from tikv_br.playground.raw_faults import RegionFault, RequestFault
from tikv_br.playground.raw_read import RawReads
from tikv_br.playground.raw_write import RawWrites
from tikv_br.playground.rpc import bidi, unary
from tikv_br.playground.split_service import SplitService

SERVICE: Final = "tikvpb.Tikv"
Call = Callable[[Any], Message | bytes]


@dataclass(frozen=True, slots=True)
class _Method:
    """One unary RPC: its messages, what it does, and where its answer says that a request was refused."""

    request: type[Message]
    response: type[Message]
    call: Call
    refused: Callable[[RequestFault], Message]


class RawService:
    """Serves one store. Failpoints strike before, in the interceptor; those of batched commands here."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        encoding = encoding_of(node.api_version)
        checks = RawChecks(node)
        self._methods = _methods(
            RawReads(node, encoding, checks), RawWrites(node, encoding, checks), SplitService(node, encoding)
        )

    def add_to(self, server: grpc.Server) -> None:
        """Register the service."""
        handlers = {name: unary(method.request, self._unary(name)) for name, method in self._methods.items()}
        handlers["BatchCommands"] = bidi(tikvpb_pb2.BatchCommandsRequest, self._batch_commands)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    def _unary(self, name: str) -> Callable[[Any, grpc.ServicerContext], Message | bytes]:
        return lambda request, context: self._answer(name, request, context)

    def _answer(self, name: str, request: Any, context: grpc.ServicerContext) -> Message | bytes:  # noqa: ANN401
        method = self._methods[name]
        cluster_id = request.context.cluster_id
        if cluster_id not in {0, self._node.cluster_id}:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the cluster id of the request does not match the TiKV cluster"
            )
        if name == "RawGetKeyTTL" and self._node.api_version is ApiVersion.V1:
            crimes.store_dies(self._node, context, name, crimes.GET_TTL_WITHOUT_TTL)
        try:
            return method.call(request)
        except RegionFault as fault:
            return method.response(region_error=fault.error)
        except RequestFault as fault:
            return method.refused(fault)
        except DeadlyData as damage:
            crimes.store_dies(self._node, context, name, str(damage))

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
        error = self._node.failpoints.intercept(
            name, store_id=self._node.store_id, region_id=answers.region_of(command), context=context
        )
        struck = None if error is None else answers.with_region_error(name, error)
        answer = struck if struck is not None else self._answer(name, command, context)
        place = getattr(response, name)
        place.SetInParent()
        if isinstance(answer, bytes):
            place.MergeFromString(answer)
        else:
            place.CopyFrom(answer)


def _methods(reads: RawReads, writes: RawWrites, splits: SplitService) -> Mapping[str, _Method]:
    def said(request: type[Message], response: Callable[..., Message], call: Call) -> _Method:
        """The answer has an ``error`` field."""
        return _Method(request, response, call, lambda fault: response(error=fault.text))  # type: ignore[arg-type]

    def in_pairs(request: type[Message], response: Callable[..., Message], field: str, call: Call) -> _Method:
        """The answer can only put it into its first pair."""

        def refused(fault: RequestFault) -> Message:
            return response(**{field: [kv.KvPair(error=kv.KeyError(abort=fault.debug))]})

        return _Method(request, response, call, refused)  # type: ignore[arg-type]

    return {
        "RawGet": said(kv.RawGetRequest, kv.RawGetResponse, reads.get),
        "RawBatchGet": in_pairs(kv.RawBatchGetRequest, kv.RawBatchGetResponse, "pairs", reads.batch_get),
        "RawPut": said(kv.RawPutRequest, kv.RawPutResponse, writes.put),
        "RawBatchPut": said(kv.RawBatchPutRequest, kv.RawBatchPutResponse, writes.batch_put),
        "RawDelete": said(kv.RawDeleteRequest, kv.RawDeleteResponse, writes.delete),
        "RawBatchDelete": said(kv.RawBatchDeleteRequest, kv.RawBatchDeleteResponse, writes.batch_delete),
        "RawDeleteRange": said(kv.RawDeleteRangeRequest, kv.RawDeleteRangeResponse, writes.delete_range),
        "RawScan": in_pairs(kv.RawScanRequest, kv.RawScanResponse, "kvs", reads.scan),
        "RawBatchScan": in_pairs(kv.RawBatchScanRequest, kv.RawBatchScanResponse, "kvs", reads.batch_scan),
        "RawGetKeyTTL": said(kv.RawGetKeyTTLRequest, kv.RawGetKeyTTLResponse, reads.key_ttl),
        "RawCompareAndSwap": said(kv.RawCASRequest, kv.RawCASResponse, writes.compare_and_swap),
        "RawChecksum": said(kv.RawChecksumRequest, kv.RawChecksumResponse, reads.checksum),
        "SplitRegion": said(kv.SplitRegionRequest, kv.SplitRegionResponse, splits.split),
    }
