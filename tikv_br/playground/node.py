"""The state that the services of one store share, its timestamps, and its end by a request that would crash a real store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import grpc

from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.region import Region, RegionSizes
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.settings import ServerVersion
from tikv_br.playground.sst_file import SstStore
from tikv_br.playground.store_state import FatalRequestLog, Pace, StoreImportMode
from tikv_br.playground.timestamps import RENEW_INTERVAL, CausalTimestamps, TimestampFault, Tso

BACKUP_EMPTY_RANGE: Final = "Backup with start == end"
BACKUP_BOUND: Final = "Backup with is_raw_kv=false of a region whose bound is not memcomparable"
GET_TTL_WITHOUT_TTL: Final = "RawGetKeyTTL to a store without TTL"
DOWNLOAD_WITHOUT_Z: Final = "Download of an SST whose keys lack the leading z"
DOWNLOAD_UNKNOWN_CF: Final = "Download into an unknown column family"
INGEST_DEADLY_SST: Final = "Ingest of an SST that a store cannot survive"
INGEST_WITHOUT_PEER_FILE: Final = "Ingest of an SST that a follower has not got"
FEED_OF_RAW_ROWS: Final = "Write of a raw key to a region with a change feed, before 6.1"


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
    sizes: RegionSizes
    data_dir: Path  # its own files; the rows are in the shared RocksDB
    files: SstStore  # that wait for their ingest
    import_mode: StoreImportMode
    download_limit: Pace
    pace: Pace  # of backups and downloads
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


class TimestampRenewal:
    """Renews the cached timestamps of all stores, and drops the timestamps of a store that leads a new region."""

    def __init__(self, nodes: Mapping[int, StoreNode], regions: RegionTable, tso: Tso, sync_delay: float) -> None:
        """``sync_delay``: seconds after which the store of a new leader drops them; until then the region refuses V2 writes."""
        self._nodes, self._regions, self._tso, self._sync_delay = nodes, regions, tso, sync_delay
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="causal-ts", daemon=True)

    def start(self) -> None:
        self._regions.on_new_leader(self._sync)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_INTERVAL):
            for node in self._nodes.values():
                if node.alive and self._tso.available:
                    node.causal.renew()

    def _sync(self, region: Region) -> None:
        def sync() -> None:
            node = self._nodes[region.leader_store]
            try:
                if node.alive:
                    node.causal.flush()
            except TimestampFault:
                if not self._over.is_set():
                    self._sync(region)
            else:
                self._regions.mark_synced(region.id)

        timer = threading.Timer(self._sync_delay, sync)
        timer.daemon = True
        timer.start()
