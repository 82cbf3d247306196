"""Which API version can be backed up as which, and from which cluster version on. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import NamedTuple

from formats.api_version import ApiVersion
from tikv_br.errors import ClusterUnfit, ConversionUnsupported

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


class Loss(enum.StrEnum):
    """What a conversion can lose; the value is the word of ``--allow-loss``."""

    TTL = "ttl"
    TS = "ts"
    KEYSPACE = "keyspace"

    @property
    def meaning(self) -> str:
        """In words."""
        return _MEANINGS[self]


_MEANINGS = {
    Loss.TTL: "when keys expire: they would stay for ever",
    Loss.TS: "the timestamps of keys",
    Loss.KEYSPACE: "the keyspace that keys lie in",
}
_LOSES = {
    (V1TTL, V1): (Loss.TTL,),
    (V2, V1): (Loss.TTL, Loss.TS, Loss.KEYSPACE),
    (V2, V1TTL): (Loss.TS, Loss.KEYSPACE),
}


class Feature(NamedTuple):
    """Something that a cluster can do from a version on."""

    name: str
    since: tuple[int, int, int]


CONVERSION = Feature("conversion between API versions", (6, 1, 0))
CHECKSUM = Feature("RawChecksum (--checksum)", (6, 1, 1))
BACKUP_TS = Feature("backup-ts", (6, 2, 0))


def require_conversion(source: ApiVersion, target: ApiVersion, allowed: Collection[Loss] = ()) -> None:
    """Raise `ConversionUnsupported` where backing up ``source`` as ``target`` loses what is not ``allowed`` to be lost."""
    lost = _LOSES.get((source, target), ())
    if set(lost) - set(allowed):
        words = ",".join(lost)
        raise ConversionUnsupported(
            f"the cluster has API {source.label}; backed up as {target.label} it loses "
            + ", ".join(f"{loss.meaning} ({loss.value})" for loss in lost),
            hint=f"Choose a --dst-api-version that keeps all data, or give these up by --allow-loss {words}.",
        )


def require_feature(cluster_version: str, feature: Feature) -> None:
    """Raise `ClusterUnfit` where a cluster of this version (``6.1.0``, ``v8.5.2-alpha``) lacks the feature."""
    if release(cluster_version) < feature.since:
        since = ".".join(map(str, feature.since))
        raise ClusterUnfit(
            f"{feature.name} needs a cluster of version {since} or newer, this one is {cluster_version}",
            hint="Upgrade the cluster, or leave out the flag that asks for it.",
        )


def release(version: str) -> tuple[int, int, int]:
    """The three numbers of a version; pre-release and build are ignored. Raises `ClusterUnfit`."""
    match = re.match(r"\s*\"?v?(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ClusterUnfit(f"the cluster's version {version!r} is not of the form 6.1.0")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch
