"""Verification as a runbook. Nothing is changed anywhere, so no step has anything to take back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import BackupDamaged
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.proof.fit import check_gives_checksums, check_same_encoding
from tikv_br.spark.executor import run_tasks
from tikv_br.steps import Line, Step
from tikv_br.storage.open import open_store
from tikv_br.verify import plan, records
from tikv_br.verify.checks import CompareJob, FileJob, Report, check_file, compare_range
from tikv_br.verify.options import Finding, Level, VerifyOptions

FOREIGN_NOTES = 20
"""So many objects that do not belong to the backup are named; the rest is counted."""


@dataclass
class VerifyContext:
    """What the steps find out for one another."""

    options: VerifyOptions
    reporter: Reporter = silent
    on_finding: Callable[[Finding], None] = lambda _finding: None
    backup: BackupSet = field(init=False)
    present: list[FileEntry] = field(default_factory=list)
    """The files that are there in their size."""
    chosen: list[FileEntry] = field(default_factory=list)
    """Of the present ones, those to look into."""
    foreign: list[str] = field(default_factory=list)
    """Objects at the place that no record names."""
    findings: list[Finding] = field(default_factory=list)
    executor: str = "driver"
    session_seconds: float = 0.0
    """How long Spark took to start; 0 on the driver."""
    ranges: int = 0
    """Ranges of the cluster that were compared."""
    size: int = 0
    """Stored bytes read."""
    rows: int = 0
    """Rows found right."""

    def found(self, *findings: Finding) -> None:
        """Book what is wrong, and tell at once."""
        self.findings += findings
        for finding in findings:
            self.on_finding(finding)

    def took(self, report: Report) -> None:
        """Book a task's report."""
        self.found(*report.findings)
        self.size += report.size
        self.rows += report.rows

    @property
    def cluster(self) -> ClusterConfig:
        """Of the cluster to compare with."""
        if self.options.cluster is None:
            raise ValueError("no cluster was given")
        return self.options.cluster


def verify_steps(options: VerifyOptions) -> list[Step[VerifyContext]]:
    """The runbook of a level."""
    steps = [Line("read the backup", read_backup), Line("list the objects", list_objects)]
    match options.level:
        case Level.META:
            pass
        case Level.FILES:
            steps += [Line("choose the files", choose), Line("check every byte", check_files)]
        case Level.DATA:
            steps += [Line("choose the files", choose), Line("check every row", check_files)]
        case Level.RESTORE:
            steps += [
                Line("check that backup and cluster fit", check_fit),
                Line("choose the files", choose),
                Line("compare with the cluster", compare),
            ]
    return [*steps]


def read_backup(context: VerifyContext) -> None:
    """Read the backup's own records and hold them against each other."""
    backup, findings = records.read_backup(open_store(context.options.storage))
    context.found(*findings)
    if backup is None:
        raise BackupDamaged("none of the backup's records can be read: nothing else can be checked")
    context.backup = backup
    context.found(*records.check_records(backup))


def list_objects(context: VerifyContext) -> None:
    """See that every object is there in its size, and what else there is."""
    listing = {info.name: info for info in context.backup.store.list()}
    context.present, findings, context.foreign = records.check_listing(context.backup, listing)
    context.found(*findings)
    for name in context.foreign[:FOREIGN_NOTES]:
        context.reporter(Notice(f"{name} does not belong to the backup"))
    if len(context.foreign) > FOREIGN_NOTES:
        context.reporter(Notice(f"{len(context.foreign) - FOREIGN_NOTES} more objects do not belong to the backup"))


def choose(context: VerifyContext) -> None:
    """Choose the files to look into; of those that are missing or of another size, enough is known."""
    options = context.options
    wanted = {file.name for file in options.subset.choose(context.backup.files, options.seed)}
    context.chosen = [file for file in context.present if file.name in wanted]


def check_files(context: VerifyContext) -> None:
    """Read the chosen files."""
    backup, options = context.backup, context.options
    job = FileJob(backup.store, backup.api_version, options.level, expiry_recorded=backup.manifest is not None)
    size = sum(file.size for file in context.chosen)
    where = plan.choose_executor(options, size)
    context.executor = where.executor
    context.session_seconds = run_tasks(
        context.chosen,
        partial(check_file, job),
        options=where,
        on_result=context.took,
        name_of=lambda file: file.name,
        reporter=context.reporter,
        expected_task_bytes=size // max(len(context.chosen), 1),
    )


def check_fit(context: VerifyContext) -> None:
    """Refuse a cluster that cannot hold this backup, or cannot say what it holds."""
    info = shared_cluster(context.cluster).info()
    check_same_encoding(context.backup.api_version, info)
    check_gives_checksums(info, hint="Clusters from 6.1.1 on can.")


def compare(context: VerifyContext) -> None:
    """Compare what the stores hold with what the backup says."""
    backup = context.backup
    job = CompareJob(context.cluster, backup.store, backup.api_version)
    tasks = plan.probes(backup.ranges, backup.files, context.chosen)
    where = plan.choose_executor(context.options, 0)
    context.executor = where.executor
    context.session_seconds = run_tasks(
        tasks,
        partial(compare_range, job),
        options=where,
        on_result=context.took,
        name_of=str,
        reporter=context.reporter,
    )
    context.ranges = len(tasks)
