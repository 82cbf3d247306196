"""A verification from its options to its summary. No step changes anything, so none needs an undo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from tikv_br.backupset import layout
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of, keyspace_codec
from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace, matching_keyspace
from tikv_br.compare.files import FilePart
from tikv_br.errors import BackupDamaged, BackupSetError, ChecksumMismatch, UsageError
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection, subtract
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.steps import FunctionStep, Step, run_steps
from tikv_br.storage.open import open_store
from tikv_br.tasks.executor import ExecutorOptions, run_tasks
from tikv_br.verify.checks import (
    CompareJob,
    FileJob,
    TaskFindings,
    check_listing,
    check_part,
    check_records,
    compare_with_cluster,
    name_of,
    read_records,
)
from tikv_br.verify.options import Finding, Level, VerifyOptions

SPARK_BYTES = 16 << 30
"""Stored bytes from which on Spark is used if the executor is ``auto``."""


def check_options(options: VerifyOptions) -> None:
    """Raise `UsageError` for options that are invalid for every backup."""
    if options.level is Level.META and not options.subset.is_all:
        raise UsageError("--subset cannot be used at level meta, which reads no files")
    if options.level is Level.RESTORE and options.cluster is None:
        raise UsageError("level restore compares the backup with a cluster: pass --pd")
    if options.level is Level.META and options.span != EVERY_KEY:
        raise UsageError("--prefix and --range cannot be used at level meta, which reads no files")
    if options.level is not Level.RESTORE and options.to_keyspace:
        raise UsageError("--to-keyspace needs --level restore, which compares a cluster")
    options.check_executor()


class ComparedRange(NamedTuple):
    """A range of the backup, and the keys that its rows have in the cluster."""

    span: KeyRange
    rewrite: Rewrite = UNCHANGED


def compare_tasks(
    ranges: Sequence[ComparedRange], chosen: Sequence[FilePair], *, with_gaps: bool
) -> list[FilePart | KeyRange]:
    """The parts of the chosen files to compare and, if all files are chosen, the cluster's ranges without a file."""
    found = [
        FilePart(pair.file, span, each.rewrite, pair.values)
        for pair in chosen
        for each in ranges
        if not (span := intersection(pair.file.key_range, each.span)).is_empty
    ]
    gaps = subtract([each.rewrite.range(each.span) for each in ranges], [part.target for part in found])
    return [*found, *gaps] if with_gaps else [*found]


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
    wanted: list[ComparedRange] = field(default_factory=list)
    """What to compare with the cluster, at level restore."""
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


def wanted_pairs(context: VerifyContext) -> list[FilePair]:
    """The files with keys of the wanted range."""
    backup, span = context.backup, context.options.span
    if span == EVERY_KEY:
        return list(backup.pairs)
    found = []
    for pair in backup.pairs:
        keys = pair.file.key_range
        codec = codec_of(backup.api_version, keys, backup.key_mode)
        if not intersection(keys, codec.rpc_range(span)).is_empty:
            found.append(pair)
    return found


def choose_files(context: VerifyContext) -> None:
    """Choose the files to read; missing files and files of another size are findings already."""
    options, present = context.options, set(context.present)
    pairs = wanted_pairs(context)
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
    """Check that the cluster has the backup's encoding and supports checksums, and find its keyspaces."""
    context.backup.require_full()
    cluster = context.clusters.get(context.cluster)
    cluster.info(context.reporter).require_encoding(context.backup.api_version)
    if context.backup.key_mode is KeyMode.RAW:
        cluster.require(versions.CHECKSUMS)
    for whole in context.backup.ranges:
        source = context.backup.codec_of(whole)
        if not (span := intersection(whole, source.rpc_range(context.options.span))).is_empty:
            rewrite = (
                Rewrite.of(source, b"", target, b"") if (target := _target(context, source)) != source else UNCHANGED
            )
            context.wanted.append(ComparedRange(span, rewrite))
    if context.options.to_keyspace and len({each.rewrite.old for each in context.wanted}) > 1:
        raise UsageError("--to-keyspace: the backup has several keyspaces, which cannot be in one")


def _target(context: VerifyContext, source: KeyCodec) -> KeyCodec:
    """The cluster's keyspace of a keyspace of the backup. Raises `UsageError`."""
    cluster, chosen = context.clusters.get(context.cluster), context.options.to_keyspace
    if chosen:
        return keyspace_codec(source.api_version, chosen_keyspace(cluster, chosen), "--to-keyspace", mode=source.mode)
    if not (source.is_v2 and context.options.by_name):
        return source
    names = {} if context.backup.manifest is None else context.backup.manifest.description.names
    return KeyCodec(
        source.api_version,
        matching_keyspace(cluster.pd, source.keyspace_id, names, "--to-keyspace", context.reporter),
        source.mode,
    )


def compare(context: VerifyContext) -> None:
    """Compare the cluster's checksums with the backup's."""
    backup = context.backup
    job = CompareJob(context.cluster, backup.store, backup.api_version, backup.key_mode, backup.expiry_recorded)
    pairs, present = wanted_pairs(context), set(context.parts)
    chosen = [pair for pair in pairs if pair in present]
    tasks = compare_tasks(context.wanted, chosen, with_gaps=len(chosen) == len(pairs))
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


class VerifySummary(Struct, frozen=True):
    """Result of a verification without findings."""

    level: str
    files: int
    """Files of the backup."""
    files_checked: int
    """Files that were read, or compared with the cluster; 0 at level meta."""
    subset: str
    """The value of ``--subset``; ``100%`` by default."""
    seed: int
    rows_checked: int
    bytes_read: int
    """Stored bytes read."""
    ranges_compared: int
    """Ranges compared with the cluster, at level restore."""
    foreign_objects: int
    """Objects at the path that do not belong to the backup."""
    api_version: str
    backup_ts: int
    storage: str
    executor: str
    seconds: float
    session_seconds: float
    """Start-up time of Spark; 0 on the driver."""
    step_seconds: dict[str, float]


def verify(
    options: VerifyOptions,
    reporter: Reporter = silent,
    on_finding: Callable[[Finding], None] = lambda _finding: None,
) -> VerifySummary:
    """Verify a backup; returns if there is no finding.

    ``on_finding`` gets each finding as soon as it is found. Raises `BackupDamaged` with the number of findings,
    `ChecksumMismatch` if the backup is intact and only the cluster differs, or the `TikvBrError` that prevented the verification.
    """
    check_options(options)
    began = time.monotonic()
    context = VerifyContext(options, reporter, on_finding)
    with context.clusters:
        timings = run_steps(verify_steps(options), context, reporter)
    _raise_findings(context.findings)
    return VerifySummary(
        level=options.level.value,
        files=len(context.backup.files),
        files_checked=sum(len(part.files) for part in context.parts),
        subset=str(options.subset),
        seed=options.seed,
        rows_checked=context.rows,
        bytes_read=context.size,
        ranges_compared=context.ranges,
        foreign_objects=len(context.foreign),
        api_version=context.backup.api_version.label,
        backup_ts=context.backup.backup_ts,
        storage=context.backup.store.location.redacted(),
        executor=context.executor,
        seconds=round(time.monotonic() - began, 3),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )


def _raise_findings(findings: list[Finding]) -> None:
    if not findings:
        return
    objects = len({finding.object for finding in findings})
    message = f"{len(findings)} {'finding' if len(findings) == 1 else 'findings'} in {objects} of the objects"
    if all(finding.level is Level.RESTORE for finding in findings):
        raise ChecksumMismatch(f"{message}: the cluster differs from the backup")
    raise BackupDamaged(f"{message} of the backup")
