"""Background work of PD and the stores: splits, balancing, and new leaders for regions of dead stores."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tikv_br.errors import PlaygroundError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground.encoding import Encoding
from tikv_br.playground.pd_config import PdConfig
from tikv_br.playground.pd_state import PdState
from tikv_br.playground.region import Region
from tikv_br.playground.txn.reads import collect_garbage
from tikv_br.playground.txn.state import TxnState

TICK: Final = 0.2
"""Seconds between two rounds."""
KEYSPACE_BOUNDS: Final = tuple(
    codec.encode(mode + keyspace) for mode in (b"r", b"x") for keyspace in (b"\0\0\0", b"\0\0\1")
)
"""Keys at which PD splits every new cluster, of any API version."""
_MOVES: Final = 4
"""Maximum number of leaderships, and of replicas, moved in one round."""
_KEYSPACES_SPLIT: Final = "keyspaces_split"
_log = logging.getLogger(__name__)


class Scheduler:
    """Runs all background work of a playground in rounds, on one thread."""

    def __init__(self, state: PdState, encoding: Encoding, config: PdConfig, transactions: TxnState) -> None:
        self._settings = state.settings
        self._engine = state.engine
        self._regions = state.regions
        self._sizes = state.sizes
        self._nodes = state.nodes
        self._encoding = encoding
        self._config = config
        self._gc = state.gc
        self._transactions = transactions
        self._collected = 0  # up to this timestamp
        self._started = time.monotonic()
        self._died: dict[int, float] = {}
        self._seen_written = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the rounds. If keyspaces are split without delay, that is done before this returns."""
        self.split_keyspaces()
        self._thread.start()

    def close(self) -> None:
        """Stop after the current round, if it was started."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        tasks: tuple[Callable[[], None], ...] = (
            self.split_keyspaces,
            self.replace_dead_leaders,
            self.split_large,
            self.split_to_number,
            self.balance_replicas,
            self.balance_leaders,
            self.collect_garbage,
        )
        while not self._stop.wait(TICK):
            for task in tasks:
                try:
                    task()
                except PlaygroundError:  # a region was changed by a request: the next round sees the change
                    _log.info("%s: postponed", task.__name__, exc_info=True)

    def split_keyspaces(self) -> None:
        """Split a new cluster at keyspaces, once, a few seconds after its first start."""
        due = time.monotonic() - self._started >= self._settings.keyspace_split_delay
        if due and self._engine.get_meta(_KEYSPACES_SPLIT) is None:
            by_region: dict[int, list[bytes]] = {}
            for bound in KEYSPACE_BOUNDS:
                by_region.setdefault(self._regions.locate(bound).id, []).append(bound)
            for region_id, keys in by_region.items():
                self._regions.split(region_id, keys)
            self._engine.put_meta({_KEYSPACES_SPLIT: b"1"})

    def split_large(self) -> None:
        for region in self._regions.all():
            limit = self._settings.region_split_size
            if self._sizes.at_most(region) > limit and self._sizes.of(region).size > limit:
                self._halve(region)

    def split_to_number(self) -> None:
        """Halve the largest regions until ``--regions`` contain data.

        Waits for a pause of the writes, so that the regions share all of the data and not only the first rows.
        """
        written, self._seen_written = self._seen_written, self._sizes.total_written
        if self._settings.regions <= 1 or written != self._seen_written:
            return
        filled = [
            region
            for region in self._regions.all()
            if next(self._engine.iterate_data(*region.data_range()), None) is not None
        ]
        while 0 < len(filled) < self._settings.regions:
            filled.sort(key=lambda region: self._sizes.of(region).size)
            halves = self._halve(filled.pop())
            if len(halves) == 1:
                return
            filled += halves

    def _halve(self, region: Region) -> list[Region]:
        """Split at the first key after half of the region's bytes. A region with a single key stays whole."""
        half = self._sizes.of(region).size / 2
        passed = 0
        for data_key, value in self._engine.iterate_data(*region.data_range()):
            key = self._encoding.split_key(data_key)
            if passed and (passed >= half) and key > region.start:
                return self._regions.split(region.id, [key])
            passed += len(data_key) + len(value)
        return [region]

    def replace_dead_leaders(self) -> None:
        """Elect new leaders for the regions of stores that have been dead for the election timeout."""
        now = time.monotonic()
        for node in self._nodes.values():
            if node.alive:
                self._died.pop(node.store_id, None)
            elif now - self._died.setdefault(node.store_id, now) >= self._settings.election_timeout:
                for region in self._regions.led_by(node.store_id):
                    alive = [peer.store_id for peer in region.peers if self._nodes[peer.store_id].alive]
                    if alive:
                        leader = min(alive, key=lambda store: len(self._regions.led_by(store)))
                        self._regions.transfer_leader(region.id, leader)

    def balance_leaders(self) -> None:
        """Move a few leaderships from the store with the most to the one with the fewest."""
        if not self._settings.balance or self._config.is_paused("balance-leader-scheduler"):
            return
        for _ in range(_MOVES):
            led = {store: self._regions.led_by(store) for store in self._alive()}
            most, least = _most_and_least_loaded(led)
            region = next((each for each in led.get(most, []) if each.peer_on(least)), None)
            if most == least or region is None:
                return
            self._regions.transfer_leader(region.id, least)

    def balance_replicas(self) -> None:
        """Move a few replicas from the store with the most to the one with the fewest."""
        if not self._settings.balance or self._config.is_paused("balance-region-scheduler"):
            return
        for _ in range(_MOVES):
            regions = self._regions.all()
            replicas = {store: [each for each in regions if each.peer_on(store)] for store in self._alive()}
            most, least = _most_and_least_loaded(replicas)
            region = next((each for each in replicas.get(most, []) if not each.peer_on(least)), None)
            if most == least or region is None:
                return
            self._regions.move(region.id, most, least)

    def collect_garbage(self) -> None:
        """Remove old versions of transactional data as soon as PD's safe point moves; real stores take longer."""
        safe_point = self._gc.safe_point
        if safe_point > self._collected:
            collect_garbage(self._engine, self._transactions, safe_point)
            self._collected = safe_point

    def _alive(self) -> list[int]:
        return [node.store_id for node in self._nodes.values() if node.alive]


def _most_and_least_loaded(by_store: Mapping[int, Sequence[Region]]) -> tuple[int, int]:
    """The stores with the most and the fewest regions; the same one twice if they differ by less than two."""
    if not by_store:
        return 0, 0
    most = max(by_store, key=lambda store: len(by_store[store]))
    least = min(by_store, key=lambda store: len(by_store[store]))
    return (most, least) if len(by_store[most]) - len(by_store[least]) > 1 else (most, most)


def first_byte_bounds(encoding: Encoding, regions: int) -> list[bytes]:
    """Bounds that split user keys (in V2: of keyspace 0) evenly by their first byte."""
    prefix = b"r\0\0\0" if encoding.api_version is ApiVersion.V2 else b""
    firsts = sorted({turn * 256 // regions for turn in range(1, regions)} - {0})
    return [encoding.bound(prefix + bytes([first])) for first in firsts]
