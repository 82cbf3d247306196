"""Whose path it is, for how long: a lease of numbered objects, each made by a conditional write, so by one process only.

``tikv-br/lease/<n>.json`` says who holds the path and until when; the highest number counts. To take the path, to renew and
to break the lease are all the same act: to create the next number. Whoever finds it taken has lost, be it that a rival was
faster or that somebody broke the lease. The last numbers stay while the lease is held, so that nobody can mistake an old
listing for the present; whoever has created a number looks once more, and withdraws if what it built on has gone.

Clocks of the machines may differ by `GRACE_SECONDS`. A holder that cannot renew takes itself for out before anyone else
does. Of a process that has died on this very machine the lease is over at once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from tikv_br import run_id
from tikv_br.backupset import layout, sealed_json
from tikv_br.backupset.owner import Owner
from tikv_br.errors import BackupDamaged, LeaseHeld, LeaseLost, StorageConflict, StorageError, StorageObjectMissing
from tikv_br.storage.base import ObjectStore

TTL_SECONDS = 30.0
GRACE_SECONDS = 10.0
"""How long after its end by the holder's clock a lease is left alone."""
RENEW_SECONDS = 7.0
RETRY_SECONDS = 1.0
KEPT = 8
"""Numbers that stay while the lease is held."""

_DAMAGED_HINT = "It says who works at the path: once nobody does, remove it by the storage's own tools."

log = logging.getLogger(__name__)
_held: set[str] = set()
"""Tokens of the leases that this process holds: others that bear its name are left over."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One number's content."""

    token: str
    """The holder's own; the same in all its renewals."""
    owner: Owner
    run: str
    """Id of the holder's run, as in its log; ``""`` = it has none."""
    work: str
    """What the path is held for, for people: ``backup``, ``prune``."""
    expires_ms: int
    """By the holder's clock, in milliseconds since the epoch; 0 = it was broken."""

    @property
    def is_over(self) -> bool:
        """Whether somebody else may take the path."""
        if self.owner.is_gone or (self.owner == Owner.this_process() and self.token not in _held):
            return True
        return time.time() * 1000 > self.expires_ms + GRACE_SECONDS * 1000

    def __str__(self) -> str:
        left = self.expires_ms / 1000 - time.time()
        until = f"for {left:.0f} s more unless it is renewed" if left > 0 else f"and ended {-left:.0f} s ago"
        run = f" (run {self.run})" if self.run else ""
        return f"{self.work} by {self.owner}{run}, {until}"


@dataclass(frozen=True, slots=True)
class Newest:
    """The highest number of a path."""

    number: int
    """0 = there is none."""
    lease: Lease | None

    @property
    def is_free(self) -> bool:
        """Whether the path may be taken."""
        return self.lease is None or self.lease.is_over


def newest(store: ObjectStore) -> Newest:
    """What holds now. Raises `StorageError`, `BackupDamaged`."""
    while True:
        number = max(_numbers(store), default=0)
        if not number:
            return Newest(0, None)
        try:
            return Newest(number, _read(store, number))
        except StorageObjectMissing:  # just given back, or renewed many times since
            continue


def check_free(store: ObjectStore) -> None:
    """Raise `LeaseHeld` when the path is another's."""
    found = newest(store)
    if not found.is_free:
        raise _held_error(store, found)


def acquire(
    store: ObjectStore,
    work: str,
    *,
    wait: float = 0.0,
    ttl: float = TTL_SECONDS,
    renew_every: float = RENEW_SECONDS,
    on_wait: Callable[[str], None] = lambda _holder: None,
) -> PathLease:
    """Take the path, within ``wait`` seconds if another holds it; ``on_wait`` is told once who that is.

    Raises `LeaseHeld`; `StorageError`, also when conditional writes do not work there.
    """
    until, told = time.monotonic() + wait, False
    while True:
        found = newest(store)
        if found.is_free and (taken := _claim(store, found, work, ttl)):
            taken.start(renew_every)
            return taken
        left = until - time.monotonic()
        if left <= 0:
            raise _held_error(store, newest(store))
        if not told and found.lease is not None:
            on_wait(str(found.lease))
            told = True
        time.sleep(min(RETRY_SECONDS, left))


def break_lease(store: ObjectStore, *, force: bool = False) -> Lease | None:
    """End a lease that is over, or with ``force`` a living one, whose holder then stops. Returns it; None = there was none.

    Raises `LeaseHeld` for a living one without ``force``.
    """
    while True:
        found = newest(store)
        if found.lease is None:
            return None
        if not found.is_free and not force:
            raise _held_error(store, found)
        broken = Lease(secrets.token_hex(8), Owner.this_process(), run_id.current(), "unlock", 0)
        try:
            store.put_if_absent(layout.lease_name(found.number + 1), sealed_json.dump(broken))
        except StorageConflict:
            continue
        return found.lease


