"""A capture: a process that follows the sub-spans that a group gives it, and is the group's owner when its turn comes.

It is a member for as long as it holds a lease in etcd, and writes to a sink only until that has ended by its own count,
which is earlier than by etcd's. Whoever takes over waits for the requests that were sent until then (`Patience`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import tikv_br
from formats.api_version import ApiVersion
from incremental.group.model import LONGEST_LOOK, LONGEST_WRITE_MS, CaptureInfo, GroupState, State, Task, TaskId, dump
from incremental.group.owner import Owner
from incremental.group.store import GroupStore
from incremental.group.worker import Membership, Worker
from incremental.watch.named import NamedStatus
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_lease import LeaseHolder
from tikv_br.cluster.etcd_values import Delete, Put, absent, created_at
from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import ClusterUnfit, EtcdLeaseExpired, EtcdUnreachable, SyncFenced, SyncStateDamaged, TikvBrError

log = logging.getLogger(__name__)

LEASE_SECONDS = 10
LOOKS_PER_LEASE = 10
REJOIN_SECONDS = 1.0
MOST_THREADS = 1000
MOST_TASKS = 120
"""A transaction of etcd has at most 128 operations; what is more when a capture ends is taken from it as from a dead one."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a process takes part."""

    scratch: Path
    """A directory of this machine for what does not fit into memory."""
    lease: int = LEASE_SECONDS
    """Seconds that the group waits for a process of which it hears nothing, before it waits for what that may have sent."""
    sink_tls: TlsFiles = field(default_factory=TlsFiles)

    @property
    def write_timeout(self) -> float:
        """Seconds that one request to a sink may take."""
        return min(self.lease, LONGEST_WRITE_MS / 1000)

    @property
    def look_every(self) -> float:
        """Seconds between two looks at the state of the group."""
        return min(LONGEST_LOOK, self.lease / LOOKS_PER_LEASE)


class Capture:
    """Takes part in a group from `run` until told to stop; `statuses` may be called from any thread."""

    def __init__(self, etcd: Etcd, source: Cluster, options: CaptureOptions) -> None:
        """Raises `ClusterUnfit` for a source without a change feed."""
        if source.api_version is not ApiVersion.V2:
            raise ClusterUnfit(
                f"the source has API {source.api_version.label}, which keeps no timestamps: there is no change feed"
            )
        self._store = GroupStore(etcd, source.cluster_id)
        self._source = source
        self._options = options
        self._tasks: Tasks | None = None
        self._status_page = ""

    def run(self, stop: threading.Event, status_page: str = "") -> None:
        """Be a member until `stop` is set, then hand back what we have; joins anew, under a new name, when out of the group.

        `status_page` is the address that the group is told for it, ``""`` = none.
        Raises `EtcdRefused`, `SyncStateDamaged`.
        """
        self._status_page = status_page
        while not stop.is_set():
            try:
                with LeaseHolder(self._store.etcd, self._options.lease) as lease:
                    self._be_member(lease, stop)
            except (EtcdLeaseExpired, EtcdUnreachable) as error:
                log.warning("out of the group, to join it again: %s", error.message)
                stop.wait(REJOIN_SECONDS)

    def statuses(self) -> list[NamedStatus]:
        """How the tasks are doing that we have now."""
        return self._tasks.statuses() if self._tasks is not None else []

    def _be_member(self, lease: LeaseHolder, stop: threading.Event) -> None:
        membership = self._join(lease)
        owner = Owner(membership.id, self._store, self._source.pd)
        with ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=membership.id) as pool:
            tasks = self._tasks = Tasks(membership, pool)
            try:
                with _in_background(pool, owner, self._options.look_every) as owning:
                    while not stop.wait(self._options.look_every) and not owning.done():
                        lease.check()
                        tasks.look()
                    tasks.stop()  # before the owner's step has ended, which may wait for PD
                tasks.hand_back(self._options.look_every)
            finally:
                tasks.stop()

    def _join(self, lease: LeaseHolder) -> Membership:
        """Register under a name that nobody has had before."""
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        info = CaptureInfo(
            id=name,
            address=self._status_page,
            started_ms=time.time_ns() // 1_000_000,
            version=tikv_br.__version__,
            write_timeout_ms=round(1000 * self._options.write_timeout),
        )
        key, keys = self._store.keys.capture(name), self._store.keys
        registered = [Put(key, dump(info), lease.lease), Put(keys.owner(name), name.encode(), lease.lease)]
        done = self._store.etcd.transact([absent(key)], registered)
        if not done.succeeded:
            raise EtcdLeaseExpired(f"a capture {name} is there already")
        log.info("capture %s joined the group of cluster %d", name, self._source.cluster_id)
        return Membership(
            id=name,
            store=self._store,
            source=self._source,
            lease=lease,
            present=created_at(key, done.revision),
            scratch=self._options.scratch,
            sink_tls=self._options.sink_tls,
            write_timeout=self._options.write_timeout,
        )


