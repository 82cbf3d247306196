"""What the errors in a store's answers to Backup mean: fatal ones become ours, the others say how long to wait."""

from __future__ import annotations

from typing import NamedTuple

from tikv_br.cluster import retry
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.region_errors import Action, RegionErrorSeen
from tikv_br.cluster.retry import Backoff
from tikv_br.errors import (
    ApiVersionMismatch,
    RequestRefused,
    StorageDenied,
    StorageFull,
    StorageObjectMissing,
    StorageReadOnly,
    TikvBrError,
)

STORAGE_TROUBLE = Backoff("stores cannot write to the storage", 0.5, 5.0, jitter=True)
WRITES_ITSELF = (
    "The stores write there themselves: a local path must be one folder on the machines of all stores and here, a bucket "
    "must be within their reach and rights. --engine scan writes from here alone."
)

_FATAL: tuple[tuple[type[TikvBrError], tuple[str, ...]], ...] = (
    (ApiVersionMismatch, ("invalid backup version",)),
    (
        StorageDenied,
        (
            "permissiondenied",
            "accessdenied",
            "access denied",
            "invalidaccesskeyid",
            "signaturedoesnotmatch",
            "403 forbidden",
            "find aws credentials",  # as TiKV says it
        ),
    ),
    (StorageFull, ("storagefull", "code: 28,", "no space left")),
    (StorageReadOnly, ("readonlyfilesystem", "code: 30,", "read-only file system")),
    (StorageObjectMissing, ("kind: notfound", "nosuchbucket", "bad storage backend")),
)
"""By what stands in the message in lower case: no retry cures these."""


class Trouble(NamedTuple):
    """Why a part is still missing, and how long to wait before it is asked for again."""

    backoff: Backoff
    cause: str
    at_least: float = 0.0
    """Seconds that the store asked for."""


def trouble_of(error: brpb_pb2.Error, who: str) -> Trouble:
    """What an error of store ``who`` asks for. Raises what no retry cures, as `StorageError` or `ClusterError`."""
    if error.HasField("region_error"):
        seen = RegionErrorSeen(error.region_error)
        if seen.reaction.action is Action.FAIL:
            raise RequestRefused(f"{who} does not back up: {seen}")
        asked = error.region_error.server_is_busy.backoff_ms / 1000
        return Trouble(seen.reaction.backoff, f"{who}: {seen}", asked)
    if error.HasField("cluster_id_error"):
        raise RequestRefused(f"{who} is of cluster {error.cluster_id_error.current}: {error.msg}")
    lowered = error.msg.lower()
    for kind, marks in _FATAL:
        if any(mark in lowered for mark in marks):
            hint = None if kind is ApiVersionMismatch else WRITES_ITSELF
            raise kind(f"{who} does not back up: {error.msg}", hint=hint)
    return Trouble(STORAGE_TROUBLE, f"{who}: {error.msg or 'an error without a message'}")


def worst(troubles: list[Trouble]) -> Trouble:
    """The one that needs the longest wait; where nothing was said, the leaders have moved."""
    silent = Trouble(retry.REGION_MISS, "no store answered for a part of the interval: its leader has moved")
    return max(troubles, key=lambda trouble: (trouble.at_least, trouble.backoff.base), default=silent)
