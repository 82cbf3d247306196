"""An export, from its options to its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tikv_br.cancellation import clean_up
from tikv_br.export import steps
from tikv_br.export.options import ExportOptions
from tikv_br.progress_events import Reporter, silent
from tikv_br.steps import FunctionStep, run_steps

EXPORT = (
    FunctionStep("check the input", steps.check_input),
    FunctionStep("open the source", steps.open_source),
    FunctionStep("check the destination", steps.check_destination),
    FunctionStep("check the files", steps.check_files),
    FunctionStep("look for rows", steps.look_for_rows),
    FunctionStep("plan", steps.make_plan),
    FunctionStep("acquire the export lock", steps.acquire_lock, steps.release_lock),
    FunctionStep("export", steps.copy, steps.remove_parts),
    FunctionStep("commit", steps.commit),
    FunctionStep("release the lock", steps.release_lock),
)
"""The steps of an export."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """Result of an export."""

    total_kvs: int
    total_bytes: int
    """Bytes of user keys and values."""
    files: int
    size: int
    """Bytes of the files."""
    file_format: str
    encoding: str
    """Text form of keys and values; empty for Parquet."""
    columns: tuple[str, ...]
    source: str
    storage: str
    api_version: str
    keyspace_id: int
    backup_ts: int
    """0 = the backup has none, or a cluster was read."""
    vanished_kvs: int
    expiry_error_seconds: int
    executor: str
    executor_reason: str
    seconds: float
    average_speed: float
    session_seconds: float
    step_seconds: dict[str, float]


def export(options: ExportOptions, reporter: Reporter = silent) -> ExportSummary:
    """Export the rows of a cluster or a backup; returns when the export is complete. Raises `TikvBrError`."""
    began = time.monotonic()
    context = steps.ExportContext(options, reporter)
    with context.clusters:
        timings = run_steps(EXPORT, context, reporter, clean_up)
    seconds = time.monotonic() - began
    options, parts, source = context.options, context.parts, context.source
    total_bytes = sum(part.data_bytes for part in parts)
    return ExportSummary(
        total_kvs=sum(part.rows for part in parts),
        total_bytes=total_bytes,
        files=len(parts),
        size=sum(part.size for part in parts),
        file_format=options.format,
        encoding="" if options.format == "parquet" else options.form,
        columns=context.columns,
        source=context.source_name,
        storage=options.read.storage.redacted(),
        api_version=source.codec.api_version.label,
        keyspace_id=source.codec.keyspace_id,
        backup_ts=context.backup_ts,
        vanished_kvs=sum(part.vanished for part in parts),
        expiry_error_seconds=max((part.expiry_error_seconds for part in parts), default=0),
        executor=context.engine.executor,
        executor_reason=context.engine.executor_reason,
        seconds=round(seconds, 3),
        average_speed=round(total_bytes / max(seconds, 1e-9)),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
