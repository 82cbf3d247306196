"""A lease of etcd that is kept alive, and an honest answer to whether it still is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from tikv_br.errors import EtcdLeaseExpired, TikvBrError

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3


class LeaseApi(Protocol):
    """What is needed of `Etcd`."""

    def grant(self, ttl_seconds: int) -> int:
        """A new lease."""

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Renew it."""

    def revoke(self, lease: int) -> None:
        """End it."""


def boot_clock() -> float:
    """Seconds since this machine started; it goes on while the process is stopped and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """Holds a lease from entry to exit. Whoever acts by right of it asks `check` before each act.

    The lease is counted from when its last confirmed renewal was *sent*: etcd counts from a later moment, so by our
    count it ends first, and a process that was stopped meanwhile finds it out by itself.
    """

    def __init__(self, etcd: LeaseApi, ttl_seconds: int, *, clock: Callable[[], float] = boot_clock) -> None:
        """`ttl_seconds` is how long it outlasts us."""
        self._etcd = etcd
        self._ttl = ttl_seconds
        self._clock = clock
        self._stopping = threading.Event()
        self._gone = False
        self._thread = threading.Thread(target=self._keep, name="etcd-lease", daemon=True)
        self.lease = 0
        """Its id; put keys with it."""
        self.deadline = 0.0
        """When it ends, on the clock, unless it is renewed before."""

    def __enter__(self) -> Self:
        """Get the lease. Raises `EtcdError`."""
        asked = self._clock()
        self.lease = self._etcd.grant(self._ttl)
        self.deadline = asked + self._ttl
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lease, so that others need not wait for it."""
        self._stopping.set()
        self._thread.join()
        self._gone = True
        try:
            self._etcd.revoke(self.lease)
        except TikvBrError as error:  # also of TLS
            log.warning("the lease could not be ended, it will end by itself: %s", error.message)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is ours, if nothing is heard of etcd; not above 0 when it is not."""
        return 0.0 if self._gone else self.deadline - self._clock()

    def check(self) -> None:
        """Raise `EtcdLeaseExpired` once the lease may have ended: others may then do what it stood for."""
        if self.remaining <= 0:
            raise EtcdLeaseExpired(f"lease {self.lease:x} of etcd was not renewed within its {self._ttl} s")

    def _keep(self) -> None:
        pause = every = self._ttl / RENEWALS_PER_TTL
        while not self._stopping.wait(pause) and not self._gone:
            pause = every
            asked = self._clock()
            try:
                ttl = self._etcd.keep_alive(self.lease, every)
            except EtcdLeaseExpired:
                self._gone = True
            except TikvBrError as error:  # also of TLS
                log.warning("etcd did not renew the lease: %s", error.message)
                pause = every / 10
            else:
                self.deadline = asked + ttl
