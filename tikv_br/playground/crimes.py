"""Requests that would have killed a real store (docs/playground-failpoints.md lists them).

The playground lives on: it answers as if the store had died, and remembers. A test that finds a crime has failed.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import grpc

if TYPE_CHECKING:
    from tikv_br.playground.node import StoreNode

BACKUP_EMPTY_RANGE: Final = "Backup with start == end"
BACKUP_NOT_RAW: Final = "Backup with is_raw_kv=false on a store that holds raw data"
GET_TTL_WITHOUT_TTL: Final = "RawGetKeyTTL to a store without TTL"
DOWNLOAD_WITHOUT_Z: Final = "Download of an SST whose keys lack the leading z"
DOWNLOAD_UNKNOWN_CF: Final = "Download into an unknown column family"
INGEST_DEADLY_SST: Final = "Ingest of an SST that a store cannot survive"
INGEST_WITHOUT_PEER_FILE: Final = "Ingest of an SST that a follower has not got"


@dataclass(frozen=True, slots=True)
class Crime:
    """One deadly request: when (unix seconds), against which store, by which RPC, and what was wrong with it."""

    time: float
    store_id: int
    rpc: str
    what: str


class CrimeLog:
    """All crimes of a playground, in memory and in a file of JSON lines that survives it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._crimes = [Crime(**json.loads(line)) for line in lines]

    def record(self, *, store_id: int, rpc: str, what: str) -> None:
        """Remember a crime; it is on disk when this returns."""
        crime = Crime(time.time(), store_id, rpc, what)
        with self._lock:
            self._crimes.append(crime)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(crime)) + "\n")

    def all(self) -> list[Crime]:
        """Every crime since the log was last cleared, oldest first."""
        with self._lock:
            return list(self._crimes)

    def clear(self) -> None:
        """Forget all: for a test that commits a crime on purpose."""
        with self._lock:
            self._crimes.clear()
            self._path.unlink(missing_ok=True)


def store_dies(node: StoreNode, context: grpc.ServicerContext, rpc: str, what: str) -> NoReturn:
    """Record the crime and answer the call as a client sees a store that dies: the connection is gone."""
    node.crimes.record(store_id=node.store_id, rpc=rpc, what=what)
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
