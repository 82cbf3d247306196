"""The GC worker: advances the GC safe point while it leads.

It does what TiKV's own GC worker does, in each round: takes PD's time minus the life time as the safe point of the service
``gc_worker``, and moves the GC safe point up to the minimum over all services. The order is what makes this safe: PD refuses a service
safe point below the minimum, so that minimum never falls, and a request of a leader that was replaced, however late it arrives,
asks for nothing that is not true any more. The GC safe point itself never falls in PD.

In a cluster with transactions it resolves the locks below that minimum in between, as TiDB's GC worker does. Unlike that one it rolls
back no transaction that is alive, but keeps the GC safe point below the oldest one.

The election of the GC worker that leads, in etcd.

It is the election of TiKV's own GC worker (``gc-worker`` of tikv/migration, by etcd's ``concurrency.Election``): each candidate has a
key with its lease, and the one whose key was created first leads until its lease ends. So of both programs, too, only one leads.

Conditions for GC of a cluster with transactions: no other program does GC, and no lock is below the safe point.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from tikv_br import cancellation
from tikv_br.cancellation import TaskCancelled
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.cluster.etcd_values import KeyValue, Listing, Put, absent
from tikv_br.cluster.locks import LockReport, LockResolver
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, GcStatus, gc_status
from tikv_br.cluster.timestamps import minus_seconds, show_ts
from tikv_br.cluster.txnkv import has_transactions
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, EtcdLeaseExpired, EtcdUnreachable
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.gc.metrics import WorkerFigures
from tikv_br.gc.status import FOREVER, GcReport, report
from tikv_br.report.facts import counted

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
        """Revision that created our key: smaller than the revision of any later candidate; 0 = not yet created."""

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


log = logging.getLogger(__name__)

REJOIN_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""Seconds between two rounds if the first has failed."""
POLLS_PER_LEASE = 10


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of GC; times are in seconds."""

    life_time: float
    """Minimum time for which old versions are kept."""
    interval: float
    """Time between two rounds."""
    lease: int = 10
    """Time for which a dead leader prevents others from leading."""

    @property
    def margin(self) -> float:
        """Seconds that the lease must still last when a request that changes something is sent to PD."""
        return self.lease / 2

    def hurry(self, config: ClusterConfig) -> ClusterConfig:
        """The config of a PD client whose requests are not retried for longer than the lease lasts."""
        part = self.lease / 4
        return structs.replace(
            config,
            request_timeout=min(config.request_timeout, part),
            retry_budget=min(config.retry_budget, part),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Result of one round."""

    report: GcReport
    """State of GC after the round."""
    wanted: int
    """PD's time minus the life time."""
    before: int
    """The GC safe point before it."""
    locks: LockReport

    @property
    def has_advanced(self) -> bool:
        """Return whether the GC safe point has advanced."""
        return self.report.safe_point > self.before


NO_LOCKS = LockReport(0, (), frozenset())


def run_round(
    pd: PdClient,
    life_time: float,
    confirm: Callable[[], None],
    resolve: Callable[[int], LockReport] = lambda _safe_point: NO_LOCKS,
) -> Round:
    """Advance the GC safe point as far as all services allow; `confirm` raises unless we may still change something.

    `resolve` resolves the locks up to a safe point. Raises `ClusterError`, and what `confirm` and `resolve` raise.
    """
    wanted = minus_seconds(pd.tso(), life_time)
    before = pd.gc_status()
    if wanted > before.worker:
        confirm()
        minimum = pd.update_service_safe_point(GC_WORKER, FOREVER, wanted)
    else:  # a worker with a shorter life time was here: its safe point must not step back
        minimum = min([before.worker, *(each.safe_point for each in before.services)])
    target = min(wanted, minimum)
    locks = resolve(target) if target > before.safe_point else NO_LOCKS
    if locks.live:
        target = min(target, locks.live[0].start_ts - 1)
    if target > before.safe_point:
        confirm()
        pd.update_gc_safe_point(target)
    found = replace(report(pd.gc_status(), pd.tso()), lock=next(iter(locks.live), None))
    return Round(found, wanted, before.safe_point, locks)


Show = Callable[[GcReport | None, WorkerFigures], None]
"""Shows what the worker has done or waits for: after each round of a leader with the state of GC, else without."""


