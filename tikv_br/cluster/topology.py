"""The stores of a cluster, its version and its API version."""

from __future__ import annotations

import contextlib
import enum
import queue
import re
import threading
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.pb import metapb_pb2
from tikv_br.cluster.pd_http import request_json
from tikv_br.errors import ApiVersionMismatch, ClusterError, ClusterUnfit, ClusterUnreachable, RequestRefused
from tikv_br.formats.api_version import V3_NUMBER, V3_REFUSED, ApiVersion
from tikv_br.formats.keys.codec import MAX_KEY_SIZE
from tikv_br.retry import STORE_UNREACHABLE, RetryPolicy

THREADS = 16
"""Stores that are asked at the same time."""
LATE_SECONDS = 2.0
"""Seconds to wait for the next store's answer once one has answered."""


class StoreState(enum.IntEnum):
    """Numbers as in ``metapb.StoreState``."""

    UP = 0
    OFFLINE = 1
    """Being removed: serves until its data has moved."""
    TOMBSTONE = 2


class Store(Struct, frozen=True):
    """A TiKV process as PD knows it. Addresses are ``host:port``."""

    id: int
    address: str
    status_address: str
    state: StoreState
    version: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, store: metapb_pb2.Store) -> Store:
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
        """Return whether the store holds RawKV data: neither removed nor TiFlash."""
        return self.state is not StoreState.TOMBSTONE and not self.is_tiflash

    @property
    def is_tiflash(self) -> bool:
        """Return whether the store is TiFlash, which has no RawKV."""
        return ("engine", "tiflash") in self.labels or ("engine", "tiflash_compute") in self.labels


class ClusterInfo(Struct, frozen=True):
    """Properties of a cluster that a plan depends on."""

    cluster_id: int
    version: str
    """Cluster version of PD, such as ``8.5.2``."""
    api_version: ApiVersion
    stores: tuple[Store, ...]
    """All that hold data; `StoreState.OFFLINE` ones too."""

    def require_encoding(self, api_version: ApiVersion) -> None:
        """Raise `ApiVersionMismatch` for the API version of a backup if it is another one than the cluster's."""
        if api_version is not self.api_version:
            raise ApiVersionMismatch(
                f"the backup is in API {api_version.label} encoding, the cluster runs API {self.api_version.label}"
            )


MAX_ENTRY_SIZE = 8 << 20
"""Default of ``raftstore.raft-entry-max-size``."""


class StoreConfig(Struct, frozen=True):
    """Settings that stores report at ``/config``."""

    api_version: ApiVersion
    timestamp_age: float
    """Seconds by which a cached timestamp that a store gives to a write may be older than the write; 0 before API V2."""
    max_key_size: int = MAX_KEY_SIZE
    """``storage.max-key-size``: bytes of an RPC key up to which it can be put and deleted."""
    max_entry_size: int = MAX_ENTRY_SIZE
    """``raftstore.raft-entry-max-size``: bytes of a write as stores replicate it."""


def read_config(stores: Sequence[Store], tls: TlsFiles, timeout: float, retry_budget: float = 0.0) -> StoreConfig:
    """The API version that the stores are configured with, and the longest age of their timestamps, from the ``/config`` of each.

    Stores that are silent do not matter while another one answers: one that comes back with another API version refuses
    our requests. While all are silent they are asked again, for `retry_budget` seconds. One request may take
    `timeout` seconds.

    Raises `ClusterUnfit` when the stores disagree or there is none, `RetryBudgetExhausted` when all stay silent,
    `ClusterTlsError`, `RequestRefused`.
    """
    if not stores:
        raise ClusterUnfit("the cluster has no store that is up")
    found = RetryPolicy(retry_budget).run(
        "configuration of the stores", lambda: _ask_stores(stores, tls, timeout), STORE_UNREACHABLE, ClusterUnreachable
    )
    versions = {config.api_version for config in found.values()}
    if len(versions) > 1:
        each = ", ".join(f"store {store_id}: {config.api_version.label}" for store_id, config in sorted(found.items()))
        raise ClusterUnfit(f"the stores disagree on the API version: {each}")
    return StoreConfig(
        versions.pop(),
        max(config.timestamp_age for config in found.values()),
        min(config.max_key_size for config in found.values()),
        min(config.max_entry_size for config in found.values()),
    )


