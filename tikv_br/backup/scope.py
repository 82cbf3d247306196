"""What a backup covers: from keyspaces and user keys to RPC ranges of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from formats.keys import MAX_KEYSPACE, PREFIX_SIZE, RAW_MODE, RAW_MODE_END, KeyCodec
from tikv_br.backup.options import BackupOptions
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import ConversionUnsupported, UsageError
from tikv_br.proof.ranges import codec_of

ALL = "all"
"""The word for every keyspace that holds data."""


def source_ranges(options: BackupOptions, cluster: Cluster, target: ApiVersion) -> tuple[KeyRange, ...]:
    """What is wanted of the cluster, by key and without overlap; each range lies in one keyspace.

    Raises `UsageError` for keyspaces that there are none of, `ConversionUnsupported` where ``target`` would mix several.
    """
    keyspaces = _keyspaces(options.keyspaces, cluster)
    if len(keyspaces) > 1 and target is not ApiVersion.V2:
        raise ConversionUnsupported(
            f"keyspaces {', '.join(map(str, keyspaces))} would be mixed, as API {target.label} has none",
            hint="Back them up one by one, each to a path of its own.",
        )
    codecs = [KeyCodec(cluster.api_version, keyspace) for keyspace in keyspaces]
    ranges = options.ranges or ((b"", b""),)
    return tuple(sorted(KeyRange(*codec.rpc_range(*each)) for codec in codecs for each in ranges))


def keyspaces_of(api_version: ApiVersion, ranges: tuple[KeyRange, ...]) -> tuple[int, ...]:
    """The keyspaces that RPC ranges of ``api_version`` lie in; none before API V2."""
    if api_version is not ApiVersion.V2:
        return ()
    return tuple(sorted({codec_of(api_version, each).keyspace_id for each in ranges}))


def keyspaces_with_data(raw: RawClient) -> Iterator[int]:
    """The ids of all keyspaces that hold a live key, whether PD knows them or not: one seek each."""
    start: bytes | None = RAW_MODE + bytes(PREFIX_SIZE - 1)
    while start is not None:
        key = raw.first_rpc_key(start, RAW_MODE_END)
        if key is None:
            return
        found = int.from_bytes(key[1:PREFIX_SIZE], "big")
        yield found
        start = RAW_MODE + (found + 1).to_bytes(PREFIX_SIZE - 1, "big") if found < MAX_KEYSPACE else None


def _keyspaces(names: tuple[str, ...], cluster: Cluster) -> list[int]:
    if not names:
        return [0]
    if cluster.api_version is not ApiVersion.V2:
        raise UsageError(f"--keyspace: a cluster of API {cluster.api_version.label} has no keyspaces")
    found: set[int] = set()
    for name in names:
        if name == ALL:
            found.update(keyspaces_with_data(cluster.raw()))
        else:
            found.add(_keyspace(name, cluster))
    return sorted(found) or [0]


def _keyspace(name: str, cluster: Cluster) -> int:
    """The id that was given, or that PD has for a name. Raises `UsageError`."""
    try:
        codec = KeyCodec(ApiVersion.V2, int(name)) if name.isdecimal() else None
    except UnsupportedFormat as error:
        raise UsageError(f"--keyspace: {error}") from None
    return cluster.pd.keyspace_id(name) if codec is None else codec.keyspace_id
