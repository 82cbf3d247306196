"""Run a verification from its options to its summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tikv_br.errors import BackupDamaged, ChecksumMismatch
from tikv_br.progress_events import Reporter, silent
from tikv_br.steps import run_steps
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.steps import VerifyContext, check_options, verify_steps


@dataclass(frozen=True, slots=True)
class VerifySummary:
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
