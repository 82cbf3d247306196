"""Run a restore from its options to its summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tikv_br.backupset.files import totals
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.plan import RestorePlan
from tikv_br.restore.steps import restore_steps
from tikv_br.steps import run_steps


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """What a restore did, or with a dry run would do. Bytes are of keys and values before encoding."""

    total_kvs: int
    total_bytes: int
    backup_size: int
    """Bytes of the files as stored."""
    crc64xor: int
    """Of the files' rows, as the backup recorded it; for files taken in part, of all their rows."""
    verified: bool
    """Whether the cluster's own checksums were found equal."""
    backup_ts: int
    seconds: float
    average_speed: float
    """Bytes a second."""
    api_version: str
    dst_api_version: str
    engine: str
    files: int
    resumed_files: int
    """Of those, how many an unfinished restore had brought in wholly."""
    regions: int
    """Into which files were ingested, each counted once a file."""
    expired_kvs: int
    """Rows that were not put because they had expired; 0 for an ingest, which brings them in, to be seen by nobody."""
    uploaded_files: int
    """Of `files`, how many were sent to the stores from here."""
    restamp_ts: int
    """The timestamp that all rows got; 0 = they kept their own, or were put."""
    cluster_id: int
    dry_run: bool
    session_seconds: float
    """Of the ingest or put: how long Spark took to start; 0 on the driver."""
    step_seconds: dict[str, float]


def restore(
    options: RestoreOptions,
    reporter: Reporter = silent,
    on_plan: Callable[[RestorePlan], None] = lambda _plan: None,
) -> RestoreSummary:
    """Restore a backup. Raises a `TikvBrError`; returns only when all that was asked is done and proven.

    ``on_plan`` gets the plan of a dry run, which ends with it.
    """
    began = time.monotonic()
    context = RestoreContext(options, reporter)
    timings = run_steps(restore_steps(options), context, reporter)
    seconds = time.monotonic() - began
    if context.plan is not None:
        on_plan(context.plan)
    sums = totals(part.file for part in context.parts)
    rows, size = sums.total_kvs, sums.total_bytes
    if context.found is not None:
        rows, size = context.found.total_kvs, context.found.total_bytes
    manifest = context.backup.manifest
    source = manifest.description.api_version if manifest else context.backup.api_version
    return RestoreSummary(
        total_kvs=rows,
        total_bytes=size,
        backup_size=sums.size,
        crc64xor=context.found.crc64xor if context.found is not None else sums.crc64xor,
        verified=context.found is not None,
        backup_ts=context.backup.backup_ts,
        seconds=round(seconds, 3),
        average_speed=round(size / max(seconds, 1e-9)),
        api_version=source.label,
        dst_api_version=context.backup.api_version.label,
        engine=options.mode.value,
        files=len(context.parts),
        resumed_files=context.resumed_files,
        regions=context.brought.regions,
        expired_kvs=context.brought.expired,
        uploaded_files=context.brought.uploaded,
        restamp_ts=context.restamp_ts,
        cluster_id=context.info.cluster_id,
        dry_run=options.dry_run,
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