def _ask_stores(stores: Sequence[Store], tls: TlsFiles, timeout: float) -> dict[int, StoreConfig]:
    """The configurations by store id; waits only `LATE_SECONDS` for silent stores. Raises `ClusterUnreachable` if all are."""
    open_questions: queue.SimpleQueue[Store] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Store, StoreConfig | ClusterError]] = queue.SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                store = open_questions.get_nowait()
                try:
                    answers.put((store, store_config(store, tls, timeout)))
                except ClusterError as error:
                    answers.put((store, error))

    for store in stores:
        open_questions.put(store)
    for _ in range(min(len(stores), THREADS)):
        threading.Thread(target=ask, name="store-config", daemon=True).start()  # one that hangs must not delay the exit
    found: dict[int, StoreConfig] = {}
    silence: list[str] = []
    with contextlib.suppress(queue.Empty):
        for _ in stores:
            store, answer = answers.get(timeout=LATE_SECONDS if found else None)
            if isinstance(answer, StoreConfig):
                found[store.id] = answer
            elif isinstance(answer, ClusterUnreachable):
                silence.append(answer.message)
            else:
                raise answer
    if not found:
        raise ClusterUnreachable("; ".join(silence))
    return found


def store_config(store: Store, tls: TlsFiles, timeout: float) -> StoreConfig:
    config: Any = request_json("GET", f"{tls.scheme}://{store.status_address}/config", tls, timeout)
    storage: Any = config.get("storage") if isinstance(config, dict) else None
    if not isinstance(storage, dict):
        raise RequestRefused(f"store {store.id} ({store.status_address}): its /config has no storage section")
    version = _api_version(store, storage)
    raft: Any = config.get("raftstore")
    return StoreConfig(
        version,
        _timestamp_age(config.get("causal-ts")) if version is ApiVersion.V2 else 0.0,
        _size(storage.get("max-key-size"), MAX_KEY_SIZE),
        _size(raft.get("raft-entry-max-size") if isinstance(raft, dict) else None, MAX_ENTRY_SIZE),
    )


_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|)")


def _size(found: Any, default: int) -> int:  # noqa: ANN401 - from JSON
    """A size as TiKV writes it, such as ``8MiB`` or a number of bytes; the default for what is none."""
    match = _SIZE.fullmatch(str(found))
    return round(float(match[1]) * _UNITS[match[2]]) if match else default


def _api_version(store: Store, storage: dict[str, Any]) -> ApiVersion:
    number = storage.get("api-version", 1)
    if number == 2:
        return ApiVersion.V2
    if number == V3_NUMBER:
        raise ClusterUnfit(f"store {store.id} ({store.status_address}) has storage.api-version 3: {V3_REFUSED}")
    if number not in {0, 1}:
        raise ClusterUnfit(f"store {store.id} ({store.status_address}): unsupported storage.api-version {number}")
    return ApiVersion.V1TTL if storage.get("enable-ttl") else ApiVersion.V1


DEFAULT_TIMESTAMP_AGE = 3.0
"""Maximum age, in seconds, with the default settings of stores from 6.3 on."""
_MAX_BATCHES = 1024
_MICROSECONDS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1000, "us": 1}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(d|h|ms|m|us|s)")


def _timestamp_age(settings: Any) -> float:  # noqa: ANN401 - from JSON
    """The longest age of cached timestamps, in seconds, by a section ``causal-ts``.

    A store fetches a batch of timestamps at each renewal, and keeps as many batches as cover ``alloc-ahead-buffer``, which was
    ``available-interval`` in 6.3; before, it kept one.
    """
    try:
        renewal = _microseconds(settings["renew-interval"])
        buffer = _microseconds(
            settings.get("alloc-ahead-buffer") or settings.get("available-interval") or settings["renew-interval"]
        )
        age = min(-(-buffer // renewal), _MAX_BATCHES) * renewal
        return -(-age // 1000) / 1000
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return DEFAULT_TIMESTAMP_AGE


def _microseconds(text: str) -> int:
    """A duration as TiKV writes it, such as ``1m30s``. Raises `ValueError`."""
    if not text or _DURATION.sub("", text):
        raise ValueError(text)
    return round(sum(float(number) * _MICROSECONDS[unit] for number, unit in _DURATION.findall(text)))
