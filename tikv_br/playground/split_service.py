"""SplitRegion, as restores ask for it."""

from __future__ import annotations

from typing import Final

from formats import mce
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.playground import region_errors
from tikv_br.playground.encoding import Encoding
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_faults import RegionFault
from tikv_br.playground.region import Region

_NO_KEYS: Final = '"[components/raftstore/src/store/util.rs:1873]: [region {region}] {peer} no split key is specified."'
_NO_VALID_KEY: Final = (
    "Coprocessor [components/raftstore/src/coprocessor/split_observer.rs:153]: no valid key found for split."
)


class SplitService:
    """Splits the regions that one store leads."""

    def __init__(self, node: StoreNode, encoding: Encoding) -> None:
        self._node = node
        self._encoding = encoding

    def split(self, request: kv.SplitRegionRequest) -> kv.SplitRegionResponse:
        """Split at the keys given, the original region keeping the rightmost piece. Raises `RegionFault`."""
        keys = self._physical(request)
        region = self._led(request.context)
        self._validate(region, request.context, keys)
        pieces = self._node.regions.split(region.id, keys)
        if len(pieces) == 1:
            # TiKV has taken ids from PD before it finds out.
            self._node.regions.alloc_id(len(keys) * (1 + len(region.peers)))
            raise RegionFault(errorpb_pb2.Error(message=_NO_VALID_KEY))
        metas = [piece.to_pb() for piece in pieces]
        left, right = metas if len(metas) == 2 else (None, None)
        return kv.SplitRegionResponse(left=left, right=right, regions=metas)

    def _physical(self, request: kv.SplitRegionRequest) -> list[bytes]:
        """Split keys as region bounds: raw keys in the store's own form, others memcomparable in every version."""
        keys = list(request.split_keys) or ([request.split_key] if request.split_key else [])
        return [self._encoding.bound(key) if request.is_raw_kv else mce.encode(key) for key in keys]

    def _led(self, context: kv.Context) -> Region:
        region = self._node.regions.get(context.region_id)
        if region is None or region.peer_on(self._node.store_id) is None:
            raise RegionFault(region_errors.region_not_found(context.region_id, read=False))
        if region.leader_store != self._node.store_id:
            raise RegionFault(region_errors.not_leader(region.id, region.leader))
        return region

    def _validate(self, region: Region, context: kv.Context, keys: list[bytes]) -> None:
        if not keys:
            message = _NO_KEYS.format(region=region.id, peer=region.leader.id)
            raise RegionFault(errorpb_pb2.Error(message=message))
        if context.region_epoch.version != region.version:
            raise RegionFault(region_errors.epoch_not_match(region, context.region_epoch, [region], split=True))
        for key in keys:
            if not region.contains(key):
                raise RegionFault(region_errors.key_not_in_region(region, key))
