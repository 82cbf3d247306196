"""Requests that kill a store, refused before they are sent (seen on running servers).

A store does not answer these with an error: it aborts, and some of them abort it again at every restart.
"""

from __future__ import annotations

import uuid

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2
from tikv_br.errors import DangerousRequest

SST_CFS = frozenset({"default", "write"})
"""Column families that a store's importer knows; it panics at any other."""


def check_get_ttl(api_version: ApiVersion) -> None:
    """RawGetKeyTTL makes a store without TTL panic."""
    if not api_version.has_ttl:
        raise DangerousRequest("RawGetKeyTTL to a store without TTL would kill it")


def check_backup(request: brpb_pb2.BackupRequest) -> None:
    """Backup of no range (start equal to end), or of transactions where there is raw data, aborts a store."""
    if not request.is_raw_kv:
        raise DangerousRequest("a Backup without is_raw_kv would kill a store that holds raw data")
    ranges = [(request.start_key, request.end_key)]
    ranges += [(sub.start_key, sub.end_key) for sub in request.sub_ranges]
    for start, end in ranges:
        if end and start >= end:
            raise DangerousRequest(f"a Backup of the empty range [{start.hex()}, {end.hex()}) would kill the store")


def check_sst(meta: import_sstpb_pb2.SSTMeta) -> None:
    """What an importer takes on trust: a known column family, a real UUID, and a range that is one.

    The file itself is checked where it is read (`formats.sst`): a store dies of a wrong one at ingest.
    """
    if meta.cf_name not in SST_CFS:
        raise DangerousRequest(f"an SST for column family {meta.cf_name!r} would kill the store")
    if len(meta.uuid) != len(uuid.NAMESPACE_DNS.bytes):
        raise DangerousRequest(f"an SST needs a UUID of 16 bytes, not {len(meta.uuid)}")
    if meta.range.end and meta.range.start > meta.range.end:
        raise DangerousRequest(f"an SST with the reversed range {meta.range.start.hex()} to {meta.range.end.hex()}")
    if not meta.region_id or not meta.HasField("region_epoch"):
        raise DangerousRequest("an SST without its region and epoch could land in another region")
