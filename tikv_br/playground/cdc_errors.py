"""The errors that end a subscription to a region's changes (recorded in golden/cdc)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2, metapb_pb2
from tikv_br.playground import region_errors
from tikv_br.playground.region import Region

REQUIRED_VERSION: Final = "6.2.0"


def region_not_found(region_id: int) -> cdcpb_pb2.Error:
    """The store has no peer of the region; also the answer to a deregistration."""
    return cdcpb_pb2.Error(region_not_found=errorpb_pb2.RegionNotFound(region_id=region_id))


def not_leader(error: errorpb_pb2.Error) -> cdcpb_pb2.Error:
    """The store's peer only follows (now)."""
    return cdcpb_pb2.Error(not_leader=error.not_leader)


def epoch_not_match(current: Iterable[Region]) -> cdcpb_pb2.Error:
    """The region was split (``current``: into these) or merged (``current``: none)."""
    regions = [region.to_pb() for region in current]
    return cdcpb_pb2.Error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=regions))


def stale_epoch(region: Region, sent: metapb_pb2.RegionEpoch, current: Iterable[Region]) -> cdcpb_pb2.Error:
    """The client asked for another epoch than the region has."""
    error = region_errors.epoch_not_match(region, sent, current)
    return cdcpb_pb2.Error(epoch_not_match=error.epoch_not_match)


def duplicate_request(region_id: int) -> cdcpb_pb2.Error:
    """The stream has a subscription of this region under the same request id."""
    return cdcpb_pb2.Error(duplicate_request=cdcpb_pb2.DuplicateRequest(region_id=region_id))


def compatibility() -> cdcpb_pb2.Error:
    """The store has no changes of that kind: RawKV needs V2, TxnKV is not to be had."""
    return cdcpb_pb2.Error(compatibility=cdcpb_pb2.Compatibility(required_version=REQUIRED_VERSION))


def cluster_id_mismatch(current: int, request: int) -> cdcpb_pb2.Error:
    """The client means another cluster."""
    return cdcpb_pb2.Error(cluster_id_mismatch=cdcpb_pb2.ClusterIDMismatch(current=current, request=request))


def congested(region_id: int) -> cdcpb_pb2.Error:
    """The client is so slow that events would have taken too much memory."""
    return cdcpb_pb2.Error(congested=cdcpb_pb2.Congested(region_id=region_id))
