"""Requests and answers of etcd v3 as values without gRPC, so that commands that only parse stay light."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from tikv_br.cluster.pb import etcdserverpb_pb2, mvccpb_pb2

CREATED = etcdserverpb_pb2.Compare.CREATE
MODIFIED = etcdserverpb_pb2.Compare.MOD


class KeyValue(Struct, frozen=True):
    """One key at one revision."""

    key: str
    value: bytes
    create_revision: int
    """Revision that created the key; a new one after the key was deleted and created again."""
    mod_revision: int
    """Revision of the last change."""
    lease: int = 0
    """Lease that the key is attached to; 0 = none."""


class Listing(Struct, frozen=True):
    """Keys in ascending order, and the revision at which all of them stood so."""

    items: tuple[KeyValue, ...]
    revision: int


class Get(Struct, frozen=True):
    """Read a key, or all keys with a prefix."""

    key: str
    prefix: bool = False


class Put(Struct, frozen=True):
    """Write a key, which goes when its lease does."""

    key: str
    value: bytes
    lease: int = 0


class Delete(Struct, frozen=True):
    """Remove a key, or all keys with a prefix; there need be none."""

    key: str
    prefix: bool = False


Operation = Get | Put | Delete


class Compare(Struct, frozen=True):
    """A condition of a transaction: a revision of a key is exactly this one. Built by `absent` and its neighbours."""

    key: str
    target: etcdserverpb_pb2.Compare.CompareTarget.ValueType
    revision: int
    prefix: bool = False
    """Apply the condition to all keys with this prefix."""


def absent(key: str) -> Compare:
    return Compare(key, CREATED, 0)


def none_with(prefix: str) -> Compare:
    return Compare(prefix, CREATED, 0, prefix=True)


def created_at(key: str, revision: int) -> Compare:
    """The key is there, has been since that revision, and may have changed."""
    return Compare(key, CREATED, revision)


def modified_at(key: str, revision: int) -> Compare:
    """The key was last written at that revision."""
    return Compare(key, MODIFIED, revision)


def unchanged(item: KeyValue) -> Compare:
    """The key stands as it was read."""
    return modified_at(item.key, item.mod_revision)


class TxnResult(Struct, frozen=True):
    """Result of a transaction."""

    succeeded: bool
    """True if all conditions held and the operations of `then` were done; false if the operations of `otherwise` were."""
    revision: int
    """Revision after the transaction: the create_revision of keys that it created."""
    listings: tuple[Listing, ...]
    """Results of the `Get` operations among those done, in order."""


def range_end(prefix: str) -> bytes:
    """The first key after all that have this prefix, which must not be empty."""
    start = prefix.encode()  # UTF-8 has no byte 0xff, so the last one can always grow
    return start[:-1] + bytes([start[-1] + 1])


def to_range(operation: Get) -> etcdserverpb_pb2.RangeRequest:
    return etcdserverpb_pb2.RangeRequest(key=operation.key.encode(), range_end=_end(operation))


def to_put(operation: Put) -> etcdserverpb_pb2.PutRequest:
    return etcdserverpb_pb2.PutRequest(key=operation.key.encode(), value=operation.value, lease=operation.lease)


def to_delete(operation: Delete) -> etcdserverpb_pb2.DeleteRangeRequest:
    return etcdserverpb_pb2.DeleteRangeRequest(key=operation.key.encode(), range_end=_end(operation))


def to_txn(
    compares: Iterable[Compare], then: Iterable[Operation], otherwise: Iterable[Operation]
) -> etcdserverpb_pb2.TxnRequest:
    return etcdserverpb_pb2.TxnRequest(
        compare=map(_to_compare, compares), success=map(_to_op, then), failure=map(_to_op, otherwise)
    )


def from_range(response: etcdserverpb_pb2.RangeResponse) -> Listing:
    return Listing(tuple(map(_from_item, response.kvs)), response.header.revision)


def from_txn(response: etcdserverpb_pb2.TxnResponse) -> TxnResult:
    """Convert the answer to a transaction. Its reads carry no revision of their own."""
    revision = response.header.revision
    listings = tuple(
        Listing(tuple(map(_from_item, answer.response_range.kvs)), revision)
        for answer in response.responses
        if answer.HasField("response_range")
    )
    return TxnResult(response.succeeded, revision, listings)


def _end(operation: Get | Delete | Compare) -> bytes:
    return range_end(operation.key) if operation.prefix else b""


def _to_compare(compare: Compare) -> etcdserverpb_pb2.Compare:
    request = etcdserverpb_pb2.Compare(
        key=compare.key.encode(), range_end=_end(compare), target=compare.target, result=etcdserverpb_pb2.Compare.EQUAL
    )
    if compare.target == CREATED:
        request.create_revision = compare.revision
    else:
        request.mod_revision = compare.revision
    return request


def _to_op(operation: Operation) -> etcdserverpb_pb2.RequestOp:
    match operation:
        case Get():
            return etcdserverpb_pb2.RequestOp(request_range=to_range(operation))
        case Put():
            return etcdserverpb_pb2.RequestOp(request_put=to_put(operation))
        case Delete():
            return etcdserverpb_pb2.RequestOp(request_delete_range=to_delete(operation))


def _from_item(item: mvccpb_pb2.KeyValue) -> KeyValue:
    return KeyValue(item.key.decode(), item.value, item.create_revision, item.mod_revision, item.lease)