def worker_name() -> str:
    """A name that no other process has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


Resolve = Callable[[int, Callable[[float], None]], LockReport]
"""Resolves the locks up to a safe point; the function that it gets sleeps, and raises if it must stop."""


def no_locks(_safe_point: int, _sleep: Callable[[float], None]) -> LockReport:
    """`Resolve` of a cluster without transactions."""
    return NO_LOCKS


class GcWorker:
    """Takes part in the election, and does GC while it leads."""

    def __init__(
        self,
        etcd: Etcd,
        pd: PdClient,
        options: WorkerOptions,
        show: Show,
        name: str = "",
        check: Callable[[], object] = lambda: None,
        resolve: Resolve = no_locks,
    ) -> None:
        """`show` is called in the thread of `run`; `name` is for people, by default a `worker_name`.

        `check` is called before each round, and raises `ClusterError` if GC must not be done.
        """
        self._check, self._resolve = check, resolve
        self._etcd = etcd
        self._pd = pd
        self._options = options
        self._show = show
        self._figures = WorkerFigures()
        self.name = name or worker_name()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set; takes part again after the lease was lost.

        Raises `EtcdRefused`, and, unless a round has succeeded before, a `ClusterError` that no retry can fix.
        """
        try:
            while not stop.is_set():
                try:
                    with contextlib.suppress(TaskCancelled), LeaseHolder(self._etcd, self._options.lease) as lease:
                        self._run_as_candidate(Candidate(self._etcd, lease, self.name), stop)
                except (EtcdLeaseExpired, EtcdUnreachable) as error:
                    log.warning("not a candidate any more, joining the election again: %s", error.message)
                    self._report_state(error=error.message)
                    stop.wait(REJOIN_SECONDS)
        finally:
            self._report_state()

    def _run_as_candidate(self, candidate: Candidate, stop: threading.Event) -> None:
        candidate.join()
        poll, leading = self._options.lease / POLLS_PER_LEASE, ""
        while (leader := candidate.leader()).key != candidate.key:
            if leader.key != leading:
                leading, name = leader.key, leader.value.decode(errors="replace")
                log.info("waiting: the GC worker %s leads", name)
                self._report_state(waits_for=name)
            if stop.wait(poll):
                return
        log.info("%s leads, from revision %d of etcd", self.name, candidate.revision)
        self._report_state(revision=candidate.revision)
        while not stop.is_set():
            next_round = time.monotonic() + self._do_round(candidate, stop)
            while time.monotonic() < next_round and not stop.wait(poll):
                candidate.check()

    def _do_round(self, candidate: Candidate, stop: threading.Event) -> float:
        """Try one round; returns the seconds until the next one. Raises `EtcdError`; `TaskCancelled` if the worker was stopped while locks were resolved."""

        def sleep(seconds: float) -> None:
            cancellation.sleep(seconds)
            candidate.check()

        def resolve(safe_point: int) -> LockReport:
            with cancellation.cancelled_by(stop):
                return self._resolve(safe_point, sleep)

        confirm = partial(candidate.confirm, self._options.margin)
        try:
            self._check()
            done = run_round(self._pd, self._options.life_time, confirm, resolve)
        except ClusterError as error:
            if not error.retryable and not self._figures.rounds:
                raise
            log.warning("a round failed, retrying: %s", error.message)
            self._report_state(revision=candidate.revision, failures=1, error=error.message)
            return min(RETRY_SECONDS, self._options.interval)
        candidate.check()  # or another worker may have done a later round
        log.info("%s", describe(done))
        self._report_state(done.report, revision=candidate.revision, rounds=1)
        return self._options.interval

    def _report_state(
        self,
        found: GcReport | None = None,
        *,
        revision: int = 0,
        rounds: int = 0,
        failures: int = 0,
        waits_for: str = "",
        error: str = "",
    ) -> None:
        old = self._figures
        self._figures = WorkerFigures(revision, old.rounds + rounds, old.failures + failures, waits_for, error)
        self._show(found, self._figures)


