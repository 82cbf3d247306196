"""What part of a keyspace a feed follows."""

from __future__ import annotations

from dataclasses import dataclass

from formats.errors import UnsupportedFormat
from formats.keys import KeyCodec
from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import UsageError


@dataclass(frozen=True, slots=True)
class Span:
    """RPC keys [start, end) of one keyspace of API V2; see `formats.keys.KeyCodec.rpc_range`."""

    start: bytes
    end: bytes


def keyspace_codec(cluster: Cluster, keyspace: str) -> KeyCodec:
    """The codec of a keyspace by its id or name, ``""`` being the default one. Raises `UsageError`, `ClusterError`."""
    try:
        return KeyCodec(cluster.api_version, cluster.pd.keyspace_id(keyspace))
    except UnsupportedFormat as error:
        raise UsageError(f"--keyspace: {error}") from None
