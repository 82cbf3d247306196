"""Keeps GC away from data that a backup or a change feed still needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from tikv_br.errors import SafePointError, TikvBrError

RENEWALS_PER_TTL = 3


class SafePointApi(Protocol):
    """What is needed of `PdClient`."""

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """Register, renew or remove; returns the minimum that holds."""

    def gc_safe_point(self) -> int:
        """Below which GC may remove old versions."""


def protect(pd: SafePointApi, service_id: str, safe_point: int, ttl_seconds: int) -> None:
    """Register or renew a service safe point. Raises `SafePointError` when GC has already passed it."""
    passed = max(pd.update_service_safe_point(service_id, ttl_seconds, safe_point), pd.gc_safe_point())
    if passed > safe_point:
        raise SafePointError(f"GC stands at {passed} and has passed {safe_point}, the safe point of {service_id}")


def release(pd: SafePointApi, service_id: str) -> None:
    """Remove a service safe point; it need not exist."""
    pd.update_service_safe_point(service_id, 0, 0)


class SafePointKeeper:
    """Holds a service safe point while a work runs: registers it at once, renews it every third of its TTL or more often.

    Work asks `check` at each step: once the safe point is lost, what it guards may be gone. As a context manager it
    registers on entry and, unless `leave_for` was called, releases on exit.
    """

    def __init__(
        self,
        pd: SafePointApi,
        service_id: str,
        safe_point: int,
        ttl_seconds: int,
        *,
        renew_every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`safe_point` is a timestamp; `ttl_seconds` is how long PD keeps it without a renewal.

        With `renew_every` it is renewed at least that often (in seconds), so that PD soon learns how it has advanced.
        """
        self.service_id = service_id
        self.safe_point = safe_point
        self.lost: SafePointError | None = None
        """Why the safe point no longer holds; None while it does."""
        self.passed = False
        """Whether it is known that GC has passed it."""
        self._pd = pd
        self._ttl = ttl_seconds
        self._every = min(ttl_seconds / RENEWALS_PER_TTL, renew_every or ttl_seconds)
        self._clock = clock
        self._held_until = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"safe-point-{service_id}", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stopping.is_set():
            self.stop()
            release(self._pd, self.service_id)

    def start(self) -> None:
        """Register, then renew in the background. Raises `SafePointError` when GC has passed it, `ClusterError`."""
        self._renew(self._ttl)
        self._thread.start()

    def check(self) -> None:
        """Raise the `SafePointError` of a lost safe point."""
        if self.lost is not None:
            raise self.lost

    def advance(self, safe_point: int) -> None:
        """Guard only what is newer from now on; takes effect at PD with the next renewal. Never goes back."""
        self.safe_point = max(self.safe_point, safe_point)

    def leave_for(self, ttl_seconds: int) -> None:
        """Stop renewing and leave the safe point in place for so long. Raises `SafePointError` when it is lost."""
        self.stop()
        self.check()
        self._renew(ttl_seconds)

    def stop(self) -> None:
        """Stop renewing; PD forgets the safe point when its TTL ends."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        while not self._stopping.wait(self._every) and self.lost is None:
            try:
                self._renew(self._ttl)
            except SafePointError as error:
                self.lost, self.passed = error, True
            except TikvBrError as error:  # such as silence, or TLS files that are just being replaced
                if self._clock() > self._held_until:
                    self.lost = SafePointError(
                        f"the safe point of {self.service_id} could not be renewed within its {self._ttl} s: {error}"
                    )

    def _renew(self, ttl_seconds: int) -> None:
        asked = self._clock()
        protect(self._pd, self.service_id, self.safe_point, ttl_seconds)
        self._held_until = asked + ttl_seconds
