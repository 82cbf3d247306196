"""What can be wrong with a raw request, in TiKV's words (recorded in golden/wire).

A fault surfaces in one of three places: the answer's ``region_error``, its ``error`` text, or, where the answer has no
such field, the ``abort`` text of a single pair, which is the Rust debug form.
"""

from __future__ import annotations

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.playground import region_errors
from tikv_br.playground.region import Region

# File and line that TiKV 9.0.0-beta.2 names in two of its messages.
_SNAPSHOT = "[components/tikv_kv/src/raftstore_impls.rs:86]"
_REGION_SNAPSHOT = "[components/raftstore/src/store/region_snapshot.rs:289]"
_APPLY = "[components/raftstore/src/store/fsm/apply.rs:2006]"

VERSION_NAMES = ("V1", "V1ttl", "V2", "V3")


class RequestFault(Exception):
    """A request refused for good: ``text`` for ``error`` fields, ``debug`` for ``abort`` fields."""

    def __init__(self, text: str, debug: str) -> None:
        super().__init__(text)
        self.text = text
        self.debug = debug


class RegionFault(Exception):
    """A request that came to the wrong place, or at the wrong time."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def api_version_not_matched(command: str, storage: int, request: int) -> RequestFault:
    """The request's API version is not the store's."""
    mine, theirs = VERSION_NAMES[storage], VERSION_NAMES[request]
    return RequestFault(
        f"Api version in request does not match with TiKV storage, cmd: {command}, storage: {mine}, request: {theirs}",
        f"Error(ApiVersionNotMatched {{ cmd: {command}, storage_api_version: {mine}, req_api_version: {theirs} }})",
    )


def invalid_key_mode(command: str, storage: int, key: bytes) -> RequestFault:
    """A V2 key that does not begin with ``r``."""
    mine, text = VERSION_NAMES[storage], key.hex().upper()
    return RequestFault(
        f"Key mode mismatched with the request mode, cmd: {command}, storage: {mine}, key: {text}",
        f'Error(InvalidKeyMode {{ cmd: {command}, storage_api_version: {mine}, key: "{text}" }})',
    )


def invalid_range_mode(command: str, storage: int, start: bytes | None, end: bytes | None) -> RequestFault:
    """A V2 range that is not within ``r``; None where the request gave no end at all."""
    mine = VERSION_NAMES[storage]
    bounds = f"({_option(start)}, {_option(end)})"
    return RequestFault(
        f"Key mode mismatched with the request mode, cmd: {command}, storage: {mine}, range: {bounds}",
        f"Error(InvalidKeyRangeMode {{ cmd: {command}, storage_api_version: {mine}, range: {bounds} }})",
    )


def invalid_cf(cf: str) -> RequestFault:
    """A column family that does not exist."""
    return RequestFault(f"invalid cf name: {cf}", f'Error(InvalidCf("{cf}"))')


def cf_deprecated(cf: str) -> RequestFault:
    """Any column family named in a V2 request."""
    return RequestFault(f"cf is deprecated in API V2, cf name: {cf}", f'Error(CfDeprecated("{cf}"))')


def key_too_large(size: int, limit: int) -> RequestFault:
    """A key to write above ``storage.max-key-size``."""
    return RequestFault(f"max key size exceeded, size: {size}, limit: {limit}", "")


def ttl_not_enabled() -> RequestFault:
    """A put with a TTL to a store without."""
    return RequestFault("ttl is not enabled, but get put request with ttl", "")


def ttls_do_not_match() -> RequestFault:
    """Neither none, nor one, nor as many TTLs as pairs."""
    return RequestFault("The length of ttls does not equal to the length of pairs", "")


def empty_request() -> RequestFault:
    """A write of nothing."""
    return RequestFault("an empty request", "")


def out_of_region(region: Region, key: bytes) -> RequestFault:
    """A V1 point read outside its region, which TiKV does not report as a region error."""
    bounds = f"[{region.start.hex().upper()}, {region.end.hex().upper()})"
    cause = f"Key {key.hex().upper()} is out of [region {region.id}] {bounds}"
    quoted = f'"{_SNAPSHOT}: \\"{_REGION_SNAPSHOT}: {cause}\\""'
    return RequestFault(f"unknown error {quoted}", f"Error(Kv(Error(Other({quoted}))))")


def outside_in_debug_form(region: Region, key: bytes) -> RequestFault:
    """A V2 RawBatchGet outside its region: the region error as text, for want of a better place."""
    error = region_errors.key_not_in_region(region, key)
    fields = (
        f"key: {key.hex().upper()} region_id: {region.id} "
        f"start_key: {region.start.hex().upper()} end_key: {region.end.hex().upper()}"
    )
    return RequestFault(
        error.message, f'Error(Kv(Error(Request(message: "{error.message}" key_not_in_region {{ {fields} }}))))'
    )


def key_outside(region: Region, key: bytes) -> RegionFault:
    """A storage key outside its region."""
    return RegionFault(region_errors.key_not_in_region(region, key))


def invalid_delete_range(start: bytes, end: bytes) -> RegionFault:
    """A delete of an empty or reversed range (storage keys)."""
    message = f'"{_APPLY}: invalid delete range command, start_key: {list(start)}, end_key: {list(end)}"'
    return RegionFault(errorpb_pb2.Error(message=message))


def raft_entry_too_large(region_id: int, size: int) -> RegionFault:
    """A write whose Raft entry is above ``raftstore.raft-entry-max-size``."""
    return RegionFault(
        errorpb_pb2.Error(
            message=f"raft entry is too large, region {region_id}, entry size {size}",
            raft_entry_too_large=errorpb_pb2.RaftEntryTooLarge(region_id=region_id, entry_size=size),
        )
    )


def _option(key: bytes | None) -> str:
    return "None" if key is None else f'Some("{key.hex().upper()}")'
