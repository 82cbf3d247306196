"""Where the answer of each RPC carries a region error, read off the services' own descriptors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message

from tikv_br.cluster.pb import (
    brpb_pb2,
    cdcpb_pb2,
    errorpb_pb2,
    import_sstpb_pb2,
    keyspacepb_pb2,
    pdpb_pb2,
    tikvpb_pb2,
)

_FILES: Final = (tikvpb_pb2, pdpb_pb2, brpb_pb2, import_sstpb_pb2, cdcpb_pb2, keyspacepb_pb2)
_REGION_ERROR: Final = errorpb_pb2.Error.DESCRIPTOR.full_name


def _methods() -> Iterable[MethodDescriptor]:
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


_METHODS: Final = {method.name.lower(): method for method in _methods()}


def is_rpc(name: str) -> bool:
    """Whether any service has a method of that name (in any case)."""
    return name.lower() in _METHODS


def can_carry_region_error(rpc: str) -> bool:
    """Whether the answer has a place for one; True for ``*``, where it shows call by call."""
    method = _METHODS.get(rpc.lower())
    return rpc == "*" if method is None else _path_to_error(method.output_type) is not None


def with_region_error(rpc: str, error: errorpb_pb2.Error) -> Message | None:
    """An answer to ``rpc`` that holds nothing but the region error; None when it has no place for one."""
    output = _METHODS[rpc.lower()].output_type
    path = _path_to_error(output)
    if path is None:
        return None
    answer: Message = message_factory.GetMessageClass(output)()
    place: Any = answer
    for name in path:
        if "message" in place.DESCRIPTOR.fields_by_name:  # import_sstpb.Error says it in words too
            place.message = error.message
        place = getattr(place, name)
    place.CopyFrom(error)
    return answer


def region_of(request: object) -> int:
    """The region that a request is meant for, 0 when it names none (or is a stream)."""
    for path in (("context", "region_id"), ("sst", "region_id"), ("region", "id"), ("region_id",)):
        value = request
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, int) and value:
            return value
    return 0


def _path_to_error(output: Descriptor) -> list[str] | None:
    """Field names that lead to the ``errorpb.Error`` of a response, at most two steps away."""
    for field in output.fields:
        if field.message_type is not None and field.message_type.full_name == _REGION_ERROR:
            return [field.name]
    error = output.fields_by_name.get("error")
    if error is not None and error.message_type is not None:
        inner = _path_to_error(error.message_type)
        return None if inner is None else ["error", *inner]
    return None
