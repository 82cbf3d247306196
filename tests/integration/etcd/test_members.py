"""The client through the deaths of an etcd's members, one after the other, the leader among them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.etcd import Member, etcd_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.cluster.etcd_values import Put, absent, unchanged
from tikv_br.errors import EtcdUnreachable

WRITERS = 3
LEASE = 60
BUDGET = 90.0
"""Seconds that a slow machine may take to elect a leader."""


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    """Three of one cluster, that have agreed on a leader."""
    with etcd_cluster(tmp_path) as started:
        with Etcd([member.address for member in started], retry_budget=BUDGET) as etcd:
            etcd.get("ready")
        yield started


class Counter:
    """A number in etcd that grows by steps of one."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._lock = threading.Lock()
        self.done = self.unknown = 0

    def count(self, enough: threading.Event) -> None:
        """Add one, again and again, by transactions."""
        while not enough.is_set():
            item = self._etcd.get("counter")
            seen, value = (absent("counter"), 0) if item is None else (unchanged(item), int(item.value))
            try:
                done, unknown = self._etcd.transact([seen], [Put("counter", b"%d" % (value + 1))]).succeeded, False
            except EtcdUnreachable as error:
                if not error.outcome_unknown:
                    raise
                done, unknown = False, True
            with self._lock:
                self.done += done
                self.unknown += unknown


def test_no_transaction_is_lost_or_done_twice(members: list[Member]) -> None:
    """While each member is killed once, three that count get what was confirmed, and at most what is unknown besides."""
    addresses = [member.address for member in members]
    with Etcd(addresses, retry_budget=BUDGET, request_timeout=2.0) as etcd, LeaseHolder(etcd, LEASE) as held:
        counter, enough = Counter(etcd), threading.Event()
        with ThreadPoolExecutor(WRITERS) as pool:
            writers = [pool.submit(counter.count, enough) for _ in range(WRITERS)]
            try:
                for member in members:
                    member.kill()
                    passed = counter.done + 20
                    eventually(lambda passed=passed: counter.done > passed, BUDGET)  # type: ignore[misc]
                    member.start()
                    with Etcd([member.address], retry_budget=BUDGET) as alone:
                        alone.get("counter")  # linearizable: it has caught up
            finally:
                enough.set()
            for writer in writers:
                writer.result()
        found = etcd.get("counter")
        assert found is not None
        assert counter.done <= int(found.value) <= counter.done + counter.unknown
        held.check()
        assert etcd.keep_alive(held.lease) == LEASE
