"""Guards of requests that would crash a store, which are checked before they are sent."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.errors import ClusterUnfit, DangerousRequest
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import decode, encode
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.formats.keys.text import show_both, show_key

SST_CFS = frozenset({"default", "write"})
"""Column families that a store's importer knows; it panics at any other."""


def check_get_ttl(api_version: ApiVersion) -> None:
    """RawGetKeyTTL makes a store without TTL panic."""
    if not api_version.has_ttl:
        raise DangerousRequest("RawGetKeyTTL would crash a store without TTL")


def check_backup(request: brpb_pb2.BackupRequest, regions: Sequence[Region] = ()) -> None:
    """Raise `DangerousRequest` for a Backup of no range (start equal to end), which aborts a store.

    One of transactions needs the regions that PD has just returned for its range: for their bounds see `check_bounds`.
    """
    ranges = [KeyRange(request.start_key, request.end_key)]
    ranges += [KeyRange(sub.start_key, sub.end_key) for sub in request.sub_ranges]
    for span in ranges:
        if span.is_empty:
            raise DangerousRequest(f"a Backup of the empty range {span} would crash the store")
        if not request.is_raw_kv:
            if unknown := gaps(_bounds(span), [KeyRange(region.start, region.end) for region in regions]):
                raise DangerousRequest(
                    f"a Backup of transactions in {span} could crash the store: the regions of {unknown[0]} are unknown"
                )
            check_bounds(span, regions)


def check_bounds(span: KeyRange, regions: Iterable[Region]) -> None:
    """Raise `ClusterUnfit` if a region's bound within a range of transactional rows is not memcomparable.

    A store that backs up transactions decodes the bounds that do not lie outside of the range, and aborts at such a one.
    """
    inside = _bounds(span)
    for region in regions:
        for bound in (region.start, region.end):
            if bound <= inside.start or (inside.end and bound >= inside.end):
                continue
            try:
                decode(bound)
            except DamagedBytes as error:
                raise ClusterUnfit(
                    f"a Backup of transactions in {span} would crash a store: the bound {show_both(bound)} of region "
                    f"{region.id} is not the key of a transactional row: {error}",
                    hint="The cluster also has raw data in this range. Back up ranges that exclude it, such as by --prefix.",
                ) from None


def _bounds(span: KeyRange) -> KeyRange:
    return KeyRange(*(encode(key) if key else b"" for key in (span.start, span.end)))


def check_sst(meta: import_sstpb_pb2.SSTMeta) -> None:
    """Raise `DangerousRequest` for metadata that would crash a store: unknown column family, invalid UUID or range.

    The file itself is checked where it is read (`tikv_br.formats.sst`): a store dies of a wrong one at ingest.
    """
    if meta.cf_name not in SST_CFS:
        raise DangerousRequest(f"an SST for column family {meta.cf_name!r} would crash the store")
    if len(meta.uuid) != len(uuid.NAMESPACE_DNS.bytes):
        raise DangerousRequest(f"an SST needs a UUID of 16 bytes, not {len(meta.uuid)}")
    if meta.range.end and meta.range.start > meta.range.end:
        raise DangerousRequest(
            f"an SST with the reversed range {show_key(meta.range.start)} to {show_key(meta.range.end)}"
        )
    if not meta.region_id or not meta.HasField("region_epoch"):
        raise DangerousRequest("an SST without its region and epoch could land in another region")
