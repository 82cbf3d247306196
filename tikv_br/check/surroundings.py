"""What the probes of one run share: one connection to the cluster, one store, each opened once and by whoever is first."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from tikv_br.check.probe import NotAsked
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import TikvBrError
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.storage.base import ObjectStore

T = TypeVar("T")
SCRATCH = "tikv-br-check"
"""The folder of the storage that probes write to; each run has one of its own below it."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What to check. Times in seconds."""

    cluster: ClusterConfig
    storage: StorageLocation | None = None
    executor: str = "auto"
    """``auto``, ``driver`` or ``spark``: whether Java and Spark are needed."""
    spark_master: str = "local[*]"
    timeout: float = 10.0
    """How long one probe may take."""


class _Once(Generic[T]):
    """Made by the first who asks; a failure is raised to everyone."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: TikvBrError | None = None

    def get(self) -> T:
        with self._lock:
            if self._error is None and self._value is None:
                try:
                    self._value = self._make()
                except TikvBrError as error:
                    self._error = error
            if self._error is not None:
                raise self._error
            if self._value is None:
                raise AssertionError
            return self._value

    @property
    def made(self) -> T | None:
        return self._value


class Surroundings:
    """Cluster and storage, connected when first needed. Thread-safe; a context manager that closes what was opened."""

    def __init__(self, options: CheckOptions) -> None:
        self.options = options
        self.scratch = f"{SCRATCH}/{secrets.token_hex(8)}"
        """Names of the storage that belong to this run."""
        self._cluster = _Once(self._connect)
        self._store = _Once(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cluster.made is not None:
            self._cluster.made.close()

    @property
    def connection(self) -> Cluster:
        """The cluster. Raises `ClusterError`: for the one probe that tells of it."""
        return self._cluster.get()

    @property
    def cluster(self) -> Cluster:
        """The cluster, for probes that cannot do without. Raises `NotAsked`."""
        try:
            return self._cluster.get()
        except TikvBrError:
            raise NotAsked("PD is not reached") from None

    @property
    def opened(self) -> ObjectStore:
        """The storage, which has answered once. Raises `StorageError`: for the one probe that tells of it."""
        return self._store.get()

    @property
    def store(self) -> ObjectStore:
        """The storage, for probes that cannot do without. Raises `NotAsked`."""
        try:
            return self._store.get()
        except TikvBrError:
            raise NotAsked("the storage is not reached") from None

    def _connect(self) -> Cluster:
        from tikv_br.cluster.cluster import Cluster

        return Cluster.connect(self.options.cluster)

    def _open(self) -> ObjectStore:
        from tikv_br.storage.base import exists
        from tikv_br.storage.open import open_store

        if self.options.storage is None:
            raise NotAsked("no --storage")
        store = open_store(self.options.storage)
        exists(store, f"{self.scratch}/first")
        return store
