"""Stores as values, and what the cluster as a whole is."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from formats.api_version import ApiVersion
from tikv_br.cluster.http_json import get_json
from tikv_br.cluster.pb import metapb_pb2
from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, RequestRefused


class StoreState(enum.IntEnum):
    """Numbers as in ``metapb.StoreState``."""

    UP = 0
    OFFLINE = 1
    """On its way out: it still serves until its data has moved."""
    TOMBSTONE = 2


@dataclass(frozen=True, slots=True)
class Store:
    """A TiKV process as PD knows it. Addresses are ``host:port``."""

    id: int
    address: str
    status_address: str
    state: StoreState
    version: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, store: metapb_pb2.Store) -> Store:
        """From the wire."""
        return cls(
            id=store.id,
            address=store.address,
            status_address=store.status_address,
            state=StoreState(store.state),
            version=store.version,
            labels=tuple((label.key, label.value) for label in store.labels),
        )

    @property
    def serves(self) -> bool:
        """Whether it holds RawKV data: not gone, and no TiFlash."""
        return self.state is not StoreState.TOMBSTONE and not self.is_tiflash

    @property
    def is_tiflash(self) -> bool:
        """Whether this is TiFlash, which knows no RawKV."""
        return ("engine", "tiflash") in self.labels or ("engine", "tiflash_compute") in self.labels


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What a plan must know of a cluster."""

    cluster_id: int
    version: str
    """Cluster version of PD, such as ``8.5.2``."""
    api_version: ApiVersion
    stores: tuple[Store, ...]
    """All that hold data; `StoreState.OFFLINE` ones too."""


def detect_api_version(
    stores: Iterable[Store], tls: TlsFiles, timeout: float, gone: Callable[[], Collection[int]] = frozenset
) -> ApiVersion:
    """The API version that all stores are configured with, read from their ``/config``.

    A store that does not answer within `timeout` seconds is left out if it is `gone`: if PD hears nothing of it either.
    Raises `ClusterUnfit` when the stores disagree or there is none; `ClusterUnreachable`, `ClusterTlsError`.
    """
    found: dict[int, ApiVersion] = {}
    silence: ClusterUnreachable | None = None
    for store in stores:
        try:
            found[store.id] = store_api_version(store, tls, timeout)
        except ClusterUnreachable as error:
            if store.id not in gone():
                raise
            silence = error
    if silence is not None and not found:
        raise silence
    versions = set(found.values())
    if len(versions) > 1:
        each = ", ".join(f"store {store_id}: {version.label}" for store_id, version in sorted(found.items()))
        raise ClusterUnfit(f"the stores disagree on the API version: {each}")
    if not versions:
        raise ClusterUnfit("the cluster has no store that is up")
    return versions.pop()


def store_api_version(store: Store, tls: TlsFiles, timeout: float) -> ApiVersion:
    """The API version of one store, from its ``storage.api-version`` and ``storage.enable-ttl``."""
    config = get_json(f"{tls.scheme}://{store.status_address}/config", tls, timeout)
    storage: Any = config.get("storage") if isinstance(config, dict) else None
    if not isinstance(storage, dict):
        raise RequestRefused(f"store {store.id} ({store.status_address}): its /config has no storage section")
    number = storage.get("api-version", 1)
    if number == 2:
        return ApiVersion.V2
    if number not in {0, 1}:
        raise ClusterUnfit(f"store {store.id} ({store.status_address}): unknown storage.api-version {number}")
    return ApiVersion.V1TTL if storage.get("enable-ttl") else ApiVersion.V1
