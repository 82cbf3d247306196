"""What PD and the stores do by themselves as time goes by: split, spread, and replace leaders that died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from formats import mce
from formats.api_version import ApiVersion
from tikv_br.errors import PlaygroundError
from tikv_br.playground.encoding import Encoding
from tikv_br.playground.engine import Engine
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_config import PdConfig
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.settings import Settings
from tikv_br.playground.sizes import RegionSizes

TICK: Final = 0.2
"""Seconds between two rounds."""
KEYSPACE_BOUNDS: Final = tuple(
    mce.encode(mode + keyspace) for mode in (b"r", b"x") for keyspace in (b"\0\0\0", b"\0\0\1")
)
"""Where PD splits every new cluster, whatever its API version."""
_MOVES: Final = 4
"""Leaderships or replicas moved in one round at most."""
_KEYSPACES_SPLIT: Final = "keyspaces_split"
_log = logging.getLogger(__name__)


class Scheduler:
    """The chores of a playground, done one after the other on one thread."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        regions: RegionTable,
        sizes: RegionSizes,
        encoding: Encoding,
        config: PdConfig,
        nodes: Mapping[int, StoreNode],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._regions = regions
        self._sizes = sizes
        self._encoding = encoding
        self._config = config
        self._nodes = nodes
        self._started = time.monotonic()
        self._died: dict[int, float] = {}
        self._seen_written = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin the rounds. A split of the keyspaces without delay is made before: nobody sees the cluster without it."""
        self.split_keyspaces()
        self._thread.start()

    def close(self) -> None:
        """End them; returns when the last is over."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        chores: tuple[Callable[[], None], ...] = (
            self.split_keyspaces,
            self.replace_dead_leaders,
            self.split_large,
            self.split_to_number,
            self.balance_replicas,
            self.balance_leaders,
        )
        while not self._stop.wait(TICK):
            for chore in chores:
                try:
                    chore()
                except PlaygroundError:  # a region went away under it: the next round sees what is
                    _log.info("%s: put off", chore.__name__, exc_info=True)

    # -- splits -------------------------------------------------------------------------------------------------

    def split_keyspaces(self) -> None:
        """Once in a cluster's life, a few seconds after its first start."""
        due = time.monotonic() - self._started >= self._settings.keyspace_split_delay
        if due and self._engine.get_meta(_KEYSPACES_SPLIT) is None:
            self.split_at(KEYSPACE_BOUNDS)
            self._engine.put_meta({_KEYSPACES_SPLIT: b"1"})

    def split_at(self, bounds: Iterable[bytes]) -> None:
        """Split at physical keys, each region's in one go."""
        by_region: dict[int, list[bytes]] = {}
        for bound in bounds:
            by_region.setdefault(self._regions.locate(bound).id, []).append(bound)
        for region_id, keys in by_region.items():
            self._regions.split(region_id, keys)

    def split_large(self) -> None:
        """Halve regions above the split size."""
        for region in self._regions.all():
            limit = self._settings.region_split_size
            if self._sizes.at_most(region) > limit and self._sizes.of(region).size > limit:
                self._halve(region)

    def split_to_number(self) -> None:
        """Halve the largest regions until as many hold data as were asked for.

        Waits for a pause in the writing: the regions shall share what was loaded, not its beginning.
        """
        written, self._seen_written = self._seen_written, self._sizes.total_written
        if self._settings.regions <= 1 or written != self._seen_written:
            return
        holding = [region for region in self._regions.all() if self._holds_data(region)]
        while 0 < len(holding) < self._settings.regions:
            holding.sort(key=lambda region: self._sizes.of(region).size)
            halves = self._halve(holding.pop())
            if len(halves) == 1:
                return
            holding += halves

    def _holds_data(self, region: Region) -> bool:
        return next(self._engine.iterate(*region.data_range()), None) is not None

    def _halve(self, region: Region) -> list[Region]:
        """Split at the first key behind half of the region's bytes; unsplit where that is its only key."""
        half = self._sizes.of(region).size / 2
        passed = 0
        for data_key, value in self._engine.iterate(*region.data_range()):
            key = self._encoding.split_key(data_key)
            if passed and (passed >= half) and key > region.start:
                return self._regions.split(region.id, [key])
            passed += len(data_key) + len(value)
        return [region]

    # -- leaders and replicas -----------------------------------------------------------------------------------

    def replace_dead_leaders(self) -> None:
        """Let living voters lead what a store led that has been dead for the election timeout."""
        now = time.monotonic()
        for node in self._nodes.values():
            if node.alive:
                self._died.pop(node.store_id, None)
            elif now - self._died.setdefault(node.store_id, now) >= self._settings.election_timeout:
                for region in self._regions.led_by(node.store_id):
                    self._elect(region)

    def _elect(self, region: Region) -> None:
        living = [peer.store_id for peer in region.peers if self._nodes[peer.store_id].alive]
        if living:
            self._regions.transfer_leader(region.id, min(living, key=lambda store: len(self._regions.led_by(store))))

    def balance_leaders(self) -> None:
        """Move leaderships, a few at a time, from the store that has most to the one that has least."""
        if not self._settings.balance or self._config.is_paused("balance-leader-scheduler"):
            return
        for _ in range(_MOVES):
            led = {store: self._regions.led_by(store) for store in self._living()}
            most, least = _extremes(led)
            region = next((each for each in led.get(most, []) if each.peer_on(least)), None)
            if most == least or region is None:
                return
            self._regions.transfer_leader(region.id, least)

    def balance_replicas(self) -> None:
        """Move replicas, a few at a time, from the store that has most to the one that has least."""
        if not self._settings.balance or self._config.is_paused("balance-region-scheduler"):
            return
        for _ in range(_MOVES):
            regions = self._regions.all()
            held = {store: [each for each in regions if each.peer_on(store)] for store in self._living()}
            most, least = _extremes(held)
            region = next((each for each in held.get(most, []) if not each.peer_on(least)), None)
            if most == least or region is None:
                return
            self._regions.move(region.id, most, least)

    def _living(self) -> list[int]:
        return [node.store_id for node in self._nodes.values() if node.alive]


def _extremes(held: Mapping[int, Sequence[Region]]) -> tuple[int, int]:
    """The stores with most and least, the same one twice where they differ by less than two."""
    if not held:
        return 0, 0
    most, least = max(held, key=lambda store: len(held[store])), min(held, key=lambda store: len(held[store]))
    return (most, least) if len(held[most]) - len(held[least]) > 1 else (most, most)


def first_byte_bounds(encoding: Encoding, regions: int) -> list[bytes]:
    """Bounds that cut the users' keys (in V2: of keyspace 0) evenly by their first byte."""
    prefix = b"r\0\0\0" if encoding.api_version is ApiVersion.V2 else b""
    firsts = sorted({turn * 256 // regions for turn in range(1, regions)} - {0})
    return [encoding.bound(prefix + bytes([first])) for first in firsts]
