"""What the steps of a backup find out for one another."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace

from tikv_br import run_id
from tikv_br.backup.convert import Conversion
from tikv_br.backup.engine import Engine
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import Interval
from tikv_br.backup.task import PhaseSeconds, TaskResult
from tikv_br.backupset.backup_set import BackupWriter
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.backupset.lock import PathState
from tikv_br.backupset.manifest import Manifest
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import LeaseLost, StorageError
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.storage.base import ObjectStore


@dataclass
class BackupContext:
    """Fields without a value are set by the step that their comment names."""

    options: BackupOptions
    reporter: Reporter = silent
    run_id: str = field(default_factory=run_id.current_or_new)
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    cluster: Cluster = field(init=False)  # connect
    info: ClusterInfo = field(init=False)  # connect
    engine: Engine = field(init=False)  # check the cluster
    conversion: Conversion = field(init=False)  # check the cluster; its ts: choose backup-ts
    source_ranges: tuple[KeyRange, ...] = ()  # check the cluster
    store: ObjectStore = field(init=False)  # check the storage
    writer: BackupWriter = field(init=False)  # take the path
    lease: PathLease | None = None  # take the path; over with tidy up
    path_state: PathState = PathState.FREE  # check the storage, take the path
    owns_work: bool = False  # take the path, find earlier work: whether what lies there is of this run
    begun_by: str = ""  # find earlier work: the run that this one goes on with
    resumed: int = 0  # find earlier work: intervals that earlier runs have done
    spoiled: bool = False  # copy, compare checksums: whether no later run can go on with the work
    kept: bool | None = None  # the end of a failed run: whether its work is left for the next
    backup_ts: int = 0  # find earlier work, choose backup-ts
    keeper: SafePointKeeper | None = None  # protect from GC
    plan: list[Interval] = field(default_factory=list)  # plan
    entries: list[LedgerEntry] = field(default_factory=list)  # find earlier work, copy
    task_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)  # copy
    session_seconds: float = 0.0  # copy
    manifest: Manifest | None = None  # find earlier work, commit

    @property
    def target_ranges(self) -> tuple[KeyRange, ...]:
        """What the files cover, in RPC keys of the target."""
        return tuple(map(self.conversion.target_range, self.source_ranges))

    @property
    def with_ttl(self) -> bool:
        """Whether rows may expire."""
        return self.conversion.source.has_ttl and not self.options.assume_no_ttl

    @property
    def first_run(self) -> str:
        """The run under whose id PD holds the safe point."""
        return self.begun_by or self.run_id

    @property
    def has_earlier_work(self) -> bool:
        """Whether an earlier run has done a part of the backup, or all of it."""
        return bool(self.begun_by) and (self.resumed > 0 or self.manifest is not None)

    def set_backup_ts(self, backup_ts: int) -> None:
        """Settle backup-ts, with which the scan engine writes rows; 0 = none."""
        self.backup_ts = backup_ts
        if backup_ts:
            self.conversion = replace(self.conversion, ts=backup_ts)

    def check_held(self) -> None:
        """Raise `LeaseLost` when the path is another's by now, `SafePointError` when GC is no longer held back."""
        if self.lease is not None:
            self.lease.check()
        if self.keeper is not None and self.keeper.lost is not None:
            self.spoiled = self.keeper.passed
            self.keeper.check()

    def confirm_held(self) -> None:
        """As `check_held`, by asking the storage for the path: before what only its holder may do."""
        self.check_held()
        if self.lease is not None:
            self.lease.confirm()

    def still_holds(self) -> bool:
        """Whether the path is ours, by asking the storage; one that does not answer leaves it at what was known."""
        if self.lease is None:
            return False
        with contextlib.suppress(LeaseLost, StorageError):
            self.lease.confirm()
        return self.lease.lost is None

    def report(self, event: Event) -> None:
        """Tell the reporter, and look on each occasion whether the work still makes sense."""
        self.check_held()
        self.reporter(event)

    def took(self, result: TaskResult) -> None:
        """Book a task's result."""
        self.entries.append(result.entry)
        self.task_seconds.add(result.seconds)
        self.check_held()
