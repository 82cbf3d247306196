"""The record of a lease: the process that holds it, and its numbered objects."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.errors import BackupDamaged, StorageConflict, StorageObjectMissing
from tikv_br.redaction import visible
from tikv_br.storage.base import ObjectStore, create_once, no_conditional_writes, put_until_answered

_PROC = Path("/proc")
_START_FIELD = 19
"""Field of /proc/PID/stat, counted after the name: start of the process, in ticks since boot."""


@dataclass(frozen=True, slots=True)
class LeaseOwner:
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


@dataclass(frozen=True, slots=True)
class Lease:
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


@dataclass(frozen=True, slots=True)
class NewestLease:
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
    """Seconds since a number was created, by the storage's clock: those of the holder and of this machine may be hours apart."""
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
