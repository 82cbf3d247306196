"""One store: state shared by its services, the duration of its work, and requests that would crash a real store."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

from tikv_br.formats.api_version import ApiVersion

if TYPE_CHECKING:
    from tikv_br.playground.cdc_hub import ChangeHub
    from tikv_br.playground.engine import RocksEngine
    from tikv_br.playground.failpoints import FailpointTable
    from tikv_br.playground.import_service import DownloadLimit, ImportMode
    from tikv_br.playground.pd_state import CausalTimestamps, Tso
    from tikv_br.playground.region import RegionSizes
    from tikv_br.playground.regions import RegionTable
    from tikv_br.playground.sst_file import SstStore
    from tikv_br.playground.versions import ServerVersion

BACKUP_EMPTY_RANGE: Final = "Backup with start == end"
BACKUP_NOT_RAW: Final = "Backup with is_raw_kv=false on a store that holds raw data"
GET_TTL_WITHOUT_TTL: Final = "RawGetKeyTTL to a store without TTL"
DOWNLOAD_WITHOUT_Z: Final = "Download of an SST whose keys lack the leading z"
DOWNLOAD_UNKNOWN_CF: Final = "Download into an unknown column family"
INGEST_DEADLY_SST: Final = "Ingest of an SST that a store cannot survive"
INGEST_WITHOUT_PEER_FILE: Final = "Ingest of an SST that a follower has not got"
FEED_OF_RAW_ROWS: Final = "Write of a raw key to a region with a change feed, before 6.1"

_OPEN_STREAMS: Final = frozenset({"BatchCommands", "EventFeed", "EventFeedV2"})
"""RPCs that stay open also while there is nothing to do."""


class CallClock:
    """Adds up the calls of all stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._busy_since = self._busy = 0.0
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def clear(self) -> None:
        """Start from zero. A call in flight is counted when it ends, with all its time, and as busy from now on."""
        with self._lock:
            self._busy_since, self._busy = time.monotonic(), 0.0
            self._calls.clear()
            self._seconds.clear()

    @contextmanager
    def measure(self, rpc: str) -> Iterator[None]:
        """Count the block as one call."""
        if rpc in _OPEN_STREAMS:
            yield
            return
        with self._lock:
            started = time.monotonic()
            if not self._active:
                self._busy_since = started
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic()
                self._active -= 1
                if not self._active:
                    self._busy += now - self._busy_since
                self._calls[rpc] += 1
                self._seconds[rpc] += now - started

    def describe(self) -> dict[str, Any]:
        """``busy_seconds`` with a call in flight at any store, and for each RPC its calls and their seconds."""
        with self._lock:
            busy = self._busy + (time.monotonic() - self._busy_since if self._active else 0.0)
            calls = {rpc: {"calls": count, "seconds": self._seconds[rpc]} for rpc, count in sorted(self._calls.items())}
            return {"busy_seconds": busy, "rpcs": calls}


class Pace:
    """Slows down one store's backups and downloads to a rate in bytes per second. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        weight: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0 bytes per second = unlimited. Each byte counts ``weight`` times."""
        self._speed = bytes_per_second / weight
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.worked = 0.0
        """Seconds of work, the least that it could have taken."""

    def work(self, size: int) -> None:
        """Wait for earlier work, and then as long as ``size`` bytes take."""
        if not self._speed:
            return
        seconds = size / self._speed
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + seconds
            self.worked += seconds
            wait = self._free_at - now
        self._sleep(wait)

    def clear(self) -> None:
        """Set `worked` to 0."""
        with self._lock:
            self.worked = 0.0


@dataclass(frozen=True, slots=True)
class FatalRequest:
    """A request that would have crashed a real store; ``time`` in unix seconds."""

    time: float
    store_id: int
    rpc: str
    what: str


class FatalRequestLog:
    """All fatal requests of a playground, in memory and in a file of JSON lines. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._requests = [FatalRequest(**json.loads(line)) for line in lines]

    def record(self, *, store_id: int, rpc: str, what: str) -> None:
        """Add one; it is in the file when this returns."""
        request = FatalRequest(time.time(), store_id, rpc, what)
        with self._lock:
            self._requests.append(request)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(request)) + "\n")

    def all(self) -> list[FatalRequest]:
        """Oldest first."""
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Remove all: for a test that sends one on purpose."""
        with self._lock:
            self._requests.clear()
            self._path.unlink(missing_ok=True)


@dataclass(slots=True)
class StoreNode:
    """One store: its identity, the data it shares with the others, and its own clock of causal timestamps."""

    store_id: int
    cluster_id: int
    address: str  # host:port of its gRPC services
    status_address: str  # host:port of its HTTP status server
    api_version: ApiVersion
    release: ServerVersion
    engine: RocksEngine
    regions: RegionTable
    tso: Tso
    causal: CausalTimestamps
    failpoints: FailpointTable
    fatal_requests: FatalRequestLog
    changes: ChangeHub
    sizes: RegionSizes
    data_dir: Path  # its own files; the rows are in the shared RocksDB
    files: SstStore  # that wait for their ingest
    import_mode: ImportMode
    download_limit: DownloadLimit
    pace: Pace
    alive: bool = True
    died_at: float = 0.0  # unix seconds
    downloads: Counter[str] = field(default_factory=Counter)  # how often each file was fetched from a storage

    @property
    def has_timestamps(self) -> bool:
        """Return whether rows have timestamps, and are in change feeds."""
        return self.api_version is ApiVersion.V2 and self.release.encodes_v2

    @property
    def last_heartbeat(self) -> float:
        """Return the time of PD's last contact with the store, in unix seconds."""
        return time.time() if self.alive else self.died_at

    def now(self) -> int:
        """The store's clock in unix seconds, by which keys expire."""
        return int(time.time())


def crash_store(node: StoreNode, context: grpc.ServicerContext, rpc: str, what: str) -> NoReturn:
    """Record a fatal request, and end the call as a client of a crashing store sees it: the connection is lost."""
    node.fatal_requests.record(store_id=node.store_id, rpc=rpc, what=what)
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
