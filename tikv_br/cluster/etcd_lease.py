"""A lease of etcd that is kept alive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from tikv_br import cancellation
from tikv_br.cancellation import BackgroundWork
from tikv_br.errors import EtcdLeaseExpired, TikvBrError

if TYPE_CHECKING:
    from tikv_br.cluster.etcd import Etcd

log = logging.getLogger(__name__)


RENEWALS_PER_TTL = 3


def boot_clock() -> float:
    """Seconds since this machine started; it goes on while the process is stopped and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """Holds a lease from entry to exit. Call `check` before each action that the lease protects.

    The lease is counted from when its last confirmed renewal was *sent*: etcd counts from a later moment, so it ends first
    by our count, and a process that was suspended notices it.
    """

    def __init__(self, etcd: Etcd, ttl_seconds: int, *, clock: Callable[[], float] = boot_clock) -> None:
        """`ttl_seconds` is how long it outlasts us."""
        self._etcd = etcd
        self._ttl = ttl_seconds
        self._clock = clock
        self._gone = False
        self._renewal = BackgroundWork("etcd-lease", self._keep)
        self.lease = 0
        """Id of the lease; pass it with `put` to attach keys."""
        self.deadline = 0.0
        """Time on `clock` at which the lease expires unless it is renewed."""

    def __enter__(self) -> Self:
        """Get the lease. Raises `EtcdError`."""
        asked = self._clock()
        self.lease = self._etcd.grant(self._ttl)
        self.deadline = asked + self._ttl
        self._renewal.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """End the lease, so that others need not wait for it; without waiting long for etcd ourselves."""
        self._gone = True
        try:
            with cancellation.clean_up(time.monotonic()):
                self._renewal.stop()
                self._etcd.revoke(self.lease)
        except TikvBrError as error:  # also of TLS
            log.warning("cannot revoke the etcd lease, which expires within %d s: %s", self._ttl, error.message)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is ours, if nothing is heard of etcd; not above 0 when it is not."""
        return 0.0 if self._gone else self.deadline - self._clock()

    def check(self) -> None:
        """Raise `EtcdLeaseExpired` once the lease may have ended: others may then do what it stood for."""
        if self.remaining <= 0:
            raise EtcdLeaseExpired(f"etcd lease {self.lease:x} was not renewed within its TTL of {self._ttl} s")

    def _keep(self) -> None:
        pause = every = self._ttl / RENEWALS_PER_TTL
        while not self._gone:
            cancellation.sleep(pause)
            pause = every
            asked = self._clock()
            try:
                ttl = self._etcd.keep_alive(self.lease, every)
            except EtcdLeaseExpired:
                self._gone = True
            except TikvBrError as error:  # also of TLS
                log.warning("cannot renew the etcd lease: %s", error.message)
                pause = every / 10
            else:
                self.deadline = asked + ttl
