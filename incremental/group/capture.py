"""A capture: a process that runs the tasks that the owner assigns to it, and that may become the owner itself.

It is a member of the group while it holds a lease in etcd. It stops writing to sinks when its lease has expired by its own
clock, which is earlier than by etcd's. A successor waits for the requests that were sent until then (`DeadCaptures`).
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
from dataclasses import replace
from functools import partial

import tikv_br
from tikv_br import cancellation
from tikv_br.cancellation import BackgroundWork
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.etcd import Etcd, LeaseHolder
from tikv_br.cluster.etcd_values import Delete, Put, absent, created_at
from tikv_br.errors import EtcdLeaseExpired, EtcdUnreachable, SyncFenced, SyncStateDamaged
from tikv_br.incremental.group.model import CaptureInfo, ChangefeedState, ChangefeedTask, GroupState, TaskId
from tikv_br.incremental.group.owner import CaptureOwner
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.group.worker import CaptureOptions, Membership, Worker
from tikv_br.incremental.handover import check_has_feed
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.records import dump

log = logging.getLogger(__name__)

REJOIN_SECONDS = 1.0
MOST_THREADS = 1000
MOST_TASKS = 120
"""A transaction of etcd has at most 128 operations. A capture that leaves frees at most so many tasks; the owner frees the
others as for a capture that has died."""


class Capture:
    """Takes part in a group while `run` runs; `statuses` is thread-safe."""

    def __init__(self, etcd: Etcd, source: Cluster, options: CaptureOptions) -> None:
        """Raises `ClusterUnfit` for a source without a change feed."""
        check_has_feed(source, writes_log=False)
        self._store = GroupStore(etcd, source.cluster_id)
        self._source = source
        self._options = options
        self._tasks: Tasks | None = None
        self._status_page = ""

    def run(self, stop: threading.Event, status_page: str = "") -> None:
        """Take part until `stop` is set, then hand back all tasks; rejoins with a new id if the lease is lost.

        `status_page` is the status address published to the group, ``""`` = none.
        Raises `EtcdRefused`, `SyncStateDamaged`.
        """
        self._status_page = status_page
        ending = BackgroundWork("capture-end", partial(self._end_waits, stop))
        ending.start()
        try:
            while not stop.is_set():
                try:
                    with LeaseHolder(self._store.etcd, self._options.lease) as lease:
                        self._run_as_member(lease, stop)
                except (EtcdLeaseExpired, EtcdUnreachable) as error:
                    log.warning("left the group%s: %s", "" if stop.is_set() else ", rejoining", error.message)
                    stop.wait(REJOIN_SECONDS)
        finally:
            ending.stop()

    def _end_waits(self, stop: threading.Event) -> None:
        """Once stopped, give the source, which is then needed no more, and an etcd that does not answer `SIGNAL_SECONDS`; then end all calls to them.

        Without etcd no task can be handed back: the owner frees them when the lease has expired.
        """
        while not stop.is_set():
            cancellation.sleep(cancellation.POLL_SECONDS)
        began = time.monotonic()
        if not self._store.etcd.is_alive(cancellation.SIGNAL_SECONDS):
            self._store.etcd.close()
        cancellation.sleep(max(began + cancellation.SIGNAL_SECONDS - time.monotonic(), 0))
        self._source.close()

    def statuses(self) -> list[NamedStatus]:
        return self._tasks.statuses() if self._tasks is not None else []

    def _run_as_member(self, lease: LeaseHolder, stop: threading.Event) -> None:
        membership = self._join(lease)
        owner = CaptureOwner(membership.id, self._store, self._source.pd)
        with ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=membership.id) as pool:
            tasks = self._tasks = Tasks(membership, pool)
            try:
                with _in_background(pool, owner, self._options.poll_seconds) as owning:
                    while not stop.wait(self._options.poll_seconds) and not owning.done():
                        lease.check()
                        tasks.update()
                    tasks.stop()  # before the end of the owner's step, which may wait for PD
                tasks.hand_back(self._options.poll_seconds)
            finally:
                tasks.stop()

    def _join(self, lease: LeaseHolder) -> Membership:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        info = CaptureInfo(
            id=name,
            address=self._status_page,
            started_ms=time.time_ns() // 1_000_000,
            version=tikv_br.__version__,
            write_timeout_ms=round(1000 * self._options.write_timeout),
        )
        key, keys = self._store.keys.of("capture", name), self._store.keys
        registered = [Put(key, dump(info), lease.lease), Put(keys.of("owner", name), name.encode(), lease.lease)]
        done = self._store.etcd.transact([absent(key)], registered)
        if not done.succeeded:
            raise EtcdLeaseExpired(f"a capture {name} already exists")
        log.info("capture %s joined the group of cluster %d", name, self._source.cluster_id)
        return Membership(
            id=name,
            store=self._store,
            source=self._source,
            lease=lease,
            present=created_at(key, done.revision),
            options=self._options,
        )


class Tasks:
    """The tasks assigned to this capture. Not thread-safe, except for `statuses`."""

    def __init__(self, membership: Membership, pool: Executor) -> None:
        self._membership = membership
        self._store, self._keys = membership.store, membership.store.keys
        self._pool = pool
        self._workers: dict[TaskId, Worker] = {}

    def statuses(self) -> list[NamedStatus]:
        return [worker.status for worker in list(self._workers.values())]

    def update(self) -> None:
        """Start newly assigned tasks, stop those taken away or stopping, and restart those that failed.

        Raises `EtcdLeaseExpired` if the group has removed this capture; an unreachable etcd is logged.
        """
        try:
            state = self._store.snapshot()
            if self._membership.id not in state.captures:
                raise EtcdLeaseExpired(f"the group no longer knows capture {self._membership.id}")
            before = dict(self._workers)  # a worker that ends in this update must not restart from this older state
            for worker in before.values():
                self._check(state, worker)
            for task in state.tasks.values():
                if task.capture == self._membership.id and task.id not in before:
                    self._begin(state, task)
        except EtcdUnreachable as error:
            log.warning("etcd does not answer: %s", error.message)

    def stop(self) -> None:
        """Ask all workers to stop, without waiting."""
        for worker in self._workers.values():
            worker.stop()

    def hand_back(self, poll_seconds: float) -> None:
        """Stop all workers, then free their tasks and leave the group in one transaction, so that no task is assigned in between.

        Raises `EtcdError`; then the lease expires, and the owner frees the tasks.
        """
        self.stop()
        while not all(worker.settled for worker in self._workers.values()):
            self._membership.lease.check()
            if self._store.etcd.is_closed:
                raise EtcdUnreachable(
                    "etcd does not answer, so tasks cannot be handed back: they are free when the lease has expired"
                )
            time.sleep(poll_seconds / 10)
        while not self._leave(self._store.snapshot()):
            self._membership.lease.check()

    def _leave(self, state: GroupState) -> bool:
        """Free our tasks and remove our keys; False if the owner has changed a task in the meantime."""
        if self._membership.id not in state.captures:
            return True
        ours = [task for task in state.tasks.values() if task.capture == self._membership.id][:MOST_TASKS]
        freed = [Put(self._keys.of("task", task.id), dump(_freed(task))) for task in ours]
        gone = [
            Delete(self._keys.of("capture", self._membership.id)),
            Delete(self._keys.of("owner", self._membership.id)),
        ]
        unchanged = [state.unchanged(self._keys.of("task", task.id)) for task in ours]
        conditions = [self._membership.present, *unchanged]
        return self._store.etcd.transact(conditions, [*freed, *gone], repeatable=True).succeeded

    def _begin(self, state: GroupState, task: ChangefeedTask, before: Worker | None = None) -> None:
        if task.stopping:
            self._free(state, task)
        elif (
            task.changefeed in state.changefeeds and state.changefeeds[task.changefeed].state is ChangefeedState.NORMAL
        ):
            worker = self._workers[task.id] = Worker(self._membership, state, task, before)
            worker.start(self._pool)
            log.info("task %s: started, epoch %d", task.id, task.epoch)

    def _check(self, state: GroupState, worker: Worker) -> None:
        """Stop, restart or keep a worker, depending on its task in the group's state."""
        task = state.tasks.get(worker.task.id)
        if task is None or task.capture != self._membership.id or task.epoch != worker.task.epoch:
            worker.stop()
            if worker.settled:
                del self._workers[worker.task.id]
            return
        changed = state.changefeeds.get(task.changefeed) != worker.changefeed
        if task.stopping or changed:  # the owner may not have seen a short pause
            worker.stop()
        if not worker.settled:
            return
        del self._workers[task.id]
        if worker.error is not None:
            with contextlib.suppress(SyncFenced, SyncStateDamaged):  # the task may not be ours any more
                worker.checkpoints.save_error(worker.error.message)
        if worker.has_failed and worker.error is not None and not changed:
            self._store.fail(state, worker.changefeed.id, worker.error, self._membership.present)
            return
        if worker.error is not None:
            log.warning("task %s: failed, restarting: %s", task.id, worker.error.message)
        self._begin(state, task, None if changed else worker)

    def _free(self, state: GroupState, task: ChangefeedTask) -> None:
        key = self._keys.of("task", task.id)
        conditions = [self._membership.present, state.unchanged(key)]
        if self._store.etcd.transact(conditions, [Put(key, dump(_freed(task)))], repeatable=True).succeeded:
            log.info("task %s: freed", task.id)


@contextlib.contextmanager
def _in_background(pool: Executor, owner: CaptureOwner, every: float) -> Iterator[Future[None]]:
    """Run the owner in the background during the block. Raises the error that ended it."""
    stop = threading.Event()
    owning = pool.submit(owner.run, stop, every)
    try:
        yield owning
    finally:
        stop.set()
    owning.result()


def _freed(task: ChangefeedTask) -> ChangefeedTask:
    return replace(task, capture="", stopping=False, write_timeout_ms=0)
