"""Whether a cluster can be compared with a backup at all."""

from __future__ import annotations

from formats.api_version import ApiVersion
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import ApiVersionMismatch, ClusterUnfit

CHECKSUM_SINCE = (6, 1, 1)
"""The first cluster version that answers RawChecksum."""


def check_same_encoding(backup: ApiVersion, info: ClusterInfo) -> None:
    """Raise `ApiVersionMismatch` for a backup in another encoding than the cluster's."""
    if backup is not info.api_version:
        raise ApiVersionMismatch(
            f"the backup is in API {backup.label} encoding, the cluster runs API {info.api_version.label}"
        )


def check_gives_checksums(info: ClusterInfo, hint: str) -> None:
    """Raise `ClusterUnfit` for a cluster that does not answer RawChecksum."""
    if _version(info.version) < CHECKSUM_SINCE:
        raise ClusterUnfit(f"a cluster of version {info.version} cannot compute checksums", hint=hint)


def _version(text: str) -> tuple[int, ...]:
    """The numbers of ``9.0.0-beta.2``: 9, 0, 0."""
    return tuple(
        int(part) for part in text.split("-", maxsplit=1)[0].split("+", maxsplit=1)[0].split(".") if part.isdigit()
    )
