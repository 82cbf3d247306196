"""The lock on a backup path, as a lease: numbered objects, each created by a conditional write, so by one process only.

``tikv-br/lease/<n>.json`` says who holds the path and until when; the highest number counts. Acquiring, renewing and
breaking a lease are the same operation: creating the next number. A process that finds the number taken has lost the lease:
another one was faster, or the lease was broken. The last numbers stay while the lease is held, so that an outdated listing is
detected: after creating a number a process reads the previous one again, and withdraws if it is gone.

A lease has expired if this machine's clock and the storage's both say so: a clock that is wrong keeps the path longer, and lets
nobody in too early. A holder that cannot renew stops before anyone else
may take over. A lease in a cloud outlives the longest outage that is ridden out, so that such an outage costs no lease. The lease of a process that died on the same machine is over at once.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from tikv_br import records, run_id
from tikv_br.backupset import layout
from tikv_br.backupset.lease_record import (
    DAMAGED_HINT,
    Lease,
    LeaseOwner,
    NewestLease,
    create_number,
    held,
    is_still,
    newest,
    numbers_of,
    read_number,
    ttl_of,
)
from tikv_br.cancellation import clean_up
from tikv_br.errors import (
    BackupDamaged,
    LeaseHeld,
    LeaseLost,
    StorageError,
    StorageUnreachable,
    UsageError,
)
from tikv_br.storage.base import ObjectStore, create_once
from tikv_br.storage.outage import StorageAway

RENEW_SECONDS = 7.0
RETRY_SECONDS = 1.0
STOP_SECONDS = 10.0
"""Seconds for which the release of a lease waits for a running renewal."""
KEPT = 8
"""Numbers that stay while the lease is held."""
log = logging.getLogger(__name__)


def check_free(store: ObjectStore) -> None:
    """Raise `LeaseHeld` when the path is another's, `UsageError` for the root of the file system, where everything would be listed."""
    if (store.location.scheme, store.location.path) == ("local", "/"):
        raise UsageError("/ cannot be the path of a backup or an export", hint="Pass the path of a directory below it.")
    found = newest(store)
    if not found.is_free:
        raise _held_error(store, found)


def acquire(
    store: ObjectStore,
    work: str,
    *,
    wait: float = 0.0,
    ttl: float | None = None,
    renew_every: float = RENEW_SECONDS,
    on_wait: Callable[[str], None] = lambda _holder: None,
) -> PathLease:
    """Acquire the lease, waiting up to ``wait`` seconds for another holder; ``on_wait`` is called once with its description.

    Raises `LeaseHeld`; `StorageError`, also when conditional writes do not work there.
    """
    until, reported = time.monotonic() + wait, False
    ttl = ttl_of(store) if ttl is None else ttl
    while True:
        found = newest(store)
        if found.is_free and (taken := _claim(store, found, work, ttl)):
            taken.start(renew_every)
            return taken
        left = until - time.monotonic()
        if left <= 0:
            raise _held_error(store, newest(store))
        if not reported and found.lease is not None:
            on_wait(str(found.lease))
            reported = True
        time.sleep(min(RETRY_SECONDS, left))


def break_lease(store: ObjectStore, *, force: bool = False) -> Lease | None:
    """End an expired lease, or with ``force`` an active one, whose holder then stops. Returns it; None = there was none.

    Raises `LeaseHeld` for an active one without ``force``.
    """
    while True:
        found = newest(store)
        if found.lease is None:
            return None
        if not found.is_free and not force:
            raise LeaseHeld(
                f"the lock at {store.location} belongs to a live run: {found.lease}",
                hint="End that run first, or wait until the lock expires. --force removes the lock, and that run then fails.",
            )
        broken = Lease(secrets.token_hex(8), LeaseOwner.this_process(), run_id.current(), "unlock", 0)
        if create_once(store, layout.lease_name(found.number + 1), records.dump(broken)):
            return found.lease


