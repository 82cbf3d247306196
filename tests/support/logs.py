"""Log archives written without a sync, of what a playground's RocksDB holds or of nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tests.support.history import History
from tikv_br.archive.log import LogSource
from tikv_br.archive.records import InexactPeriod, LogDescription
from tikv_br.archive.writer import LogWriter
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

LOG_ID = "default"


def write_log(
    place: StorageLocation,
    cluster_id: int,
    start_ts: int,
    ends: Sequence[int],
    versions: History | None = None,
    inexact: Sequence[tuple[int, int]] = (),
    log_id: str = LOG_ID,
    user_range: KeyRange = EVERY_KEY,
) -> LogSource:
    """Write the versions of keyspace 0 that are newer than ``start_ts``: one segment up to each of ``ends``."""
    codec = KeyCodec(ApiVersion.V2)
    span = codec.rpc_range(user_range)
    description = LogDescription(log_id, "0.1", cluster_id, ApiVersion.V2, 0, (span,), 0, 0, has_checkpoint=False)
    writer = LogWriter(open_store(place), description, span)
    writer.start(start_ts)
    for period in inexact:
        writer.mark_inexact(InexactPeriod(span.start, span.end, *period))
    for begin, end in zip((start_ts, *ends), ends, strict=False):
        rows = [
            {
                "key": key,
                "value": each.value or b"",
                "expire_ts": each.expire_ts,
                "ts": each.ts,
                "deleted": each.value is None,
            }
            for key, found in (versions or {}).items()
            for each in found
            if begin < each.ts <= end
        ]
        writer.append(pa.RecordBatch.from_pylist(rows, SCHEMA))
        writer.flush(end)
    return LogSource(place, log_id)
