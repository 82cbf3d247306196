"""A key of the source that a drill writes while it follows, so that one write at least is known to it."""

from __future__ import annotations

from dataclasses import dataclass

from formats.keys import KeyCodec
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.drill.ledger import Creation, Kind
from tikv_br.errors import CutOverFailed, DrillRemains, UsageError

TTL = 24 * 3600
"""Seconds after which it goes by itself, where the source has TTLs."""


class Canary:
    """The key, while its drill runs."""

    def __init__(self, source: ClusterConfig, keyspace: int, key: bytes, drill: str) -> None:
        cluster = shared_cluster(source)
        self._raw = cluster.raw(keyspace)
        self._key = key
        self._mark = mark(drill)
        self._beats = 0
        self.creation = Creation(Kind.CANARY, f"{cluster.cluster_id}/{keyspace}/{key.hex()}")

    def check(self) -> None:
        """Raise `UsageError` where the key is somebody's."""
        if self._raw.get(self._key) is not None:
            raise UsageError(f"--canary {self._key.hex()}: the source has this key", hint="Name one that it has not.")

    def beat(self) -> None:
        """Write it anew. Raises `CutOverFailed` where somebody else has written it since, and leaves it as it is."""
        found = self._raw.get(self._key)
        if found is not None and not found.startswith(self._mark):
            raise CutOverFailed(
                f"the canary {self._key.hex()} was overwritten by somebody else",
                hint="Their value stays. Name a key that nobody else writes.",
            )
        self._beats += 1
        self._raw.put(self._key, self.value, TTL if self._raw.codec.api_version.has_ttl else 0)

    @property
    def beats(self) -> int:
        """How often it was written."""
        return self._beats

    @property
    def value(self) -> bytes:
        """What was written last."""
        return self._mark + b"%d" % self._beats


def mark(drill: str) -> bytes:
    """What every value of a drill's canary begins with."""
    return f"tikv-br drill {drill} ".encode()


@dataclass(frozen=True, slots=True)
class CanaryRemover:
    """Deletes canaries from the source."""

    source: ClusterConfig

    def remove(self, creation: Creation, drill: str) -> None:
        """Delete it, if its value is the drill's. Raises `DrillRemains` for another's value, and another cluster."""
        cluster_id, keyspace, key = creation.place.split("/")
        cluster = shared_cluster(self.source)
        if cluster.cluster_id != int(cluster_id):
            raise DrillRemains(f"the canary {key} is in cluster {cluster_id}, and the source is {cluster.cluster_id}")
        raw = cluster.raw(KeyCodec(cluster.api_version, int(keyspace)).keyspace_id)
        found = raw.get(bytes.fromhex(key))
        if found is None:
            return
        if not found.startswith(mark(drill)):
            raise DrillRemains(f"the canary {key} of drill {drill} was overwritten: it is left alone")
        raw.delete(bytes.fromhex(key))
