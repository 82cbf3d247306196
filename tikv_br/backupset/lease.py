"""The lock on a backup path, as a lease: numbered objects, each created by a conditional write, so by one process only.

``tikv-br/lease/<n>.json`` says who holds the path and until when; the highest number counts. Acquiring, renewing and
breaking a lease are the same operation: creating the next number. A process that finds the number taken has lost the lease:
another one was faster, or the lease was broken. The last numbers stay while the lease is held, so that an outdated listing is
detected: after creating a number a process reads the previous one again, and withdraws if it is gone.

A lease has expired if this machine's clock and the storage's both say so: a clock that is wrong keeps the path longer, and lets
nobody in too early. A holder that cannot renew stops before anyone else
may take over. A lease in a cloud outlives the longest outage that is ridden out, so that such an outage costs no lease. The lease of a process that died on the same machine is over at once.

The record of a lease: the process that holds it, and its numbered objects.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from tikv_br import records, run_id
from tikv_br.backupset import layout
from tikv_br.cancellation import clean_up
from tikv_br.errors import (
    BackupDamaged,
    LeaseHeld,
    LeaseLost,
    StorageConflict,
    StorageError,
    StorageObjectMissing,
    StorageUnreachable,
    UsageError,
)
from tikv_br.redaction import visible
from tikv_br.storage.base import ObjectStore, create_once, no_conditional_writes, put_until_answered
from tikv_br.storage.outage import StorageAway

_PROC = Path("/proc")
_START_FIELD = 19
"""Field of /proc/PID/stat, counted after the name: start of the process, in ticks since boot."""


class LeaseOwner(Struct, frozen=True):
    """A process on a machine."""

    host: str
    machine: str
    """Boot and process namespace, in which a pid means something; ``""`` = not known."""
    pid: int
    started: int
    """Start of the process, to distinguish processes with the same pid; 0 = unknown."""

    @classmethod
    def this_process(cls) -> LeaseOwner:
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Return whether the process has certainly ended: only the machine that it ran on can know."""
        if not self.machine or self.machine != _machine():
            return False
        started = _started(self.pid)
        return started == 0 if not self.started else started != self.started

    @property
    def is_alive(self) -> bool:
        """Return whether the process certainly runs, on this machine."""
        return bool(self.machine) and self.machine == _machine() and not self.is_gone

    def __str__(self) -> str:
        return visible(f"process {self.pid} on {self.host}")


@functools.cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> int:
    """0 = there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in {"Z", "X"} else int(fields[_START_FIELD])


DAMAGED_HINT = (
    "This object records which process uses the path. When none does, delete it with the storage's own tools."
)
TTL_SECONDS = 30.0
"""Beyond the outage that the storage client rides out."""
GRACE_SECONDS = 10.0
"""Seconds after its end by the holder's clock for which nobody takes over a lease."""
held: set[str] = set()
"""Tokens of the leases that this process holds; others with its owner are leftovers."""


class Lease(Struct, frozen=True):
    """Content of one number."""

    token: str
    """The holder's own; the same in all its renewals."""
    owner: LeaseOwner
    run: str
    """Id of the holder's run, as in its log; ``""`` = it has none."""
    work: str
    """Purpose for people: ``backup``, ``prune``."""
    expires_ms: records.Milliseconds
    """End by the holder's clock, in milliseconds since the epoch; 0 = released by force."""

    @property
    def is_abandoned(self) -> bool:
        """Return whether nobody holds it, whatever the time: it was broken, or its process has ended."""
        ours = self.owner == LeaseOwner.this_process() and self.token not in held
        return not self.expires_ms or ours or self.owner.is_gone

    @property
    def has_expired(self) -> bool:
        """Return whether its time is over by this machine's clock."""
        return time.time() * 1000 > self.expires_ms + GRACE_SECONDS * 1000

    def __str__(self) -> str:
        left = self.expires_ms / 1000 - time.time()
        until = f"expires in {left:.0f} s unless renewed" if left > 0 else f"expired {-left:.0f} s ago"
        run = f" (run {self.run})" if self.run else ""
        return visible(f"{self.work} by {self.owner}{run}, {until}")


class NewestLease(Struct, frozen=True):
    """The highest number of a path."""

    number: int
    """Number of the newest lease; 0 = there is none."""
    lease: Lease | None
    is_free: bool = True
    """Another run may acquire the path."""


def newest(store: ObjectStore) -> NewestLease:
    """The current lease. Raises `StorageError`, `BackupDamaged`."""
    while True:
        number = max(numbers_of(store), default=0)
        if not number:
            return NewestLease(0, None)
        try:
            lease = read_number(store, number)
            over = lease.is_abandoned or (lease.has_expired and _age(store, number) > ttl_of(store) + GRACE_SECONDS)
            return NewestLease(number, lease, over)
        except StorageObjectMissing:  # just released, or renewed many times since
            continue


def _age(store: ObjectStore, number: int) -> float:
    """Seconds since a number was created, by the storage's clock: the clocks of the holder and of this machine may be hours apart."""
    probe = f"{layout.LEASE}/clock-{secrets.token_hex(8)}"
    store.put(probe, b"")
    now_ms = store.stat(probe).modified_ms
    store.delete(probe)
    return (now_ms - store.stat(layout.lease_name(number)).modified_ms) / 1000


def ttl_of(store: ObjectStore) -> float:
    """Seconds from a renewal to the end of a lease."""
    location = store.location
    return TTL_SECONDS + (location.patience if location.is_cloud else 0.0)


def create_number(store: ObjectStore, basis: NewestLease, number: int, data: bytes) -> bool:
    """Create a number; return whether it is ours and the listing that it was chosen by is still current."""
    name = layout.lease_name(number)
    if not create_once(store, name, data):
        return False
    _check_conditional_writes(store, name, data)
    if max(numbers_of(store), default=0) == number and (not basis.number or is_still(store, basis)):
        return True
    store.delete(name)
    return False


def is_still(store: ObjectStore, basis: NewestLease) -> bool:
    try:
        return read_number(store, basis.number) == basis.lease
    except StorageObjectMissing:
        return False


def _check_conditional_writes(store: ObjectStore, name: str, data: bytes) -> None:
    """Some servers ignore the condition of a conditional request and overwrite: no lease holds there."""
    try:
        put_until_answered(store, name, data)
    except StorageConflict:
        return
    store.delete(name)
    raise no_conditional_writes(store.location, "ignores conditional writes (If-None-Match)")


def numbers_of(store: ObjectStore) -> list[int]:
    names = (info.name.rpartition("/")[2].removesuffix(".json") for info in store.list(layout.LEASE))
    return [int(name) for name in names if name.isdecimal()]


def read_number(store: ObjectStore, number: int) -> Lease:
    name = layout.lease_name(number)
    try:
        return records.load(Lease, store.get(name), name)
    except BackupDamaged as error:  # of the lease, not of a backup
        raise BackupDamaged(error.message, hint=DAMAGED_HINT) from None


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
