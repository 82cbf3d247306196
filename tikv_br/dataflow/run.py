"""Runs the steps of an operation that makes a backup, up to its summary; aborts an unfinished one. `BackupContext` is what the steps share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from tikv_br import run_id
from tikv_br.backupset import layout, lease
from tikv_br.backupset import manifest as run_record
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backup_writer import BackupWriter
from tikv_br.backupset.coverage import keyspaces_in
from tikv_br.backupset.lease import PathLease
from tikv_br.backupset.ledger import FinishedTask
from tikv_br.backupset.manifest import Manifest, PathState
from tikv_br.cancellation import clean_up
from tikv_br.cluster import safepoint
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.safepoint import SafePointKeeper, service_id
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine, Interval
from tikv_br.dataflow.write import PhaseSeconds, Snapshot, TaskResult
from tikv_br.errors import BackupDamaged, BackupPathInUse, BackupSetError, CrypterMismatch, Failure, LeaseLost
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Reporter, silent
from tikv_br.steps import Step, run_steps
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import keep_freed_memory


class Lineage(Struct, frozen=True):
    """The backups that a backup continues or was made from; see the same fields of `Description`."""

    parent: str = ""
    since_ts: int = 0
    parent_sha256: bytes = b""
    merged_from: tuple[str, ...] = ()


@dataclass(repr=False, eq=False)
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


C = TypeVar("C", bound=BackupContext)
KEPT = "The finished part is kept: the same command resumes the backup, `tikv-br backup abort` removes it."


class BackupSummary(Struct, frozen=True):
    """Result of a backup. Sums are those that a cluster of the destination's API version computes after a restore."""

    total_kvs: int
    total_bytes: int
    """Bytes of keys and values, before encoding and compression."""
    backup_size: int
    """Bytes of the files as stored."""
    crc64xor: int
    backup_ts: int
    """0 if the source has no timestamps."""
    seconds: float
    average_speed: float
    """Bytes of keys and values per second."""
    api_version: str
    dst_api_version: str
    engine: str
    engine_reason: str
    executor: str
    executor_reason: str
    files: int
    ranges: int
    """Intervals; each is one task."""
    resumed_ranges: int
    """Intervals that earlier runs had finished."""
    resumed_run: str
    """Id of the run that was resumed; ``""`` if none was."""
    compared_ranges: int
    """Number of intervals that equal the cluster's checksum or rows, with ``--checksum``."""
    changed_ranges: int
    """Number of intervals that could not be compared because they changed during the backup, with ``--checksum``."""
    vanished_kvs: int
    """Rows left out because they no longer existed when their TTL was read."""
    expiry_error_seconds: int
    """Maximum number of seconds by which recorded expiries may be too early; 0 if stores write the files."""
    dropped_ttls: int
    """Rows whose expiry was lost, because the destination has no TTLs."""
    dropped_tombstones: int
    file_format: str
    key_mode: str
    """``raw`` or ``txn``."""
    keyspaces: tuple[int, ...]
    """Ids; empty before API V2."""
    keyspace_names: tuple[str, ...]
    """Names of `keyspaces` in their order, empty ones if PD knows none; empty = PD knows none of them."""
    storage: str
    cluster_id: int
    run_id: str
    dry_run: bool
    session_seconds: float
    """Start-up time of Spark; 0 on the driver."""
    task_seconds: dict[str, float]
    """Seconds per phase, summed over all tasks; scan overlaps with the other phases."""
    step_seconds: dict[str, float]


class BackupReport(Struct, frozen=True):
    """The summary and the plan; a dry run has only planned."""

    summary: BackupSummary
    plan: list[Interval]


def run_backup(context: C, steps: Sequence[Step[C]]) -> BackupReport:
    """Run the steps of a full, incremental or merged backup. An error's hint says if finished work is kept. Raises `TikvBrError`."""
    began = time.monotonic()
    keep_freed_memory()  # before gRPC has threads, each with a heap
    try:
        with context.clusters:
            timings = run_steps(steps, context, context.reporter, clean_up)
    except Failure as error:
        if _is_resumable(context, error):
            error.hint = KEPT if isinstance(error, BackupSetError) else f"{error.hint} {KEPT}"
        raise
    return BackupReport(_summarize(context, time.monotonic() - began, timings), context.plan)


def _is_resumable(context: BackupContext, error: Failure) -> bool:
    is_unfinished = bool(context.work_kept) and context.manifest is None
    return is_unfinished and not isinstance(error, LeaseLost) and "--no-resume" not in error.hint


