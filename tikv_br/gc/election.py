"""The election of the GC worker that leads, in etcd.

It is the election of TiKV's own GC worker (``gc-worker`` of tikv/migration, by etcd's ``concurrency.Election``): each candidate has a
key with its lease, and the one whose key was created first leads until its lease ends. So of both programs, too, only one leads.
"""

from __future__ import annotations

import contextlib

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_lease import LeaseHolder
from tikv_br.cluster.etcd_values import KeyValue, Listing, Put, absent
from tikv_br.errors import EtcdLeaseExpired

PREFIX = "/gc-worker/election/"


class Candidate:
    """One candidate for as long as its lease lasts. For one thread."""

    def __init__(self, etcd: Etcd, lease: LeaseHolder, name: str) -> None:
        """Prepare to join; `name` identifies the process for people."""
        self._etcd = etcd
        self._lease = lease
        self._name = name
        self.key = f"{PREFIX}{lease.lease:x}"
        self.revision = 0
        """Revision that created our key: smaller than those of all later candidates; 0 = not yet created."""

    def join(self) -> None:
        """Become a candidate. Raises `EtcdError`."""
        put = Put(self.key, self._name.encode(), self._lease.lease)
        self._etcd.transact([absent(self.key)], [put], repeatable=True)
        self.revision = self._own(self._etcd.range(PREFIX)).create_revision

    def leader(self) -> KeyValue:
        """The key of who leads now, which may be ours. Raises `EtcdLeaseExpired` if ours is gone, other `EtcdError`."""
        listing = self._etcd.range(PREFIX)
        if self._own(listing).create_revision != self.revision:
            raise EtcdLeaseExpired(f"the key {self.key} was removed and created again")
        return min(listing.items, key=lambda item: item.create_revision)

    def is_leader(self) -> bool:
        """Return whether this candidate leads, by agreement of etcd's members. Raises as `leader`."""
        return self.leader().key == self.key

    def confirm(self, seconds: float) -> None:
        """Return only if we lead, and will for the next `seconds` without a renewal. Raises `EtcdError`."""
        if not self.is_leader():
            raise EtcdLeaseExpired("another GC worker leads")
        if self._lease.remaining < seconds:
            raise EtcdLeaseExpired(f"etcd lease {self._lease.lease:x} ends in less than {seconds:g} s")

    def check(self) -> None:
        """Raise `EtcdLeaseExpired` once our lease may have ended, without asking etcd."""
        self._lease.check()

    def _own(self, listing: Listing) -> KeyValue:
        self._lease.check()
        with contextlib.suppress(StopIteration):
            return next(item for item in listing.items if item.key == self.key)
        raise EtcdLeaseExpired(f"etcd lease {self._lease.lease:x} has expired")
