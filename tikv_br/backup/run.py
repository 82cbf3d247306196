"""Run a backup from its options to its summary."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from tikv_br.backup.context import BackupContext
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.plan import Interval
from tikv_br.backup.steps import backup_steps
from tikv_br.errors import BackupSetError, LeaseLost, TikvBrError
from tikv_br.progress_events import Reporter, silent
from tikv_br.steps import run_steps

KEPT = "What was done is kept: the same command goes on from there, `tikv-br abort` removes it."


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """What a backup came to. Sums are in the destination's form, as its servers will count them after a restore."""

    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    backup_size: int
    """Bytes of the files as stored."""
    crc64xor: int
    backup_ts: int
    """0 = the source has no timestamps."""
    seconds: float
    average_speed: float
    """Bytes a second."""
    api_version: str
    dst_api_version: str
    engine: str
    engine_reason: str
    executor: str
    files: int
    ranges: int
    """Intervals, each the work of one task."""
    resumed_ranges: int
    """Those of them that earlier runs had done."""
    resumed_run: str
    """The run that began; ``""`` = this one."""
    vanished_kvs: int
    """Rows left out because they had gone when their TTL was asked for."""
    dropped_ttls: int
    """Rows whose expiry the destination could not keep."""
    dropped_tombstones: int
    file_format: str
    storage: str
    cluster_id: int
    run_id: str
    dry_run: bool
    session_seconds: float
    """Of the step that copies: how long Spark took to start; 0 on the driver."""
    task_seconds: dict[str, float]
    """Where the tasks' time went; scan runs beside the other phases."""
    step_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class BackupReport:
    """A summary, and the plan that was followed or, in a dry run, would be."""

    summary: BackupSummary
    plan: list[Interval]


def backup(options: BackupOptions, reporter: Reporter = silent) -> BackupReport:
    """Back up a cluster. Raises a `TikvBrError`; returns only when the backup is complete, or planned in a dry run."""
    began = time.monotonic()
    context = BackupContext(options, reporter)
    try:
        timings = run_steps(backup_steps(options), context, reporter)
    except TikvBrError as error:
        if context.kept and not isinstance(error, LeaseLost):
            error.hint = KEPT if isinstance(error, BackupSetError) else f"{error.hint} {KEPT}"
        raise
    return BackupReport(_summarize(context, time.monotonic() - began, timings), context.plan)


def _summarize(context: BackupContext, seconds: float, timings: dict[str, float]) -> BackupSummary:
    sums = context.manifest.statistics if context.manifest is not None else None
    total_bytes = sums.total_bytes if sums else 0
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
        files=len(context.manifest.files) if context.manifest is not None else 0,
        ranges=sums.tasks if sums else len(context.plan),
        resumed_ranges=context.resumed,
        resumed_run=context.begun_by,
        vanished_kvs=sum(entry.vanished for entry in context.entries),
        dropped_ttls=sum(entry.dropped_ttls for entry in context.entries),
        dropped_tombstones=sum(entry.dropped_tombstones for entry in context.entries),
        file_format=context.options.file_kind.value,
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
