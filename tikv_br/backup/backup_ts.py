"""backup-ts: the timestamp from which a tail can follow a backup without a hole, and its protection from GC.

1. ``now`` = a timestamp from PD's TSO. 2. Every store throws away its cached timestamps, which lag behind by up to
seconds. 3. backup-ts = now - safe interval, on the physical part. 4. A service safe point at backup-ts - 1 keeps GC away
before the scan starts, is renewed while it runs, and is kept for a while after it for the tail to take over.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tikv_br.errors import ClusterError, SafePointError

LOGICAL_BITS = 18
"""Bits of a timestamp below its physical part, which counts milliseconds."""
SHORTEST_TTL = 60
"""Seconds that the safe point stands unrenewed while a backup runs, at least."""
RENEWALS_PER_TTL = 3


class SafePoints(Protocol):
    """What is asked of PD here: `tikv_br.cluster.pd.PdClient`."""

    def gc_safe_point(self) -> int:
        """The ts that GC has reached."""

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """Register, renew or (ttl 0) remove; returns the smallest safe point of all services."""


def backup_ts_before(now: int, safe_interval: float) -> int:
    """The backup-ts at timestamp ``now``: ``safe_interval`` seconds earlier on its physical part, never below 1."""
    return max(now - (round(safe_interval * 1000) << LOGICAL_BITS), 1)


class SafePointKeeper:
    """Keeps GC behind ``safe_point`` from `start` on, renewing in the background until `settle` or `release`."""

    def __init__(self, pd: SafePoints, service_id: str, safe_point: int, ttl_seconds: int) -> None:
        self.service_id = service_id
        self.safe_point = safe_point
        self._pd = pd
        self._ttl = max(ttl_seconds, SHORTEST_TTL)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: SafePointError | None = None

    def start(self, renew_every: float | None = None) -> None:
        """Register and begin to renew. Raises `SafePointError` when GC has passed already, or `ClusterError`."""
        reached = self._pd.gc_safe_point()
        if reached > self.safe_point:
            raise SafePointError(f"GC has reached {reached}, past the {self.safe_point} that this backup must keep")
        self._register(self._ttl)
        self._thread = threading.Thread(
            target=self._renew, args=(renew_every or self._ttl / RENEWALS_PER_TTL,), name="safe-point", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise `SafePointError` when the protection has been lost."""
        if self._lost is not None:
            raise self._lost

    def settle(self, ttl_seconds: int) -> None:
        """End renewing and leave the safe point standing for ``ttl_seconds`` more; 0 removes it."""
        self.stop()
        self.check()
        if ttl_seconds:
            self._register(ttl_seconds)
        else:
            self._remove()

    def release(self) -> None:
        """End renewing and remove the safe point. Raises `ClusterError` when PD does not answer."""
        self.stop()
        self._remove()

    def stop(self) -> None:
        """End renewing; the safe point stands for the rest of its TTL."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _register(self, ttl_seconds: int) -> None:
        smallest = self._pd.update_service_safe_point(self.service_id, ttl_seconds, self.safe_point)
        if smallest > self.safe_point:
            raise SafePointError(
                f"PD holds safe point {smallest}, past the {self.safe_point} that this backup must keep"
            )

    def _remove(self) -> None:
        self._pd.update_service_safe_point(self.service_id, 0, self.safe_point)

    def _renew(self, every: float) -> None:
        """Renew until told to stop; a PD that does not answer is asked again until the TTL has run out."""
        renewed = time.monotonic()
        while not self._stop.wait(every):
            asked = time.monotonic()
            try:
                self._register(self._ttl)
                renewed = asked
            except SafePointError as error:
                self._lost = error
                return
            except ClusterError as error:
                if time.monotonic() - renewed > self._ttl:
                    self._lost = SafePointError(
                        f"the safe point could not be renewed for {self._ttl} s: {error.message}"
                    )
                    return
