"""The GC worker: advances the GC safe point while it leads.

It does what TiKV's own GC worker does, in each round: takes PD's time minus the life time as the safe point of the service
``gc_worker``, and moves the GC safe point up to the minimum over all services. The order is what makes this safe: PD refuses a service
safe point below the minimum, so that minimum never falls, and a request of a leader that was replaced, however late it arrives,
asks for nothing that is not true any more. The GC safe point itself never falls in PD.

In a cluster with transactions it resolves the locks below that minimum in between, as TiDB's GC worker does. Unlike that one it rolls
back no transaction that is alive, but keeps the GC safe point below the oldest one.
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

from tikv_br import cancellation
from tikv_br.cancellation import TaskCancelled
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_lease import LeaseHolder
from tikv_br.cluster.locks import LockReport
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER
from tikv_br.cluster.timestamps import minus_seconds, show_ts
from tikv_br.errors import ClusterError, EtcdLeaseExpired, EtcdUnreachable
from tikv_br.gc.election import Candidate
from tikv_br.gc.metrics import WorkerFigures
from tikv_br.gc.status import FOREVER, GcReport, report
from tikv_br.report.facts import counted

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
        return replace(
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