class PathLease:
    """A held lease, renewed in the background until `release`. Work asks `check`: a lost path is another's by now."""

    def __init__(self, store: ObjectStore, lease: Lease, number: int, ttl: float, began: float) -> None:
        """Wrap a number just created; use `acquire`. ``began`` is the start of its creation (monotonic clock)."""
        self.lost: LeaseLost | StorageUnreachable | None = None
        """Reason why the lock was lost; None while it is held. An error of storage if only that prevented a renewal."""
        self._store = store
        self._lease = lease
        self._number = number
        self._ttl = ttl
        self._held_until = began + ttl
        self._failure: StorageError | BackupDamaged | None = None
        """Failure of the last renewal."""
        self._renewing = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, renew_every: float) -> None:
        """Renew it every `renew_every` seconds from now on."""
        self._thread = threading.Thread(target=self._keep, args=(renew_every,), name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LeaseLost` when the path is not ours any more, `StorageUnreachable` when that is so because the storage is away."""
        if self.lost is None and time.monotonic() > self._held_until:
            self._mark_expired()
        if self.lost is not None:
            raise self.lost

    def confirm(self) -> None:
        """Renew it now: before what only the holder may do. Raises `LeaseLost`, `StorageError`."""
        self.check()
        self._renew()
        self.check()

    def still_holds(self) -> bool:
        """Return whether the path is still ours, according to the storage or, if that fails, to the last renewal."""
        with contextlib.suppress(LeaseLost, StorageError):
            self.confirm()
        return self.lost is None

    def release(self) -> None:
        """Release the path; a lost one is left alone. Idempotent. Raises `StorageError`, `BackupDamaged`; see `try_release`."""
        self._stop()
        if self._thread is not None and self._thread.is_alive():
            raise StorageUnreachable(f"a renewal of the lock on {self._store.location} is still pending")
        if (
            self.lost is None
            and max(numbers := numbers_of(self._store), default=0) == self._number
            and self._is_there()
        ):
            self._store.sweep(layout.LEASE)  # partial files of killed runs: while we hold it, nobody else writes there
            for number in sorted(numbers):  # the current one last
                self._store.delete(layout.lease_name(number))

    def try_release(self) -> bool:
        """`release` after the work; returns whether it succeeded. Errors are logged: the lease then expires."""
        try:
            with clean_up():
                self.release()
        except StorageError as error:
            log.warning(
                "cannot release the lock on %s, which stays until it expires: %s", self._store.location, error.message
            )
            return False
        except BackupDamaged as error:
            self._leave_damaged(error)
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.try_release()
            return
        try:
            self.release()
        except BackupDamaged as problem:
            self._leave_damaged(problem)

    def _leave_damaged(self, problem: BackupDamaged) -> None:
        """A number that cannot be read may be another run's; the work is not affected."""
        log.warning("cannot release the lock on %s: %s. %s", self._store.location, problem.message, DAMAGED_HINT)

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        held.discard(self._lease.token)

    def _keep(self, renew_every: float) -> None:
        while not self._stopping.wait(renew_every) and self.lost is None:
            try:
                self._renew()
            except (StorageError, BackupDamaged) as error:
                log.warning("cannot renew the lock on %s: %s", self._store.location, error.message)
                self._failure = error
                if isinstance(error, StorageAway) and self.lost is None:
                    self.lost = error

    def _renew(self) -> None:
        with self._renewing:
            began, number = time.monotonic(), self._number + 1
            if began > self._held_until:  # this process or its machine was asleep: another may hold the path
                self._mark_expired()
                return
            lease = replace(self._lease, expires_ms=_expiry(self._ttl))
            if not create_once(self._store, layout.lease_name(number), records.dump(lease)):
                lease = read_number(self._store, number)
                if lease.token != self._lease.token:  # else the answer to an earlier renewal got lost
                    self._set_lost(
                        "it was broken by `tikv-br backup unlock`"
                        if not lease.expires_ms
                        else f"it was taken over by {lease}"
                    )
                    return
            if not self._is_there():  # another run held the path in between, and has released it
                self._store.delete(layout.lease_name(number))
                self._set_lost("another run took it over and has ended since")
                return
            self._number, self._lease = number, lease
            self._held_until = began + self._ttl
            self._failure = None
            if number > KEPT:
                self._store.delete(layout.lease_name(number - KEPT))

    def _is_there(self) -> bool:
        """Return whether our last number is unchanged: after another run has released the path, numbers start again at 1."""
        return is_still(self._store, NewestLease(self._number, self._lease))

    def _mark_expired(self) -> None:
        failure = self._failure
        if isinstance(failure, StorageUnreachable):
            where, seconds = self._store.location, f"{self._ttl:g} s"
            self.lost = StorageUnreachable(
                f"cannot renew the lock on {where} within its TTL of {seconds}: {failure.message}", hint=failure.hint
            )
            return
        why = failure.message if failure is not None else "this process or machine was suspended"
        self._set_lost(f"it was not renewed within its TTL of {self._ttl:g} s: {why}")

    def _set_lost(self, why: str) -> None:
        self.lost = LeaseLost(f"the lock on {self._store.location} is lost: {why}")


def _claim(store: ObjectStore, basis: NewestLease, work: str, ttl: float) -> PathLease | None:
    """Create the next number; None when another was faster."""
    began, number = time.monotonic(), basis.number + 1
    lease = Lease(secrets.token_hex(8), LeaseOwner.this_process(), run_id.current(), work, _expiry(ttl))
    held.add(lease.token)
    try:
        if create_number(store, basis, number, records.dump(lease)):
            return PathLease(store, lease, number, ttl, began)
    except BaseException:
        held.discard(lease.token)
        raise
    held.discard(lease.token)
    return None


def _held_error(store: ObjectStore, found: NewestLease) -> LeaseHeld:
    return LeaseHeld(f"{store.location} is in use: {found.lease or 'another run was faster'}")


def _expiry(ttl: float) -> int:
    return int((time.time() + ttl) * 1000)
