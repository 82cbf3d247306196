"""The stores of a cluster, its version and its API version."""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.pb import metapb_pb2
from tikv_br.cluster.pd_http import request_json
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, RequestRefused
from tikv_br.formats.api_version import V3_NUMBER, V3_REFUSED, ApiVersion
from tikv_br.retry import STORE_UNREACHABLE, RetryPolicy

THREADS = 16
"""Stores that are asked at the same time."""
LATE_SECONDS = 2.0
"""How long to wait for the next store's answer once one has answered."""


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


def detect_api_version(stores: Sequence[Store], tls: TlsFiles, timeout: float, retry_budget: float = 0.0) -> ApiVersion:
    """The API version that the stores are configured with, read from the ``/config`` of each.

    Stores that are silent do not matter while another one answers: one that comes back with another API version refuses
    our requests. While all are silent they are asked again, for `retry_budget` seconds. One request may take
    `timeout` seconds.

    Raises `ClusterUnfit` when the stores disagree or there is none, `RetryBudgetExhausted` when all stay silent,
    `ClusterTlsError`, `RequestRefused`.
    """
    if not stores:
        raise ClusterUnfit("the cluster has no store that is up")
    found = RetryPolicy(retry_budget).run(
        "API version of the stores",
        lambda: _ask_stores(stores, tls, timeout),
        STORE_UNREACHABLE,
        ClusterUnreachable,
    )
    versions = set(found.values())
    if len(versions) > 1:
        each = ", ".join(f"store {store_id}: {version.label}" for store_id, version in sorted(found.items()))
        raise ClusterUnfit(f"the stores disagree on the API version: {each}")
    return versions.pop()


def _ask_stores(stores: Sequence[Store], tls: TlsFiles, timeout: float) -> dict[int, ApiVersion]:
    """The API versions by store id; waits only `LATE_SECONDS` for silent stores. Raises `ClusterUnreachable` if all are."""
    open_questions: queue.SimpleQueue[Store] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Store, ApiVersion | ClusterError]] = queue.SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                store = open_questions.get_nowait()
                try:
                    answers.put((store, store_api_version(store, tls, timeout)))
                except ClusterError as error:
                    answers.put((store, error))

    for store in stores:
        open_questions.put(store)
    for _ in range(min(len(stores), THREADS)):
        threading.Thread(target=ask, name="store-config", daemon=True).start()  # one that hangs must not delay the exit
    found: dict[int, ApiVersion] = {}
    silence: list[str] = []
    with contextlib.suppress(queue.Empty):
        for _ in stores:
            store, answer = answers.get(timeout=LATE_SECONDS if found else None)
            if isinstance(answer, ApiVersion):
                found[store.id] = answer
            elif isinstance(answer, ClusterUnreachable):
                silence.append(answer.message)
            else:
                raise answer
    if not found:
        raise ClusterUnreachable("; ".join(silence))
    return found


def store_api_version(store: Store, tls: TlsFiles, timeout: float) -> ApiVersion:
    """The API version of one store, from its ``storage.api-version`` and ``storage.enable-ttl``."""
    config = request_json("GET", f"{tls.scheme}://{store.status_address}/config", tls, timeout)
    storage: Any = config.get("storage") if isinstance(config, dict) else None
    if not isinstance(storage, dict):
        raise RequestRefused(f"store {store.id} ({store.status_address}): its /config has no storage section")
    number = storage.get("api-version", 1)
    if number == 2:
        return ApiVersion.V2
    if number == V3_NUMBER:
        raise ClusterUnfit(f"store {store.id} ({store.status_address}) has storage.api-version 3: {V3_REFUSED}")
    if number not in {0, 1}:
        raise ClusterUnfit(f"store {store.id} ({store.status_address}): unsupported storage.api-version {number}")
    return ApiVersion.V1TTL if storage.get("enable-ttl") else ApiVersion.V1
