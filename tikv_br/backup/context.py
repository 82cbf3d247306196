"""What the steps of a backup share, and the choice of the engine."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tikv_br import run_id
from tikv_br.backup.convert import Conversion
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import Interval
from tikv_br.backup.task import PhaseSeconds, TaskResult
from tikv_br.backupset.backup_set import BackupWriter
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.ledger import FinishedTask
from tikv_br.backupset.manifest import Manifest
from tikv_br.backupset.run_record import PathState
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import LeaseLost, StorageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.storage.base import ObjectStore
from tikv_br.tasks.executor import DRIVER_THREADS, MIN_SPARK_BYTES, MIN_SPARK_TASKS, ExecutorKind, choose_and_explain
from tikv_br.tasks.session import is_local

CLUSTER_SLOTS = 32
"""Assumed number of slots of a Spark cluster, whose size is unknown until it has started."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The chosen engine and executor, with the reason."""

    name: Literal["scan", "store", "changes", "merge", "load"]
    """How rows get into the files: tasks scan them, stores write the files, tasks read the change feed, tasks merge backups, or Spark
    reads them from any input."""
    reason: str
    executor: ExecutorKind
    executor_reason: str
    slots: int
    """Estimated number of concurrent tasks."""
    rewrites_files: bool = False
    """Whether tasks rewrite the stores' files, because stores cannot write the requested form."""

    @property
    def stores_write_final_files(self) -> bool:
        """Whether tasks only send requests to stores, and no row passes through them."""
        return self.name == "store" and not self.rewrites_files

    @classmethod
    def of_tasks(cls, name: Literal["scan", "changes", "merge"], reason: str, options: BackupOptions) -> Engine:
        """The fixed engine of `--base`, `backup merge` or `export raw`; all rows pass through its tasks."""
        executor, executor_reason = _executor(options)
        return cls(name, reason, executor, executor_reason, _slots(options, executor, only_sends_requests=False))

    def settle_executor(self, options: BackupOptions, plan: Sequence[Interval]) -> Engine:
        """The engine with the executor that fits the plan, unless it was requested or is a Spark cluster."""
        if options.executor != "auto" or self.executor == "spark":
            return self
        size = sum(interval.size for interval in plan)
        if not self.stores_write_final_files:
            reason = f"estimated size {size >> 20:,} MiB; Spark pays off from {MIN_SPARK_BYTES >> 20:,} MiB"
            executor, reason = choose_and_explain(len(plan), size, reason)
            return replace(self, executor=executor, executor_reason=reason)
        if options.rate_limit:  # speed does not matter then
            return replace(self, executor="driver", executor_reason="--ratelimit is exact in one process")
        tasks = "1 task" if len(plan) == 1 else f"{len(plan):,} tasks"
        reason = f"stores do the work of {tasks}; Spark pays off from {MIN_SPARK_TASKS:,}"
        executor, reason = choose_and_explain(len(plan), 0, reason)
        return replace(self, executor=executor, executor_reason=reason)


