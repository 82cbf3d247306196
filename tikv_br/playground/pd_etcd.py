"""The etcd that PD has built in: keys, transactions and leases of its members, which all hold the same."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import grpc

from tikv_br.cluster.pb import etcdserverpb_pb2 as pb
from tikv_br.cluster.pb import mvccpb_pb2
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.servers import bidi, unary

_RECORD: Final = "etcd"
_LEASES: Final = "etcd-leases"


class EtcdState:
    """State of all members. Thread-safe."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine = engine
        self.lock = threading.Lock()
        saved = pb.RangeResponse.FromString(engine.get_meta(_RECORD) or b"")
        self.revision = max(saved.header.revision, 1)
        self._items = {item.key: item for item in saved.kvs}
        ttls: dict[str, int] = json.loads(engine.get_meta(_LEASES) or b"{}")
        self._leases = {int(lease): (ttl, time.monotonic() + ttl) for lease, ttl in ttls.items()}

    def range(self, key: bytes, end: bytes) -> list[mvccpb_pb2.KeyValue]:
        """Return one key, or all of [key, end), in order; an end of one zero byte = unbounded."""
        if not end:
            return [self._items[key]] if key in self._items else []
        return [self._items[each] for each in sorted(self._items) if each >= key and (end == b"\0" or each < end)]

    def put(self, key: bytes, value: bytes, lease: int) -> None:
        old, revision = self._items.get(key), self.revision + 1
        created, version = (old.create_revision, old.version + 1) if old is not None else (revision, 1)
        self._items[key] = mvccpb_pb2.KeyValue(
            key=key, value=value, lease=lease, create_revision=created, mod_revision=revision, version=version
        )

    def delete(self, key: bytes, end: bytes) -> int:
        """Remove keys at the next revision; returns how many."""
        found = self.range(key, end)
        for item in found:
            del self._items[item.key]
        return len(found)

    def commit(self) -> None:
        self.revision += 1
        self._save()

    def has_lease(self, lease: int) -> bool:
        """Return whether a lease exists; always true for 0 (no lease)."""
        return not lease or lease in self._leases

    def grant(self, ttl: int, lease: int) -> int:
        lease = lease or secrets.randbits(62) + 1
        self._leases[lease] = ttl, time.monotonic() + ttl
        self._save()
        return lease

    def keep_alive(self, lease: int) -> int:
        """Renew a lease; returns its TTL, 0 if it has ended."""
        ttl = self._leases.get(lease, (0, 0.0))[0]
        if ttl:
            self._leases[lease] = ttl, time.monotonic() + ttl
        return ttl

    def revoke(self, leases: Iterable[int]) -> None:
        ended = {lease for lease in leases if self._leases.pop(lease, None)}
        lost = [key for key, item in self._items.items() if item.lease in ended]
        for key in lost:
            del self._items[key]
        if lost:
            self.revision += 1
        if ended:
            self._save()

    def expire(self) -> None:
        now = time.monotonic()
        self.revoke([lease for lease, (_, until) in self._leases.items() if until <= now])

    def _save(self) -> None:
        header = pb.ResponseHeader(revision=self.revision)
        ttls = {lease: ttl for lease, (ttl, _) in self._leases.items()}
        items = pb.RangeResponse(header=header, kvs=self._items.values()).SerializeToString()
        self._engine.put_meta({_RECORD: items, _LEASES: json.dumps(ttls).encode()})