class PathLease:
    """A held lease, renewed in the background until `release`. Work asks `check`: a lost path is another's by now."""

    def __init__(self, store: ObjectStore, lease: Lease, number: int, ttl: float, began: float) -> None:
        """Of a number just created; use `acquire`. ``began`` is when that was begun, on the monotonic clock."""
        self.lost: LeaseLost | None = None
        """Why the path is not ours any more; None while it is."""
        self._store = store
        self._lease = lease
        self._number = number
        self._ttl = ttl
        self._held_until = began + ttl
        self._failure = "was this machine asleep?"
        self._renewing = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, renew_every: float) -> None:
        """Renew it every so many seconds from now on."""
        self._thread = threading.Thread(target=self._keep, args=(renew_every,), name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LeaseLost` when the path is not ours any more."""
        if self.lost is None and time.monotonic() > self._held_until:
            self._lose_by_time()
        if self.lost is not None:
            raise self.lost

    def confirm(self) -> None:
        """Renew it now: before what only the holder may do. Raises `LeaseLost`, `StorageError`."""
        self.check()
        self._renew()
        self.check()

    def release(self) -> None:
        """Give the path back; a lost one is left alone. Idempotent. Raises `StorageError`, `BackupDamaged`; see `give_back`."""
        self._stop()
        if self.lost is None and max(numbers := _numbers(self._store), default=0) == self._number and self._is_there():
            self._store.sweep(layout.LEASE)  # of killed ones: as long as it is ours, nobody else writes there
            for number in sorted(numbers):  # the one that counts goes last
                self._store.delete(layout.lease_name(number))

    def give_back(self) -> bool:
        """`release` once the work is done, or has failed: what stays then is an untidiness, which is logged. Whether nothing does."""
        try:
            self.release()
        except StorageError as error:
            log.warning("the lease on %s stays until it runs out: %s", self._store.location, error.message)
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
            self.give_back()
            return
        try:
            self.release()
        except BackupDamaged as problem:
            self._leave_damaged(problem)

    def _leave_damaged(self, problem: BackupDamaged) -> None:
        """What does not read may be another's by now, and says nothing of the work that is done."""
        log.warning("the lease on %s stays: %s. %s", self._store.location, problem.message, _DAMAGED_HINT)

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        _held.discard(self._lease.token)

    def _keep(self, renew_every: float) -> None:
        while not self._stopping.wait(renew_every) and self.lost is None:
            try:
                self._renew()
            except (StorageError, BackupDamaged) as error:
                log.warning("the lease on %s could not be renewed: %s", self._store.location, error.message)
                self._failure = error.message

    def _renew(self) -> None:
        with self._renewing:
            self._create_next()

    def _create_next(self) -> None:
        began, number = time.monotonic(), self._number + 1
        if began > self._held_until:  # this process or its machine was asleep: others may have looked meanwhile
            self._lose_by_time()
            return
        lease = replace(self._lease, expires_ms=_expiry(self._ttl))
        try:
            self._store.put_if_absent(layout.lease_name(number), sealed_json.dump(lease))
        except StorageConflict:
            lease = _read(self._store, number)
            if lease.token != self._lease.token:  # else the answer to an earlier try got lost
                self._lose("it was broken by `tikv-br unlock`" if not lease.expires_ms else f"it went to {lease}")
                return
        if not self._is_there():  # whoever had the path meanwhile has given it back
            self._store.delete(layout.lease_name(number))
            self._lose("it went to another run, which has ended since")
            return
        self._number, self._lease = number, lease
        self._held_until = began + self._ttl
        if number > KEPT:
            self._store.delete(layout.lease_name(number - KEPT))

    def _is_there(self) -> bool:
        """Whether our last number is still what we wrote: once another has given the path back, numbers begin anew."""
        return _is_still(self._store, Newest(self._number, self._lease))

    def _lose_by_time(self) -> None:
        self._lose(f"it was not renewed within its {self._ttl:g} s: {self._failure}")

    def _lose(self, why: str) -> None:
        self.lost = LeaseLost(f"the lease on {self._store.location} is lost: {why}")


def _claim(store: ObjectStore, basis: Newest, work: str, ttl: float) -> PathLease | None:
    """Create the next number; None when another was faster."""
    began, number = time.monotonic(), basis.number + 1
    lease = Lease(secrets.token_hex(8), Owner.this_process(), run_id.current(), work, _expiry(ttl))
    _held.add(lease.token)
    try:
        if _create(store, basis, number, sealed_json.dump(lease)):
            return PathLease(store, lease, number, ttl, began)
    except BaseException:
        _held.discard(lease.token)
        raise
    _held.discard(lease.token)
    return None


def _create(store: ObjectStore, basis: Newest, number: int, data: bytes) -> bool:
    """Whether the number is ours, and the listing that it was chosen by is not out of date."""
    name = layout.lease_name(number)
    try:
        store.put_if_absent(name, data)
    except StorageConflict:
        return False
    _prove_exclusion(store, name, data)
    if max(_numbers(store), default=0) == number and (not basis.number or _is_still(store, basis)):
        return True
    store.delete(name)
    return False


def _is_still(store: ObjectStore, basis: Newest) -> bool:
    try:
        return _read(store, basis.number) == basis.lease
    except StorageObjectMissing:
        return False


def _prove_exclusion(store: ObjectStore, name: str, data: bytes) -> None:
    """Some servers ignore the condition of a conditional request and overwrite: no lease holds there."""
    try:
        store.put_if_absent(name, data)
    except StorageConflict:
        return
    store.delete(name)
    raise StorageError(
        f"{store.location} ignores conditional writes (If-None-Match), without which two runs could mix one backup",
        hint="Use a storage that honours them: Amazon S3, MinIO, Ceph from Squid, versitygw, a local directory.",
    )


def _held_error(store: ObjectStore, found: Newest) -> LeaseHeld:
    return LeaseHeld(f"{store.location} is held: {found.lease or 'another run was faster'}")


def _expiry(ttl: float) -> int:
    return int((time.time() + ttl) * 1000)


def _numbers(store: ObjectStore) -> list[int]:
    names = (info.name.rpartition("/")[2].removesuffix(".json") for info in store.list(layout.LEASE))
    return [int(name) for name in names if name.isdecimal()]


def _read(store: ObjectStore, number: int) -> Lease:
    name = layout.lease_name(number)
    try:
        return sealed_json.load(Lease, store.get(name), name)
    except BackupDamaged as error:  # of the lease, not of a backup
        raise BackupDamaged(error.message, hint=_DAMAGED_HINT) from None