def choose_engine(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> Engine:
    """Choose engine and executor; the conversion must have been checked before."""
    name, reason = _choice(options, source, target)
    unsupported = _unsupported_by_stores(options, source, target) if name == "store" else ""
    if unsupported:
        reason += f"; stores cannot write {unsupported}, so their files are rewritten"
    only_sends_requests = name == "store" and not unsupported
    executor, executor_reason = _executor(options, only_sends_requests=only_sends_requests)
    slots = _slots(options, executor, only_sends_requests=only_sends_requests)
    return Engine(name, reason, executor, executor_reason, slots, bool(unsupported))


def _unsupported_by_stores(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> str:
    """The property of the requested files that stores of API ``source`` cannot write; empty if there is none."""
    if options.file_kind is FileKind.PARQUET:
        return "Parquet"
    if target not in {source, ApiVersion.V2}:
        return f"API {target.label}"
    return "uncompressed files" if options.compression is Compression.NONE else ""


def _choice(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> tuple[Literal["scan", "store"], str]:
    if options.engine != "auto":
        return options.engine, "requested with --engine"
    if not source.has_ttl:
        return "scan", "rows of API v1 have no timestamp or expiry to keep"
    if source is ApiVersion.V2 and target is ApiVersion.V2:
        return "store", "rows of API v2 keep their timestamps and expiry"
    if options.assume_no_ttl:
        return "scan", "--assume-no-ttl: no key has a TTL"
    if target.has_ttl:
        return "store", f"rows of API {source.label} keep their expiry"
    return "store", f"stores know the TTLs of API {source.label} without a request per key"


def _executor(options: BackupOptions, *, only_sends_requests: bool = False) -> tuple[ExecutorKind, str]:
    """The executor before there is a plan, and the reason; see `Engine.settle_executor`."""
    if options.executor != "auto":
        return options.executor, "requested with --executor"
    if only_sends_requests or is_local(options.spark_master):
        return "driver", "the plan decides"
    return "spark", "--spark-master is a cluster"


def _slots(options: BackupOptions, executor: ExecutorKind, *, only_sends_requests: bool) -> int:
    if options.concurrency is not None:
        return options.concurrency
    if executor == "driver" and only_sends_requests:
        return DRIVER_THREADS  # they wait for stores; computing threads compete for the interpreter lock
    if options.executor == "driver":
        return os.cpu_count() or 1
    if options.spark_master.startswith("local[*"):
        return os.cpu_count() or 1
    threads = re.match(r"local\[(\d+)", options.spark_master)
    if options.spark_master.startswith("local"):
        return int(threads[1]) if threads else 1
    return CLUSTER_SLOTS


@dataclass(frozen=True, slots=True)
class Lineage:
    """The backups that a backup continues or was made from; see the same fields of `Description`."""

    parent: str = ""
    since_ts: int = 0
    parent_sha256: bytes = b""
    merged_from: tuple[str, ...] = ()


@dataclass
class BackupContext:
    """State that the steps share. The comment behind a field names the step that sets it."""

    options: BackupOptions
    reporter: Reporter = silent
    run_id: str = field(default_factory=run_id.current_or_new)
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    clusters: ClusterPool = field(default_factory=ClusterPool)

    cluster: Cluster = field(init=False)  # connect
    info: ClusterInfo = field(init=False)  # connect
    engine: Engine = field(init=False)  # check the cluster
    conversion: Conversion = field(init=False)  # check the cluster; its ts: choose backup-ts
    source_ranges: tuple[KeyRange, ...] = ()  # check the cluster
    store: ObjectStore = field(init=False)  # check the storage
    writer: BackupWriter = field(init=False)  # acquire the backup lock
    lease: PathLease | None = None  # acquire the backup lock; released in clean up
    path_state: PathState = PathState.FREE  # check the storage, acquire the backup lock
    owns_work: bool = (
        False  # acquire the backup lock, look for a resumable backup: whether the files at the path are this run's
    )
    resumed_run: str = ""  # look for a resumable backup: id of the run that this one resumes
    resumed: int = 0  # look for a resumable backup: intervals that earlier runs finished
    unresumable: bool = False  # copy: whether no later run can resume the work
    work_kept: bool | None = None  # after a failure: whether the work is kept for the next run
    backup_ts: int = 0  # look for a resumable backup, choose backup-ts
    keeper: SafePointKeeper | None = None  # protect from GC
    plan: list[Interval] = field(default_factory=list)  # plan
    finished: list[FinishedTask] = field(
        default_factory=list
    )  # look for a resumable backup, copy; their entries are in the ledger
    task_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)  # copy
    session_seconds: float = 0.0  # copy
    scanned_ts: int = 0  # commit
    listed: bool = True
    """Whether the backup is added to the index of its root."""
    lineage: Lineage = Lineage()  # read the sources, check the base
    compared: int = 0  # compare checksums: intervals that are equal in the cluster
    changed: int = 0  # compare checksums: intervals that were written to during the backup
    manifest: Manifest | None = None  # look for a resumable backup, commit

    @property
    def target_ranges(self) -> tuple[KeyRange, ...]:
        """The ranges that the files cover, in RPC keys of the target."""
        return tuple(map(self.conversion.target_range, self.source_ranges))

    @property
    def first_run(self) -> str:
        """Id of the run that started the backup; its service safe point is named after it."""
        return self.resumed_run or self.run_id

    @property
    def has_earlier_work(self) -> bool:
        """Whether an earlier run has finished at least one interval."""
        return bool(self.resumed_run) and (self.resumed > 0 or self.manifest is not None)

    def set_backup_ts(self, backup_ts: int) -> None:
        """Set backup-ts, which the scan engine also writes as the ts of rows; 0 = none."""
        self.backup_ts = backup_ts
        if backup_ts:
            self.conversion = replace(self.conversion, ts=backup_ts)

    def check_locks(self) -> None:
        """Raise `LeaseLost` if the lock is known to be lost, `SafePointError` if GC is no longer held back."""
        if self.lease is not None:
            self.lease.check()
        if self.keeper is not None and self.keeper.lost is not None:
            self.unresumable = self.keeper.passed
            self.keeper.check()

    def confirm_locks(self) -> None:
        """As `check_locks`, but also reads the lock in the storage: for use before changes that only its holder may make."""
        self.check_locks()
        if self.lease is not None:
            self.lease.confirm()

    def holds_lock(self) -> bool:
        """Whether this run holds the lock, by reading it in the storage; if that fails, by what was known before."""
        if self.lease is None:
            return False
        with contextlib.suppress(LeaseLost, StorageError):
            self.lease.confirm()
        return self.lease.lost is None

    def report(self, event: Event) -> None:
        """Forward an event to the reporter. Raises as `check_locks`, so that a lost lock ends the work soon."""
        self.check_locks()
        self.reporter(event)

    def add_result(self, result: TaskResult) -> None:
        """Add a task's result. Raises as `check_locks`."""
        self.finished.append(result.finished)
        self.task_seconds.add(result.seconds)
        self.check_locks()
