"""A changefeed and its sink: whether they can be, where it begins, and what is only another address."""

from __future__ import annotations

from dataclasses import replace

from incremental.group.model import ChangefeedInfo
from incremental.handover import Start, resolve
from incremental.sinks.open import Origin, SinkOptions, open_sink
from incremental.sinks.url import parse
from incremental.span import keyspace_codec
from tikv_br.cluster.cluster import Cluster


def resolved(asked: ChangefeedInfo, source: Cluster, keyspace: str, start: Start, sink: SinkOptions) -> ChangefeedInfo:
    """A changefeed with its keyspace (id or name) and its start; its sink answers and is fit for it.

    Raises `UsageError`, `ClusterUnfit` for a source without a feed, `SafePointError`, other `ClusterError`, `StorageError`,
    `BackupSetError` for a backup to start from.
    """
    codec = keyspace_codec(source, keyspace)
    info = replace(asked, keyspace_id=codec.keyspace_id)
    with open_sink(parse(asked.sink), Origin(source.cluster_id, codec.keyspace_id), sink) as opened:
        return replace(info, place=opened.place, start_ts=resolve(start, source, info.range))


def moved(info: ChangefeedInfo, url: str, source: Cluster, sink: SinkOptions) -> ChangefeedInfo:
    """A changefeed with another address of its sink. Raises `SyncStateMismatch` where that is another sink, `ClusterError`."""
    with open_sink(parse(url), Origin(source.cluster_id, info.keyspace_id), sink) as opened:
        info.check_place(opened.place)
    return replace(info, sink=url)
