"""What to look at, and where: pure, and quick to say no."""

from __future__ import annotations

from collections.abc import Sequence

from tikv_br.backupset.coverage import KeyRange, missing
from tikv_br.backupset.files import FileEntry
from tikv_br.errors import UsageError
from tikv_br.spark.executor import ExecutorKind, ExecutorOptions
from tikv_br.spark.session import check_master
from tikv_br.verify.checks import Probe
from tikv_br.verify.options import Executor, Level, VerifyOptions

SPARK_BYTES = 16 << 30
"""From so many stored bytes on, starting Spark costs less than it brings."""


def check_options(options: VerifyOptions) -> None:
    """Raise `UsageError` for what contradicts itself whatever the backup is."""
    if options.level is Level.META and not options.subset.is_all:
        raise UsageError("--subset has no meaning at level meta, which reads no file")
    if options.level is Level.RESTORE and options.cluster is None:
        raise UsageError("level restore compares with a cluster: give --pd")
    if options.executor is Executor.SPARK:
        check_master(options.spark_master)


def probes(ranges: Sequence[KeyRange], files: Sequence[FileEntry], chosen: Sequence[FileEntry]) -> list[Probe]:
    """What to ask the cluster: the range of each chosen file and, when all files are, every range without a file."""
    found = [Probe(file.key_range, file) for file in chosen]
    if len(chosen) == len(files):
        spans = [file.key_range for file in files]
        found += [Probe(hole, None) for whole in ranges for hole in missing(whole, spans)]
    return found


def choose_executor(options: VerifyOptions, work_bytes: int) -> ExecutorOptions:
    """Where tasks run that read ``work_bytes`` from the storage; comparing with a cluster reads next to nothing."""
    kind: ExecutorKind = "driver"
    if options.executor is Executor.SPARK or (options.executor is Executor.AUTO and work_bytes >= SPARK_BYTES):
        kind = "spark"
    threads = options.threads if kind == "driver" else options.concurrency
    return ExecutorOptions(kind, options.spark_master, threads)
