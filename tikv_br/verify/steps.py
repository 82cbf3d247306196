"""The steps of a verification. None changes anything, so none needs an undo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.compare.files import FilePart
from tikv_br.errors import (
    BackupDamaged,
    BackupSetError,
    UsageError,
)
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange, subtract
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.open import open_store
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.verify.checks import CompareJob, FileJob, TaskFindings, check_part, compare_with_cluster, name_of
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.records import check_listing, check_records, read_records

SPARK_BYTES = 16 << 30
"""Stored bytes from which on Spark is used if the executor is ``auto``."""


def check_options(options: VerifyOptions) -> None:
    """Raise `UsageError` for options that are invalid for every backup."""
    if options.level is Level.META and not options.subset.is_all:
        raise UsageError("--subset cannot be used at level meta, which reads no files")
    if options.level is Level.RESTORE and options.cluster is None:
        raise UsageError("level restore compares the backup with a cluster: pass --pd")
    options.check_executor()


def compare_tasks(
    ranges: Sequence[KeyRange], pairs: Sequence[FilePair], chosen: Sequence[FilePair]
) -> list[FilePart | KeyRange]:
    """Return the parts to compare: the chosen files and, if all files are chosen, the ranges without a file."""
    found = [FilePart(pair.file, pair.file.key_range, values=pair.values) for pair in chosen]
    if len(chosen) < len(pairs):
        return [*found]
    return [*found, *subtract(ranges, [pair.file.key_range for pair in pairs])]


def choose_executor(options: VerifyOptions, work_bytes: int) -> ExecutorOptions:
    """The executor for tasks that read ``work_bytes`` from the storage."""
    by_spark = options.executor == "spark" or (options.executor == "auto" and work_bytes >= SPARK_BYTES)
    return options.choose("spark" if by_spark else "driver", options.threads)


FOREIGN_NOTES = 20
"""Maximum number of foreign objects that are named; the others are only counted."""


@dataclass
class VerifyContext:
    """State that the steps share."""

    options: VerifyOptions
    reporter: Reporter = silent
    on_finding: Callable[[Finding], None] = lambda _finding: None
    clusters: ClusterPool = field(default_factory=ClusterPool)
    backup: BackupSet = field(init=False)
    present: list[FileEntry] = field(default_factory=list)
    """Files that exist with the recorded size."""
    parts: list[FilePair] = field(default_factory=list)
    """Files among `present` to read; a file without the other one of its part is a part of its own."""
    foreign: list[str] = field(default_factory=list)
    """Objects at the path that no record names."""
    findings: list[Finding] = field(default_factory=list)
    executor: str = "driver"
    session_seconds: float = 0.0
    """Start-up time of Spark; 0 on the driver."""
    ranges: int = 0
    """Ranges compared with the cluster."""
    size: int = 0
    """Stored bytes read."""
    rows: int = 0
    """Rows without a finding."""

    def add_findings(self, *findings: Finding) -> None:
        """Add findings, and report them at once."""
        self.findings += findings
        for finding in findings:
            self.on_finding(finding)

    def add_report(self, report: TaskFindings) -> None:
        """Add a task's report."""
        self.add_findings(*report.findings)
        self.size += report.size
        self.rows += report.rows

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster to compare with."""
        if self.options.cluster is None:
            raise ValueError("no cluster was given")
        return self.options.cluster


def verify_steps(options: VerifyOptions) -> list[Step[VerifyContext]]:
    """The steps of a level."""
    steps = [FunctionStep("read the backup", read_backup), FunctionStep("list the objects", list_objects)]
    match options.level:
        case Level.META:
            pass
        case Level.FILES:
            steps += [FunctionStep("choose the files", choose_files), FunctionStep("check every byte", check_files)]
        case Level.DATA:
            steps += [FunctionStep("choose the files", choose_files), FunctionStep("check every row", check_files)]
        case Level.RESTORE:
            steps += [
                FunctionStep("check that backup and cluster match", check_fit),
                FunctionStep("choose the files", choose_files),
                FunctionStep("compare with the cluster", compare),
            ]
    return [*steps]


def read_backup(context: VerifyContext) -> None:
    """Read the backup's records, and check them for contradictions."""
    backup, findings = read_records(open_store(context.options.storage))
    context.add_findings(*findings)
    if backup is None:
        raise BackupDamaged("neither backupmeta nor the manifest can be read, so nothing else can be checked")
    context.backup = backup
    context.add_findings(*check_records(backup))
    try:
        backup.chain()
    except BackupSetError as error:
        context.add_findings(Finding(layout.MANIFEST, f"the backup that it continues: {error.message}", Level.META))


def list_objects(context: VerifyContext) -> None:
    """List the objects: check the sizes of the files, and look for foreign objects."""
    listing = {info.name: info for info in context.backup.store.list()}
    context.present, findings, context.foreign = check_listing(context.backup, listing)
    context.add_findings(*findings)
    for name in context.foreign[:FOREIGN_NOTES]:
        context.reporter(Notice(f"{name} does not belong to the backup"))
    if len(context.foreign) > FOREIGN_NOTES:
        context.reporter(Notice(f"{len(context.foreign) - FOREIGN_NOTES} more objects do not belong to the backup"))


def choose_files(context: VerifyContext) -> None:
    """Choose the files to read; missing files and those of another size are findings already."""
    options, pairs, present = context.options, context.backup.pairs, set(context.present)
    wanted = set(options.subset.choose([pair.file for pair in pairs], options.seed))
    for pair in pairs:
        if pair.file in wanted:
            whole = present.issuperset(pair.files)
            context.parts += [pair] if whole else [FilePair(file) for file in pair.files if file in present]


def check_files(context: VerifyContext) -> None:
    """Read and check the chosen files."""
    backup, options = context.backup, context.options
    job = FileJob(
        backup.store,
        backup.api_version,
        backup.key_mode,
        options.level,
        expiry_recorded=backup.expiry_recorded,
        backup_ts=backup.backup_ts,
        is_increment=backup.is_increment,
    )
    sizes = [sum(file.size for file in part.files) for part in context.parts]
    where = choose_executor(options, sum(sizes))
    context.executor = where.executor
    context.session_seconds = run_tasks(
        context.parts,
        partial(check_part, job),
        options=where,
        on_result=context.add_report,
        name_of=lambda part: part.file.name,
        reporter=context.reporter,
        planned_bytes=sizes,
    )


def check_fit(context: VerifyContext) -> None:
    """Check that the cluster has the backup's encoding and supports checksums."""
    context.backup.require_full()
    cluster = context.clusters.get(context.cluster)
    cluster.info(context.reporter).require_encoding(context.backup.api_version)
    if context.backup.key_mode is KeyMode.RAW:
        cluster.require(versions.CHECKSUMS)


def compare(context: VerifyContext) -> None:
    """Compare the cluster's checksums with the backup's."""
    backup = context.backup
    job = CompareJob(context.cluster, backup.store, backup.api_version, backup.key_mode, backup.expiry_recorded)
    pairs, present = backup.pairs, set(context.parts)
    tasks = compare_tasks(backup.ranges, pairs, [pair for pair in pairs if pair in present])
    where = choose_executor(context.options, 0)
    context.executor = where.executor
    context.session_seconds = run_tasks(
        tasks,
        partial(compare_with_cluster, job),
        options=where,
        on_result=context.add_report,
        name_of=name_of,
        reporter=context.reporter,
        shared=[context.clusters],
    )
    context.ranges = len(tasks)
