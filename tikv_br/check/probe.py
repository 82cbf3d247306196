"""Probes and their results, and the connections that the probes of one run share."""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from msgspec.structs import replace

from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import TikvBrError
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.storage.base import ObjectStore


class Status(enum.StrEnum):
    """Status of a probe."""

    OK = "ok"
    WARN = "warn"
    """Works, but needs attention."""
    FAIL = "fail"
    """Something requested will not work."""
    SKIPPED = "skipped"
    """Unknown, or not requested."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that monitoring may draw."""

    label: str
    value: float
    unit: str = ""
    """``s``, ``%``, ``B`` or nothing, as the plug-ins of Nagios have them."""
    warn: str = ""
    """Range of Nagios outside of which it is worth a warning: ``1`` (more than 1), ``20:`` (less than 20)."""
    critical: str = ""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Result of a probe, with advice."""

    status: Status
    seen: str
    advice: str = ""
    figures: tuple[Figure, ...] = ()


class ProbeSkipped(Exception):
    """Raised by a probe whose subject is not reachable or was not given: the probe is skipped. Another probe reports the cause."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One check. ``run`` may raise `TikvBrError` (a failure) and `ProbeSkipped` (skipped)."""

    name: str
    run: Callable[[ProbeContext], ProbeOutcome]
    seconds: float = 0.0
    """Maximum duration; 0 = as all probes."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a probe, and how long it took."""

    name: str
    outcome: ProbeOutcome
    seconds: float


def ok(seen: str, *figures: Figure) -> ProbeOutcome:
    """Return the result of a probe that passed."""
    return ProbeOutcome(Status.OK, seen, figures=figures)


def warn(seen: str, advice: str, *figures: Figure) -> ProbeOutcome:
    """Works, but needs attention."""
    return ProbeOutcome(Status.WARN, seen, advice, figures)


def fail(seen: str, advice: str, *figures: Figure) -> ProbeOutcome:
    """Return the result of a probe that failed."""
    return ProbeOutcome(Status.FAIL, seen, advice, figures)


def skipped(seen: str) -> ProbeOutcome:
    """Return the result of a probe that could not decide."""
    return ProbeOutcome(Status.SKIPPED, seen)


def listed(items: list[str], most: int = 5) -> str:
    """Items in one line: the first few, and how many more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


T = TypeVar("T")
SCRATCH = "tikv-br-check"
"""The folder of the storage that probes write to; each run has one of its own below it."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check. Times in seconds."""

    cluster: ClusterConfig
    storage: StorageLocation | None = None
    tasks: ExecutorOptions = field(default_factory=ExecutorOptions)
    """Whether Java and Spark are needed follows from them."""
    timeout: float = 10.0
    """Maximum duration of one probe."""
    send_credentials: bool = True
    """Send stores the credentials of this process, as backups and restores do."""


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


class ProbeContext:
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
        """The cluster. Raises `ClusterError`; for the one probe that reports it."""
        return self._cluster.get()

    @property
    def cluster(self) -> Cluster:
        """The cluster, for probes that need it. Raises `ProbeSkipped`."""
        try:
            return self._cluster.get()
        except TikvBrError:
            raise ProbeSkipped("PD is not reachable") from None

    @property
    def opened(self) -> ObjectStore:
        """The storage, which has answered once. Raises `StorageError`; for the one probe that reports it."""
        return self._store.get()

    @property
    def store(self) -> ObjectStore:
        """The storage, for probes that need it. Raises `ProbeSkipped`."""
        try:
            return self._store.get()
        except TikvBrError:
            raise ProbeSkipped("the storage is not reachable") from None

    def _connect(self) -> Cluster:
        from tikv_br.cluster.cluster import Cluster

        # The probe `version` reports stores that are too old; the others have something to say all the same.
        return Cluster.connect(replace(self.options.cluster, skip_version_check=True))

    def _open(self) -> ObjectStore:
        from tikv_br.storage.base import exists
        from tikv_br.storage.open import open_store

        if self.options.storage is None:
            raise ProbeSkipped("no --storage")
        store = open_store(self.options.storage)
        exists(store, f"{self.scratch}/first")
        return store
