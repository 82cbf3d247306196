"""Checks of requests in TiKV's order, with TiKV's error messages (recorded in golden/wire)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import region_errors
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable

# Files and lines that TiKV 9.0.0-beta.2 names in its messages.
_SNAPSHOT = "[components/tikv_kv/src/raftstore_impls.rs:86]"
_REGION_SNAPSHOT = "[components/raftstore/src/store/region_snapshot.rs:289]"

VERSION_NAMES = ("V1", "V1ttl", "V2", "V3")
MAX_KEY_SIZE: Final = 8192
"""``storage.max-key-size``: of the RPC key."""
_RAW_MODE: Final = ord("r")
TXN_MODE: Final = ord("x")
_COLUMN_FAMILIES: Final = frozenset({"", "default", "lock", "write"})


class RequestFault(Exception):
    """A request that is refused for good: ``text`` for ``error`` fields, ``debug`` for ``abort`` fields."""

    def __init__(self, text: str, debug: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.debug = debug


class RegionFault(Exception):
    """A request that is answered with a region error."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def out_of_region(region: Region, key: bytes) -> RequestFault:
    """A V1 point read outside its region, which TiKV does not report as a region error."""
    bounds = f"[{region.start.hex().upper()}, {region.end.hex().upper()})"
    cause = f"Key {key.hex().upper()} is out of [region {region.id}] {bounds}"
    quoted = f'"{_SNAPSHOT}: \\"{_REGION_SNAPSHOT}: {cause}\\""'
    return RequestFault(f"unknown error {quoted}", f"Error(Kv(Error(Other({quoted}))))")


def key_outside(region: Region, key: bytes) -> RegionFault:
    """A storage key outside its region."""
    return RegionFault(region_errors.key_not_in_region(region, key))


def check_region(
    regions: RegionTable, context: kvrpcpb_pb2.Context, store_id: int, *, read: bool = False
) -> errorpb_pb2.Error | None:
    """The error that a store returns before it checks a request's keys, or None.

    Order as in TiKV: store, region, (leader for writes,) peer, epoch's version, (leader for reads).
    """
    if context.peer.store_id != store_id:
        return region_errors.store_not_match(context.peer.store_id, store_id)
    region = regions.get(context.region_id)
    mine = region.peer_on(store_id) if region else None
    if region is None or mine is None:
        return region_errors.region_not_found(context.region_id, read=read)
    leading = region.leader_store == store_id
    if not leading and not read:
        return regions.not_leader(region)
    if context.peer.id != mine.id:
        return region_errors.mismatch_peer_id(context.peer.id, mine.id)
    epoch = context.region_epoch
    if epoch.version != region.version:
        return region_errors.epoch_not_match(region, epoch, regions.siblings(region, epoch))
    return None if leading else regions.not_leader(region)


