"""What a store checks of a raw request before it touches data, in TiKV's order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.playground import raw_faults
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_faults import RegionFault
from tikv_br.playground.region import Region
from tikv_br.playground.region_errors import max_timestamp_not_synced, region_not_found

MAX_KEY_SIZE: Final = 8192
"""``storage.max-key-size``: of the RPC key."""
_RAW_MODE: Final = ord("r")
_COLUMN_FAMILIES: Final = frozenset({"", "default", "lock", "write"})


class RawChecks:
    """The checks of one store. Each raises `RequestFault` or `RegionFault`."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    def version(self, context: kvrpcpb_pb2.Context, command: str) -> None:
        """The request must speak the store's API version; V1TTL stores speak V1."""
        mine = self._node.api_version
        expected = ApiVersion.V2 if mine is ApiVersion.V2 else ApiVersion.V1
        if context.api_version != expected.value:
            raise raw_faults.api_version_not_matched(command, mine, context.api_version)

    def keys(self, context: kvrpcpb_pb2.Context, command: str, keys: Iterable[bytes]) -> None:
        """Version, and that V2 keys are of raw mode."""
        self.version(context, command)
        if self._node.api_version is ApiVersion.V2:
            for key in keys:
                if not key or key[0] != _RAW_MODE:
                    raise raw_faults.invalid_key_mode(command, ApiVersion.V2, key)

    def ranges(
        self, context: kvrpcpb_pb2.Context, command: str, ranges: Iterable[tuple[bytes | None, bytes | None]]
    ) -> None:
        """Version, and that V2 ranges lie within raw mode: both ends given, the upper one within it or ``s``."""
        self.version(context, command)
        if self._node.api_version is ApiVersion.V2:
            for start, end in ranges:
                if not start or not end or start[0] != _RAW_MODE or (end[0] != _RAW_MODE and end != b"s"):
                    raise raw_faults.invalid_range_mode(command, ApiVersion.V2, start, end)

    def column_family(self, cf: str) -> None:
        """V2 takes none, the others those that TiKV has."""
        if self._node.api_version is ApiVersion.V2:
            if cf:
                raise raw_faults.cf_deprecated(cf)
        elif cf not in _COLUMN_FAMILIES:
            raise raw_faults.invalid_cf(cf)

    def key_sizes(self, keys: Iterable[bytes]) -> None:
        """No key to write above `MAX_KEY_SIZE`."""
        for key in keys:
            if len(key) > MAX_KEY_SIZE:
                raise raw_faults.key_too_large(len(key), MAX_KEY_SIZE)

    def region(self, context: kvrpcpb_pb2.Context, *, read: bool) -> Region:
        """The region asked for, which this store leads at the epoch sent."""
        error = self._node.regions.check(context, self._node.store_id, read=read)
        region = self._node.regions.get(context.region_id)
        if error is not None:
            raise RegionFault(error)
        if region is None:  # it went between the two calls
            raise RegionFault(region_not_found(context.region_id, read=read))
        return region

    def region_to_write(self, context: kvrpcpb_pb2.Context, *, snapshot: bool = False) -> Region:
        """As `region`; V2 asks for synced timestamps, of a snapshot, and so words misses as reads do.

        ``snapshot``: the command takes one in every version.
        """
        is_v2 = self._node.api_version is ApiVersion.V2
        region = self.region(context, read=is_v2 or snapshot)
        if is_v2 and not self._node.regions.is_synced(region.id):
            raise RegionFault(max_timestamp_not_synced(region.id))
        return region


def within(region: Region, storage_keys: Iterable[bytes]) -> None:
    """All storage keys inside the region. Raises `RegionFault`."""
    for key in storage_keys:
        if not region.contains(key):
            raise raw_faults.key_outside(region, key)


def seekable(region: Region, bound: bytes) -> None:
    """A scan may begin inside the region or right at its end. Raises `RegionFault`."""
    if bound < region.start or (region.end and bound > region.end):
        raise raw_faults.key_outside(region, bound)
