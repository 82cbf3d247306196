"""A lease is ours by our own count only, which never ends later than etcd's."""

from __future__ import annotations

import threading

import pytest

from tests.support.waiting import eventually
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.errors import ClusterTlsError, EtcdLeaseExpired, EtcdUnreachable, TikvBrError

TTL = 1
PAST_THE_TTL = 2.0


class SlowEtcd(Etcd):
    """An etcd whose clock the test moves: `late` seconds pass between a request and its answer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.late = 0.0
        self.trouble: Exception | None = None
        self.renewals = 0
        self.revoked = threading.Event()

    def clock(self) -> float:
        """The time of both sides."""
        return self.now

    def grant(self, ttl_seconds: int) -> int:
        """See `Etcd`."""
        self.now += self.late
        return 7

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """See `Etcd`."""
        self.now += self.late
        self.renewals += 1
        if self.trouble is not None:
            raise self.trouble
        return TTL

    def revoke(self, lease: int) -> None:
        """See `Etcd`."""
        self.revoked.set()
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def etcd() -> SlowEtcd:
    """One that answers at once."""
    return SlowEtcd()


def test_it_counts_from_when_the_request_was_sent(etcd: SlowEtcd) -> None:
    """An answer that took long is worth that much less."""
    etcd.late = 0.25
    with LeaseHolder(etcd, TTL, clock=etcd.clock) as held:
        assert (held.lease, held.remaining) == (7, 0.75)
        eventually(lambda: etcd.renewals > 1, 30)
        held.check()
        assert held.remaining <= 0.75
    assert etcd.revoked.is_set()


def test_a_suspended_holder_notices_the_possible_expiry(etcd: SlowEtcd) -> None:
    """After a time without renewal, the first check reports a possible expiry without asking etcd."""
    with LeaseHolder(etcd, TTL, clock=etcd.clock) as held:
        etcd.trouble = EtcdUnreachable("away")
        etcd.now += PAST_THE_TTL
        with pytest.raises(EtcdLeaseExpired):
            held.check()
        etcd.trouble = None


@pytest.mark.parametrize("trouble", [EtcdUnreachable("away"), ClusterTlsError("its certificate is not trusted")])
def test_trouble_is_lived_through(etcd: SlowEtcd, trouble: TikvBrError) -> None:
    """Renewals that fail are tried again at once; the lease is ours until its end, and again once one has succeeded."""
    with LeaseHolder(etcd, TTL, clock=etcd.clock) as held:
        etcd.trouble = trouble
        eventually(lambda: etcd.renewals > 3, 30)
        held.check()
        etcd.now += 0.5
        etcd.trouble = None
        eventually(lambda: held.remaining > 0.9, 30)


def test_a_lease_that_etcd_lost_is_over_at_once(etcd: SlowEtcd) -> None:
    """The remaining seconds by our count do not matter then; an unreachable etcd at the end is no error."""
    with LeaseHolder(etcd, TTL, clock=etcd.clock) as held:
        etcd.trouble = EtcdLeaseExpired("unknown lease")
        eventually(lambda: held.remaining <= 0, 30)
        with pytest.raises(EtcdLeaseExpired):
            held.check()
        etcd.trouble = EtcdUnreachable("away")