class EtcdService:
    """``etcdserverpb.KV`` and ``Lease`` of one member of PD."""

    def __init__(self, etcd: EtcdState, has_leader: Callable[[], bool]) -> None:
        self._etcd = etcd
        self._has_leader = has_leader

    def add_to(self, server: grpc.Server) -> None:
        kv = {
            "Range": unary(pb.RangeRequest, self._locked(self._range)),
            "Put": unary(pb.PutRequest, self._locked(self._put)),
            "DeleteRange": unary(pb.DeleteRangeRequest, self._locked(self._delete)),
            "Txn": unary(pb.TxnRequest, self._locked(self._txn)),
        }
        lease = {
            "LeaseGrant": unary(pb.LeaseGrantRequest, self._locked(self._grant)),
            "LeaseRevoke": unary(pb.LeaseRevokeRequest, self._locked(self._revoke)),
            "LeaseKeepAlive": bidi(pb.LeaseKeepAliveRequest, self._keep_alive),
        }
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler("etcdserverpb.KV", kv),
                grpc.method_handlers_generic_handler("etcdserverpb.Lease", lease),
            ]
        )

    def _locked(self, call: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401
            if not self._has_leader():
                context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
            with self._etcd.lock:
                self._etcd.expire()
                response = call(request, context)
                response.header.revision = self._etcd.revision
                return response

        return answer

    def _range(self, request: pb.RangeRequest, _context: grpc.ServicerContext) -> pb.RangeResponse:
        found = self._etcd.range(request.key, request.range_end)
        return pb.RangeResponse(header=pb.ResponseHeader(), kvs=found, count=len(found))

    def _put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        self._check_lease(request.lease, context)
        self._etcd.put(request.key, request.value, request.lease)
        self._etcd.commit()
        return pb.PutResponse(header=pb.ResponseHeader())

    def _delete(self, request: pb.DeleteRangeRequest, _context: grpc.ServicerContext) -> pb.DeleteRangeResponse:
        deleted = self._etcd.delete(request.key, request.range_end)
        if deleted:
            self._etcd.commit()
        return pb.DeleteRangeResponse(header=pb.ResponseHeader(), deleted=deleted)

    def _txn(self, request: pb.TxnRequest, context: grpc.ServicerContext) -> pb.TxnResponse:
        succeeded = all(map(self._holds, request.compare))
        operations = request.success if succeeded else request.failure
        for operation in operations:
            self._check_lease(operation.request_put.lease, context)
        responses, changed = [], False
        for operation in operations:
            answer = pb.ResponseOp()
            match operation.WhichOneof("request"):
                case "request_put":
                    put = operation.request_put
                    self._etcd.put(put.key, put.value, put.lease)
                    answer.response_put.SetInParent()
                    changed = True
                case "request_delete_range":
                    deletion = operation.request_delete_range
                    answer.response_delete_range.deleted = self._etcd.delete(deletion.key, deletion.range_end)
                    changed |= answer.response_delete_range.deleted > 0
                case _:
                    answer.response_range.CopyFrom(self._range(operation.request_range, context))
            responses.append(answer)
        if changed:
            self._etcd.commit()
        return pb.TxnResponse(header=pb.ResponseHeader(), succeeded=succeeded, responses=responses)

    def _holds(self, compare: pb.Compare) -> bool:
        """An equality of revisions, the only kind of condition that tikv-br uses; missing keys have revision 0."""
        if compare.result != pb.Compare.EQUAL or compare.target not in {pb.Compare.CREATE, pb.Compare.MOD}:
            raise NotImplementedError(f"condition {compare}")
        found = self._etcd.range(compare.key, compare.range_end) or [mvccpb_pb2.KeyValue()]
        if compare.target == pb.Compare.CREATE:
            return all(item.create_revision == compare.create_revision for item in found)
        return all(item.mod_revision == compare.mod_revision for item in found)

    def _check_lease(self, lease: int, context: grpc.ServicerContext) -> None:
        if not self._etcd.has_lease(lease):
            context.abort(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")

    def _grant(self, request: pb.LeaseGrantRequest, _context: grpc.ServicerContext) -> pb.LeaseGrantResponse:
        lease = self._etcd.grant(request.TTL, request.ID)
        return pb.LeaseGrantResponse(header=pb.ResponseHeader(), ID=lease, TTL=request.TTL)

    def _revoke(self, request: pb.LeaseRevokeRequest, context: grpc.ServicerContext) -> pb.LeaseRevokeResponse:
        self._check_lease(request.ID or -1, context)
        self._etcd.revoke([request.ID])
        return pb.LeaseRevokeResponse(header=pb.ResponseHeader())

    def _keep_alive(
        self, requests: Iterator[pb.LeaseKeepAliveRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.LeaseKeepAliveResponse]:
        renew = self._locked(
            lambda request, _: pb.LeaseKeepAliveResponse(
                header=pb.ResponseHeader(), ID=request.ID, TTL=self._etcd.keep_alive(request.ID)
            )
        )
        for request in requests:
            yield renew(request, context)
