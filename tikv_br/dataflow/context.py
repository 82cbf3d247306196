"""State that the steps of a backup share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tikv_br import run_id
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.ledger import FinishedTask
from tikv_br.backupset.manifest import Manifest
from tikv_br.backupset.run_record import PathState
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.safepoint import SafePointKeeper, service_id
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.engine import Engine
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Interval
from tikv_br.dataflow.task import PhaseSeconds, Snapshot, TaskResult
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.storage.base import ObjectStore


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
    keyspace_names: dict[int, str] = field(default_factory=dict)  # look for rows, check the base, read the sources
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
    snapshot: Snapshot | None = None  # resolve locks; None = raw data
    plan: list[Interval] = field(default_factory=list)  # plan
    finished: list[FinishedTask] = field(
        default_factory=list
    )  # look for a resumable backup, copy; their entries are in the ledger
    task_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)  # copy
    session_seconds: float = 0.0  # copy
    scanned_ts: int = 0  # commit
    listed: bool = True
    """True if the backup is added to the index of its root."""
    lineage: Lineage = Lineage()  # read the sources, check the base
    compared: int = 0  # compare checksums: intervals that are equal in the cluster
    changed: int = 0  # compare checksums: intervals that were written to during the backup
    manifest: Manifest | None = None  # look for a resumable backup, commit

    @property
    def all_options(self) -> tuple[object, ...]:
        """The options of the operation, of which a resumed run must share those that `resume_options` compares."""
        return (self.options,)

    @property
    def target_ranges(self) -> tuple[KeyRange, ...]:
        """The ranges that the files cover, in RPC keys of the target."""
        return tuple(map(self.conversion.target_range, self.source_ranges))

    @property
    def first_run(self) -> str:
        """Id of the run that started the backup."""
        return self.resumed_run or self.run_id

    @property
    def safe_point_name(self) -> str:
        """Name of the service safe point in PD, the same for each run of the backup."""
        return service_id(self.first_run, self.options.storage)

    @property
    def has_earlier_work(self) -> bool:
        """Return whether an earlier run has finished at least one interval."""
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
        """Check as `check_locks`, and read the lock in the storage: for use before changes that only its holder may make."""
        self.check_locks()
        if self.lease is not None:
            self.lease.confirm()

    def report(self, event: Event) -> None:
        """Forward an event to the reporter. Raises as `check_locks`, so that a lost lock ends the work soon."""
        self.check_locks()
        self.reporter(event)

    def add_result(self, result: TaskResult) -> None:
        """Add a task's result. Raises as `check_locks`."""
        self.finished.append(result.finished)
        self.task_seconds.add(result.seconds)
        self.check_locks()