class Tasks:
    """The tasks that a member has been given. For one thread, but for `statuses`."""

    def __init__(self, membership: Membership, pool: Executor) -> None:
        self._membership = membership
        self._store, self._keys = membership.store, membership.store.keys
        self._pool = pool
        self._workers: dict[TaskId, Worker] = {}

    def statuses(self) -> list[NamedStatus]:
        """See `Capture.statuses`."""
        return [worker.status for worker in list(self._workers.values())]

    def look(self) -> None:
        """Begin what is newly ours, end what is not or shall stop, and try again what has ended by an error.

        Raises `EtcdLeaseExpired` when the group has forgotten us; trouble with etcd is logged.
        """
        try:
            state = self._store.snapshot()
            if self._membership.id not in state.captures:
                raise EtcdLeaseExpired(f"the group no longer knows capture {self._membership.id}")
            before = dict(self._workers)  # what ends in this look does not begin anew by its picture, which is older
            for worker in before.values():
                self._check(state, worker)
            for task in state.tasks.values():
                if task.capture == self._membership.id and task.id not in before:
                    self._begin(state, task)
        except EtcdUnreachable as error:
            log.warning("etcd does not answer: %s", error.message)

    def stop(self) -> None:
        """Have all end, without waiting."""
        for worker in self._workers.values():
            worker.stop()

    def hand_back(self, look_every: float) -> None:
        """End all, save their checkpoints, and leave the group, in one transaction: nothing is given to us meanwhile.

        Raises `EtcdError`; then the group finds out by itself.
        """
        self.stop()
        while not all(worker.settled for worker in self._workers.values()):
            self._membership.lease.check()
            time.sleep(look_every / 10)
        while not self._leave(self._store.snapshot()):
            self._membership.lease.check()

    def _leave(self, state: GroupState) -> bool:
        """Free our tasks and remove our keys, unless the owner has changed a task meanwhile."""
        if self._membership.id not in state.captures:
            return True
        ours = [task for task in state.tasks.values() if task.capture == self._membership.id][:MOST_TASKS]
        freed = [Put(self._keys.task(task.id), dump(_freed(task))) for task in ours]
        gone = [Delete(self._keys.capture(self._membership.id)), Delete(self._keys.owner(self._membership.id))]
        unchanged = [state.unchanged(self._keys.task(task.id)) for task in ours]
        conditions = [self._membership.present, *unchanged]
        return self._store.etcd.transact(conditions, [*freed, *gone], repeatable=True).succeeded

    def _begin(self, state: GroupState, task: Task, before: Worker | None = None) -> None:
        if task.stopping:
            self._let_go(state, task)
        elif task.changefeed in state.changefeeds and state.changefeeds[task.changefeed].state is State.NORMAL:
            worker = self._workers[task.id] = Worker(self._membership, state, task, before)
            worker.start(self._pool)
            log.info("task %s: begun, epoch %d", task.id, task.epoch)

    def _check(self, state: GroupState, worker: Worker) -> None:
        """Compare one with what the group wants of it."""
        task = state.tasks.get(worker.task.id)
        if task is None or task.capture != self._membership.id or task.epoch != worker.task.epoch:
            worker.stop()
            if worker.settled:
                del self._workers[worker.task.id]
            return
        changed = state.changefeeds.get(task.changefeed) != worker.changefeed
        if task.stopping or changed:  # the owner may not have seen a pause that was short
            worker.stop()
        if not worker.settled:
            return
        del self._workers[task.id]
        if worker.error is not None:
            self._tell(worker, worker.error)
        if worker.has_failed and worker.error is not None and not changed:
            self._store.fail(state, worker.changefeed.id, worker.error, self._membership.present)
            return
        if worker.error is not None:
            log.warning("task %s: tried again after: %s", task.id, worker.error.message)
        self._begin(state, task, None if changed else worker)

    def _tell(self, worker: Worker, error: TikvBrError) -> None:
        """Say what ended it, where others see it; it need not be ours any more."""
        with contextlib.suppress(SyncFenced, SyncStateDamaged):
            worker.checkpoints.tell(error.message)

    def _let_go(self, state: GroupState, task: Task) -> None:
        key = self._keys.task(task.id)
        conditions = [self._membership.present, state.unchanged(key)]
        if self._store.etcd.transact(conditions, [Put(key, dump(_freed(task)))], repeatable=True).succeeded:
            log.info("task %s: given back", task.id)


@contextlib.contextmanager
def _in_background(pool: Executor, owner: Owner, every: float) -> Iterator[Future[None]]:
    """Have the owner's part done while the block runs. Raises what ended it."""
    enough = threading.Event()
    owning = pool.submit(owner.run, enough, every)
    try:
        yield owning
    finally:
        enough.set()
    owning.result()


def _freed(task: Task) -> Task:
    return replace(task, capture="", stopping=False, write_timeout_ms=0)
