"""PD's answers about regions, and what it does to them when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.playground.pd_state import PdState
from tikv_br.playground.region import Region

_DONE: Final = 100


class PdRegions:
    """The region part of ``pdpb.PD``; headers are filled in by the caller."""

    def __init__(self, state: PdState) -> None:
        self._state = state

    def get(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region that holds a physical key."""
        return _one(self._state.regions.locate(request.region_key))

    def previous(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region left of the one that holds a key; none at the left edge."""
        return _one(self._state.regions.previous(request.region_key))

    def by_id(self, request: pdpb_pb2.GetRegionByIDRequest) -> pdpb_pb2.GetRegionResponse:
        """The region of that id, or none."""
        return _one(self._state.regions.get(request.region_id))

    def scan(self, request: pdpb_pb2.ScanRegionsRequest) -> pdpb_pb2.ScanRegionsResponse:
        """Regions that meet [start, end), at most ``limit`` of them if that is positive."""
        found = self._state.regions.overlapping(request.start_key, request.end_key, request.limit)
        return pdpb_pb2.ScanRegionsResponse(
            region_metas=[region.to_pb() for region in found],
            leaders=[region.leader.to_pb() for region in found],
            regions=_many(found),
        )

    def batch_scan(self, request: pdpb_pb2.BatchScanRegionsRequest) -> pdpb_pb2.BatchScanRegionsResponse:
        """Regions that meet any of several ranges, each region once."""
        refusal = _refusal(request.ranges)
        if refusal:
            error = pdpb_pb2.Error(type=pdpb_pb2.UNKNOWN, message=refusal)
            return pdpb_pb2.BatchScanRegionsResponse(header=pdpb_pb2.ResponseHeader(error=error))
        found: dict[int, Region] = {}
        for each in request.ranges:
            for region in self._state.regions.overlapping(each.start_key, each.end_key):
                found.setdefault(region.id, region)
        limited = list(found.values())[: request.limit if request.limit > 0 else None]
        return pdpb_pb2.BatchScanRegionsResponse(regions=_many(limited))

    def ask_batch_split(self, request: pdpb_pb2.AskBatchSplitRequest) -> pdpb_pb2.AskBatchSplitResponse:
        """Ids for the new regions of a split, and for their peers."""
        ids = []
        for _ in range(request.split_count):
            region_id = self._state.regions.alloc_id()
            peers = [self._state.regions.alloc_id() for _ in request.region.peers]
            ids.append(pdpb_pb2.SplitID(new_region_id=region_id, new_peer_ids=peers))
        return pdpb_pb2.AskBatchSplitResponse(ids=ids)

    def split(self, request: pdpb_pb2.SplitRegionsRequest) -> pdpb_pb2.SplitRegionsResponse:
        """Split at physical keys; names the regions that begin there afterwards."""
        regions = self._state.regions
        for key in request.split_keys:
            regions.split(regions.locate(key).id, [key])
        begin_there = [regions.locate(key).id for key in request.split_keys]
        return pdpb_pb2.SplitRegionsResponse(finished_percentage=_DONE, regions_id=begin_there)

    def scatter(self, request: pdpb_pb2.ScatterRegionRequest) -> pdpb_pb2.ScatterRegionResponse:
        """Give each living store its turn to lead the regions named."""
        ids = list(request.regions_id) or [request.region_id or request.region.id]
        living = [node.store_id for node in self._state.nodes.values() if node.alive]
        failed = [
            region_id
            for turn, region_id in enumerate(ids)
            if not self._give_to(region_id, [*living[turn % len(living) :], *living[: turn % len(living)]])
        ]
        done = _DONE * (len(ids) - len(failed)) // len(ids)
        return pdpb_pb2.ScatterRegionResponse(finished_percentage=done, failed_regions_id=failed)

    def _give_to(self, region_id: int, stores: Iterable[int]) -> bool:
        """Let the first of ``stores`` lead, moving the leader's replica there if it has none."""
        region = self._state.regions.get(region_id)
        if region is None:
            return False
        wanted = next(iter(stores))
        if region.peer_on(wanted):
            self._state.regions.transfer_leader(region_id, wanted)
        else:
            self._state.regions.move(region_id, region.leader_store, wanted)
        return True


def _one(region: Region | None) -> pdpb_pb2.GetRegionResponse:
    if region is None:
        return pdpb_pb2.GetRegionResponse()
    return pdpb_pb2.GetRegionResponse(region=region.to_pb(), leader=region.leader.to_pb())


def _many(regions: Iterable[Region]) -> list[pdpb_pb2.Region]:
    return [pdpb_pb2.Region(region=region.to_pb(), leader=region.leader.to_pb()) for region in regions]


def _refusal(ranges: Iterable[pdpb_pb2.KeyRange]) -> str | None:
    """Why PD refuses ranges, None if it does not."""
    last_end: bytes | None = None
    for each in ranges:
        if each.end_key and each.start_key > each.end_key:
            return "invalid key range, start key > end key"
        if last_end is not None and (not last_end or each.start_key < last_end):
            return "invalid key range, ranges overlapped"
        last_end = each.end_key
    return None