class RequestChecks:
    """The checks of one store. Each raises `RequestFault` or `RegionFault`."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    def version(self, context: kvrpcpb_pb2.Context, command: str, mode: int) -> None:
        """The request must have the store's API version; for V1TTL stores, which have no transactions, that is V1."""
        mine = self._node.api_version
        expected = ApiVersion.V2 if mine is ApiVersion.V2 else ApiVersion.V1
        if context.api_version != expected.value or (mine is ApiVersion.V1TTL and mode == TXN_MODE):
            storage, request = VERSION_NAMES[mine], VERSION_NAMES[context.api_version]
            versions = f"storage_api_version: {storage}, req_api_version: {request}"
            raise RequestFault(
                "Api version in request does not match with TiKV storage, "
                f"cmd: {command}, storage: {storage}, request: {request}",
                f"Error(ApiVersionNotMatched {{ cmd: {command}, {versions} }})",
            )

    def keys(self, context: kvrpcpb_pb2.Context, command: str, keys: Iterable[bytes], mode: int = _RAW_MODE) -> None:
        """Version, and that V2 keys are of the request's mode."""
        self.version(context, command, mode)
        if self._node.api_version is ApiVersion.V2:
            for key in keys:
                if not key or key[0] != mode:
                    text = key.hex().upper()
                    raise RequestFault(
                        f"Key mode mismatched with the request mode, cmd: {command}, storage: V2, key: {text}",
                        f'Error(InvalidKeyMode {{ cmd: {command}, storage_api_version: V2, key: "{text}" }})',
                    )

    def ranges(
        self,
        context: kvrpcpb_pb2.Context,
        command: str,
        ranges: Iterable[tuple[bytes | None, bytes | None]],
        mode: int = _RAW_MODE,
    ) -> None:
        """Version, and that V2 ranges lie within a mode (see `_mode_of`); ends are as the command checks them, None = not given."""
        self.version(context, command, mode)
        if self._node.api_version is ApiVersion.V2:
            for start, end in ranges:
                if _mode_of(start, end) != mode:
                    bounds = f"({_option(start)}, {_option(end)})"
                    raise RequestFault(
                        f"Key mode mismatched with the request mode, cmd: {command}, storage: V2, range: {bounds}",
                        f"Error(InvalidKeyRangeMode {{ cmd: {command}, storage_api_version: V2, range: {bounds} }})",
                    )

    def column_family(self, cf: str) -> None:
        """V2 requests name none, the others one that TiKV has."""
        if self._node.api_version is ApiVersion.V2:
            if cf:
                raise RequestFault(f"cf is deprecated in API V2, cf name: {cf}", f'Error(CfDeprecated("{cf}"))')
        elif cf not in _COLUMN_FAMILIES:
            raise RequestFault(f"invalid cf name: {cf}", f'Error(InvalidCf("{cf}"))')

    def key_sizes(self, keys: Iterable[bytes]) -> None:
        """Raise `RequestFault` if a key to write is larger than `MAX_KEY_SIZE`."""
        for key in keys:
            if len(key) > MAX_KEY_SIZE:
                raise RequestFault(f"max key size exceeded, size: {len(key)}, limit: {MAX_KEY_SIZE}")

    def region(self, context: kvrpcpb_pb2.Context, *, read: bool) -> Region:
        """The request's region, which this store must lead, at the epoch sent."""
        error = check_region(self._node.regions, context, self._node.store_id, read=read)
        region = self._node.regions.get(context.region_id)
        if error is not None:
            raise RegionFault(error)
        if region is None:  # merged between the two calls
            raise RegionFault(region_errors.region_not_found(context.region_id, read=read))
        return region

    def region_to_write(self, context: kvrpcpb_pb2.Context, *, snapshot: bool = False) -> Region:
        """Check as `region`; V2 also requires synced timestamps, and words misses as reads do.

        ``snapshot``: the command takes one in every version.
        """
        has_timestamps = self._node.has_timestamps
        region = self.region(context, read=has_timestamps or snapshot)
        if has_timestamps and not self._node.regions.is_synced(region.id):
            raise RegionFault(region_errors.max_timestamp_not_synced(region.id))
        return region


def _mode_of(start: bytes | None, end: bytes | None) -> int | None:
    """The first byte of a range's keys; None if they may differ (``parse_range_mode`` of TiKV's ``components/api_version``).

    An end outside the mode is taken only as one byte, the next one. A memcomparable end, as transactional commands check it, is never
    that short. The ends come as sent: a reverse scan sends the upper one first.
    """
    if not start or not end:
        return None
    return start[0] if start[0] == end[0] or end == (start[0] + 1).to_bytes(2, "big").lstrip(b"\0") else None


def _option(key: bytes | None) -> str:
    return "None" if key is None else f'Some("{key.hex().upper()}")'


def check_within(region: Region, storage_keys: Iterable[bytes]) -> None:
    """All storage keys inside the region. Raises `RegionFault`."""
    for key in storage_keys:
        if not region.contains(key):
            raise key_outside(region, key)
