"""The region errors of a store, worded as TiKV words them (recorded in golden/wire), and responses with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    metapb_pb2,
    pdpb_pb2,
    tikvpb_pb2,
)
from tikv_br.playground.region import Peer, Region


def store_not_match(sent: int, mine: int) -> errorpb_pb2.Error:
    """The request was meant for another store."""
    return errorpb_pb2.Error(
        message=f"to store id {sent}, mine {mine}",
        store_not_match=errorpb_pb2.StoreNotMatch(request_store_id=sent, actual_store_id=mine),
    )


def region_not_found(region_id: int, *, read: bool) -> errorpb_pb2.Error:
    """The store has no peer of the region; reads and writes word it differently."""
    return errorpb_pb2.Error(
        message=f"region {region_id} is missing" if read else f"region {region_id} not found",
        region_not_found=errorpb_pb2.RegionNotFound(region_id=region_id),
    )


def mismatch_peer_id(sent: int, mine: int) -> errorpb_pb2.Error:
    """The store's peer of the region is another than the one sent."""
    return errorpb_pb2.Error(
        message=f"mismatch peer id {sent} != {mine}",
        mismatch_peer_id=errorpb_pb2.MismatchPeerId(request_peer_id=sent, store_peer_id=mine),
    )


def not_leader(region_id: int, leader: Peer | None) -> errorpb_pb2.Error:
    """The store does not lead the region; names the leader if there is one."""
    hint = f"Some(id: {leader.id} store_id: {leader.store_id})" if leader else "None"
    return errorpb_pb2.Error(
        message=f"peer is not leader for region {region_id}, leader may {hint}",
        not_leader=errorpb_pb2.NotLeader(region_id=region_id, leader=leader.to_pb() if leader else None),
    )


def epoch_not_match(
    region: Region, sent: metapb_pb2.RegionEpoch, current: Iterable[Region], *, split: bool = False
) -> errorpb_pb2.Error:
    """The caller has an older epoch; ``current`` are the regions that replaced the one it knows."""
    now = f"conf_ver: {region.conf_ver} version: {region.version}"
    then = f"conf_ver: {sent.conf_ver} version: {sent.version}"
    if split:
        peer_id = region.leader.id
        message = f"EpochNotMatch [region {region.id}] {peer_id} epoch changed {now} != {then}, retry later"
    else:
        message = f"EpochNotMatch current epoch of region {region.id} is {now}, but you sent {then}"
    return errorpb_pb2.Error(
        message=message,
        epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=[each.to_pb() for each in current]),
    )


def key_not_in_region(region: Region, key: bytes) -> errorpb_pb2.Error:
    """A storage key (V2: memcomparable, with or without ts) outside the region's bounds."""
    bounds = f"[{region.start.hex().upper()}, {region.end.hex().upper()})"
    return errorpb_pb2.Error(
        message=f"key {key.hex().upper()} is not in region key range {bounds} for region {region.id}",
        key_not_in_region=errorpb_pb2.KeyNotInRegion(
            key=key, region_id=region.id, start_key=region.start, end_key=region.end
        ),
    )


def max_timestamp_not_synced(region_id: int) -> errorpb_pb2.Error:
    """A new leader refuses raw writes of V2 until it has flushed its causal timestamps."""
    return errorpb_pb2.Error(
        message=f"Max timestamp not synced: region {region_id} has a potentially stale max timestamp",
        max_timestamp_not_synced=errorpb_pb2.MaxTimestampNotSynced(),
    )


_FILES: Final = (tikvpb_pb2, pdpb_pb2, brpb_pb2, import_sstpb_pb2, cdcpb_pb2, keyspacepb_pb2)
METHODS: Final[Mapping[str, MethodDescriptor]] = {
    method.name.lower(): method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def can_carry_region_error(rpc: str) -> bool:
    """Return whether the response has a field for a region error; True for ``*``, which is checked call by call."""
    method = METHODS.get(rpc.lower())
    return rpc == "*" if method is None else _path_to_error(method.output_type) is not None


def with_region_error(rpc: str, error: errorpb_pb2.Error) -> Message | None:
    """A response to ``rpc`` with nothing but the region error; None if it has no field for one."""
    output = METHODS[rpc.lower()].output_type
    path = _path_to_error(output)
    if path is None:
        return None
    answer: Message = message_factory.GetMessageClass(output)()
    place: Any = answer
    for name in path:
        if "message" in place.DESCRIPTOR.fields_by_name:  # of import_sstpb.Error
            place.message = error.message
        place = getattr(place, name)
    place.CopyFrom(error)
    return answer


def _path_to_error(output: Descriptor) -> list[str] | None:
    """Field names that lead to the ``errorpb.Error`` of a response, at most two steps away."""
    for each in output.fields:
        if each.message_type is not None and each.message_type.full_name == errorpb_pb2.Error.DESCRIPTOR.full_name:
            return [each.name]
    error = output.fields_by_name.get("error")
    if error is not None and error.message_type is not None:
        inner = _path_to_error(error.message_type)
        return None if inner is None else ["error", *inner]
    return None


def region_of(request: object) -> int:
    """The region that a request names; 0 if it names none, or is a stream."""
    for path in (("context", "region_id"), ("sst", "region_id"), ("region", "id"), ("region_id",)):
        value = request
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, int) and value:
            return value
    return 0