def describe(done: Round) -> str:
    """A round as one line."""
    at = show_ts(done.report.safe_point)
    text = f"the GC safe point is {at}" if not done.has_advanced else f"advanced the GC safe point to {at}"
    if done.locks.resolved:
        text += f"; resolved {counted(done.locks.resolved, 'lock')}"
    if done.report.lock is not None:
        text += f"; {done.report.lock} holds it back"
    holder = done.report.holder
    if holder is not None:
        return f"{text}; {holder.service} ({holder.owner}) holds it back by {done.report.held_seconds:.0f} s"
    return text


LOCK_PATIENCE = 20.0
"""Seconds to wait for transactions that are alive: the TTL that client-go gives to locks that it keeps alive."""
OTHER_GC_SECONDS = 24 * 3600.0
"""Age from which a safe point of another program counts as one of the past."""
TIDB_SERVERS = ("/tidb/server/info/", "/keyspaces/tidb/")
"""Keys in PD's etcd under which TiDB servers register, the second for servers of keyspaces; they end with their leases."""


def check_has_versions(cluster: Cluster, *, with_transactions: bool) -> None:
    """Raise `ClusterUnfit` for a cluster whose rows have no versions: raw rows have none before V2, transactional ones always."""
    version = cluster.api_version
    if version is ApiVersion.V2:
        cluster.require(versions.API_V2)
    elif version is ApiVersion.V1TTL or not with_transactions:
        hint = "If it has transactional data, which TiDB does not use, pass --resolve-locks. TiDB does GC itself."
        raise ClusterUnfit(
            f"the cluster has API {version.label}, whose raw keys have no old versions to remove",
            hint=hint
            if version is ApiVersion.V1
            else "It cannot have transactional data either: nothing is to be done.",
        )


def check_round(cluster: Cluster, *, resolves: bool) -> None:
    """Raise `ClusterUnfit` if GC of this cluster must not go on, by a worker that `resolves` locks or does not."""
    check_no_tidb(cluster.pd_etcd)
    if resolves:
        check_no_other_gc(gc_status(cluster.pd_http), cluster.pd.tso())
    else:
        check_has_no_transactions(cluster)


def check_has_no_transactions(cluster: Cluster) -> None:
    """Raise `ClusterUnfit` for a cluster of API V2 that also has transactional rows or locks."""
    if has_transactions(cluster):
        raise ClusterUnfit(
            "the cluster also has transactional data, whose locks this worker does not resolve: GC could break transactions",
            hint="Pass --resolve-locks, unless another program does GC (TiDB, or JuiceFS). Its safe point applies to raw data, too.",
        )


def check_no_tidb(etcd: Etcd) -> None:
    """Raise `ClusterUnfit` if TiDB uses the cluster, whose PD has this etcd; `ClusterUnreachable` if that does not answer."""
    try:
        keys = [item.key for prefix in TIDB_SERVERS for item in etcd.range(prefix).items]
    except EtcdUnreachable as error:
        raise ClusterUnreachable(f"PD's etcd: {error.message}") from None
    server = next((key for key in keys if TIDB_SERVERS[0] in key), None)
    if server is not None:
        raise ClusterUnfit(
            f"TiDB uses the cluster: it registered {server} in PD's etcd",
            hint="TiDB does GC itself, also of raw data. The cluster must not have another GC worker.",
        )


def check_no_other_gc(status: GcStatus, now: int) -> None:
    """Raise `ClusterUnfit` if another program moves the GC safe point: this one never moves it past ``gc_worker``."""
    if status.worker < status.safe_point and status.safe_point > minus_seconds(now, OTHER_GC_SECONDS):
        raise ClusterUnfit(
            f"another program does GC: it moved the GC safe point to {show_ts(status.safe_point)}",
            hint="JuiceFS does, for example. Leave GC to it; or turn it off there (gc-interval=0 in JuiceFS), and start this worker a day later.",
        )


def resolve_locks(cluster: Cluster, safe_point: int, sleep: Callable[[float], object]) -> LockReport:
    """Resolve all locks up to a safe point, of all keyspaces. For `sleep`, and what is raised, see `LockResolver`."""
    span = KeyMode.TXN.keys if cluster.api_version is ApiVersion.V2 else EVERY_KEY
    return LockResolver(cluster, sleep=sleep).resolve(span, safe_point, patience=LOCK_PATIENCE)
