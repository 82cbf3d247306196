"""Locks are resolved as recorded answers of stores say, and by the requests that stores have answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.cluster.fakes import KV, FakeCluster
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import LockReport, LockResolver
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.timestamps import compose, physical_ms
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY

AFTER_TTL = 60_000
"""Milliseconds."""


class Recorded:
    """A check of a transaction's status that was recorded, and what a resolver makes of its answer."""

    def __init__(self, fake: FakeCluster, folder: Path, name: str, number: int) -> None:
        self.fake, self.folder = fake, folder / "resolver" / name
        self.version = ApiVersion.V1 if folder.name == "v1" else ApiVersion.V2
        self.request = kv.CheckTxnStatusRequest.FromString(self._read(f"check-txn-status-{number}-request"))
        self.answer = kv.CheckTxnStatusResponse.FromString(self._read(f"check-txn-status-{number}-response"))
        self.secondaries: kv.CheckSecondaryLocksResponse | None = None
        if (self.folder / "check-secondary-locks-1-response.pb").exists():
            data = self._read("check-secondary-locks-1-response")
            self.secondaries = kv.CheckSecondaryLocksResponse.FromString(data)

    def _read(self, name: str) -> bytes:
        return (self.folder / f"{name}.pb").read_bytes()

    def resolve(self, now: int = 0) -> LockReport:
        """Resolve a secondary lock of the transaction, for the recorded reader and by default at the recorded moment."""
        now = now or self.request.current_ts
        lock = kv.LockInfo(
            key=self.request.primary_key + b"/other",
            primary_lock=self.request.primary_key,
            lock_version=self.request.lock_ts,
            lock_ttl=1500,
        )
        self.fake.kv("KvScanLock", kv.ScanLockResponse(locks=[lock]))
        self.fake.kv("KvResolveLock", kv.ResolveLockResponse())
        self.fake.kv("KvCheckTxnStatus", self.answer)
        if self.secondaries is not None:
            self.fake.kv("KvCheckSecondaryLocks", self.secondaries)
        with Cluster.connect(self.fake.config()) as connected:
            cluster = SimpleNamespace(
                router=connected.router, api_version=self.version, cluster_id=7, pd=SimpleNamespace(tso=lambda: now)
            )
            resolver = LockResolver(cast("Cluster", cluster))
            span = EVERY_KEY if self.version is ApiVersion.V1 else KeyMode.TXN.keys
            return resolver.resolve(span, now, reader_ts=self.request.caller_start_ts)

    def sent(self) -> kv.CheckTxnStatusRequest:
        """The request for the status."""
        (sent,) = self.fake.stores[1].seen(KV + "KvCheckTxnStatus", kv.CheckTxnStatusRequest)
        sent.ClearField("context")
        return sent

    def commit_ts(self) -> int | None:
        """The commit ts with which the lock was resolved; None if it was not."""
        seen = self.fake.stores[1].seen(KV + "KvResolveLock", kv.ResolveLockRequest)
        assert {each.start_version for each in seen} <= {self.request.lock_ts}
        return seen[0].commit_version if seen else None


@pytest.mark.parametrize(
    ("name", "number", "pushed", "ended"),
    [
        ("live-two-phase", 1, True, False),
        ("dead-two-phase", 1, True, False),
        ("dead-two-phase", 2, False, True),
        ("primary-committed", 1, False, True),
        ("primary-committed-later", 1, False, True),
        ("dead-primary-missing", 1, False, False),
        ("dead-primary-missing", 2, False, True),
        ("dead-async-commit-complete", 1, False, False),
        ("dead-async-commit-incomplete", 1, False, False),
    ],
)
def test_statuses(fake: FakeCluster, txn_recording: Path, name: str, number: int, *, pushed: bool, ended: bool) -> None:
    """The recorded request is sent, byte by byte; the lock stays, or gets the primary's commit ts."""
    recorded = Recorded(fake, txn_recording, name, number)
    report = recorded.resolve()
    assert recorded.sent() == recorded.request
    assert [each.start_ts for each in report.live] == ([] if ended else [recorded.request.lock_ts])
    assert bool(report.pushed) == pushed
    assert recorded.commit_ts() == (recorded.answer.commit_version if ended else None)


@pytest.mark.parametrize("name", ["dead-async-commit-complete", "dead-async-commit-incomplete"])
def test_async_commits_after_their_ttl(fake: FakeCluster, txn_recording: Path, name: str) -> None:
    """All keys locked: the largest least commit ts of all; one missing: rolled back. The recorded keys are asked for."""
    recorded = Recorded(fake, txn_recording, name, 1)
    after = compose(physical_ms(recorded.request.lock_ts) + AFTER_TTL)
    assert recorded.resolve(after).live == ()
    (asked,) = fake.stores[1].seen(KV + "KvCheckSecondaryLocks", kv.CheckSecondaryLocksRequest)
    asked.ClearField("context")
    expected = (recorded.folder / "check-secondary-locks-1-request.pb").read_bytes()
    assert asked == kv.CheckSecondaryLocksRequest.FromString(expected)
    assert recorded.secondaries is not None
    locks = [recorded.answer.lock_info, *recorded.secondaries.locks]
    is_complete = len(locks) == 1 + len(recorded.answer.lock_info.secondaries)
    assert is_complete == name.endswith("-complete")
    assert recorded.commit_ts() == (max(lock.min_commit_ts for lock in locks) if is_complete else 0)