def _summarize(context: BackupContext, seconds: float, timings: dict[str, float]) -> BackupSummary:
    sums = context.manifest.statistics if context.manifest is not None else None
    total_bytes = sums.total_bytes if sums else 0
    keyspaces = keyspaces_in(context.conversion.target, context.target_ranges)
    return BackupSummary(
        total_kvs=sums.total_kvs if sums else 0,
        total_bytes=total_bytes,
        backup_size=sums.backup_size if sums else 0,
        crc64xor=sums.crc64xor if sums else 0,
        backup_ts=context.backup_ts,
        seconds=round(seconds, 3),
        average_speed=round(total_bytes / max(seconds, 1e-9)),
        api_version=context.conversion.source.label,
        dst_api_version=context.conversion.target.label,
        engine=context.engine.name,
        engine_reason=context.engine.reason,
        executor=context.engine.executor,
        executor_reason=context.engine.executor_reason,
        files=len(context.manifest.files) if context.manifest is not None else 0,
        ranges=sums.tasks if sums else len(context.plan),
        resumed_ranges=context.resumed,
        resumed_run=context.resumed_run,
        compared_ranges=context.compared,
        changed_ranges=context.changed,
        vanished_kvs=sum(each.vanished for each in context.finished),
        expiry_error_seconds=max((each.expiry_error_seconds for each in context.finished), default=0),
        dropped_ttls=sum(each.dropped_ttls for each in context.finished),
        dropped_tombstones=sum(each.dropped_tombstones for each in context.finished),
        file_format=context.options.file_kind.value,
        key_mode=context.options.key_mode.value,
        keyspaces=keyspaces,
        keyspace_names=tuple(context.keyspace_names.get(each, "") for each in keyspaces)
        if context.keyspace_names
        else (),
        storage=context.options.storage.redacted(),
        cluster_id=context.info.cluster_id,
        run_id=context.run_id,
        dry_run=context.options.dry_run,
        session_seconds=round(context.session_seconds, 3),
        task_seconds=_rounded(asdict(context.task_seconds)),
        step_seconds=_rounded(timings),
    )


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


class AbortSummary(Struct, frozen=True):
    """Result of `abort_backup`."""

    unfinished_run: str
    """Id of the run; ``""`` if unknown."""
    removed_objects: int
    released: bool
    """True if the service safe point was removed from PD."""


def abort_backup(location: StorageLocation, cluster: ClusterConfig | None, lock_wait: float = 0.0) -> AbortSummary:
    """Remove the files of unfinished runs at a path and, if ``cluster`` is given, their service safe point.

    Raises `BackupPathInUse` for a complete backup and for files of other tools, `LeaseHeld` while a run is alive.
    """
    store = open_store(location)
    if next(iter(store.list()), None) is None:
        return AbortSummary("", 0, released=False)
    with lease.acquire(store, "abort", wait=lock_wait) as lock_lease:
        try:
            unfinished = run_record.read_run(store)
        except (BackupDamaged, CrypterMismatch):  # removed anyway
            unfinished = None
        lock_lease.confirm()
        if unfinished is not None and cluster is not None and not exists(store, layout.META):
            with Cluster.connect(cluster) as live:  # before its name is removed with the record
                safepoint.release(live.pd, service_id(unfinished.run_id, location))
        removed = BackupWriter(store).discard(lock_lease.check)
    return AbortSummary(
        unfinished.run_id if unfinished else "", removed, unfinished is not None and cluster is not None
    )


TEMPORARY_ENGINES = frozenset({"load", "merge"})
"""Engines of the backups that operations make for themselves, and remove."""


def open_temporary(store: ObjectStore) -> BackupSet:
    """Open a temporary backup. Raises `BackupPathInUse` if another kind of backup is there, and as `BackupSet.open`."""
    found = BackupSet.open(store)
    if found.manifest is None or found.manifest.description.engine not in TEMPORARY_ENGINES:
        raise BackupPathInUse(
            f"{store.location} holds a backup, which is no temporary one: it is neither used nor removed",
            hint="Move it elsewhere, or pass another folder for temporary files.",
        )
    return found


def remove_temporary(store: ObjectStore) -> None:
    """Remove a temporary backup, and nothing else at its path. Raises as `open_temporary`.

    Its description goes first and its lock last: what an interruption leaves is an unfinished backup.
    """
    if exists(store, layout.META):
        open_temporary(store)
    store.delete(layout.META)
    for name in layout.own(info.name for info in store.list()):
        if name != layout.LOCK and (layout.is_data(name) or name.startswith(f"{layout.FOLDER}/")):
            store.delete(name)
    store.delete(layout.LOCK)
    store.sweep("", deep=True)
