"""Run a comparison from its options to its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tikv_br.diff.options import DiffOptions
from tikv_br.diff.steps import COMPARISON, REPAIR, DiffContext
from tikv_br.diff.values import DifferentRange, KeyDifference, Meter
from tikv_br.progress_events import Reporter, silent
from tikv_br.spark.session import check_master
from tikv_br.steps import run_steps


@dataclass(frozen=True, slots=True)
class DiffSummary:
    """What was compared, and what differs."""

    a: str
    b: str
    api_version: str
    """Of A."""
    other_api_version: str
    """Of B."""
    ranges: int
    """Regions or files of A that were compared."""
    rows: int
    """Rows of B that were compared."""
    bytes: int
    """Their keys and values."""
    different_ranges: int
    only_a: int
    only_b: int
    value: int
    expiring: int
    """Keys on one side only that are about to expire, or have expired: no differences."""
    checksum_requests: int
    scan_requests: int
    scanned_bytes: int
    puts: int
    """Keys written to B by a repair."""
    deletes: int
    remaining: int
    """Keys that differ now: all that were found or, after a repair, what it left."""
    executor: str
    seconds: float
    session_seconds: float
    """How long Spark took to start, for the comparison and a repair; 0 on the driver."""
    step_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The summary, with what it counts."""

    summary: DiffSummary
    ranges: list[DifferentRange]
    """By ascending key."""
    keys: list[KeyDifference]
    """The first ones; no more than were asked for."""
    context: DiffContext = field(repr=False)
    """For `repair`."""


def diff(options: DiffOptions, reporter: Reporter = silent) -> DiffResult:
    """Compare A and B. Writes nothing; whoever calls looks at the summary's ``remaining``.

    Raises `UsageError` for sides that cannot be compared, and a `TikvBrError` for what kept us from comparing.
    """
    if options.executor == "spark":
        check_master(options.spark_master)
    began = time.monotonic()
    context = DiffContext(options, reporter)
    timings = run_steps(COMPARISON, context, reporter)
    keys = sorted(context.found.keys, key=lambda difference: difference.key)
    return DiffResult(
        _summary(context, time.monotonic() - began, timings),
        sorted(context.found.ranges),
        keys[: options.keys],
        context,
    )


def repair(found: DiffResult, reporter: Reporter = silent, *, delete: bool = False) -> DiffResult:
    """Write to B what a comparison found only in A, or otherwise; with ``delete`` also remove what only B has.

    Returns what was found, with a summary that tells what was written and what differs even so.
    """
    began = time.monotonic()
    context = found.context
    context.reporter, context.delete = reporter, delete
    timings = found.summary.step_seconds | run_steps(REPAIR, context, reporter)
    seconds = found.summary.seconds + time.monotonic() - began
    return replace(found, summary=_summary(context, seconds, timings))


def _summary(context: DiffContext, seconds: float, timings: dict[str, float]) -> DiffSummary:
    found, repaired = context.found, context.repaired
    counts = found.counts
    meter = Meter()
    for report in filter(None, (found, repaired)):
        meter.add(report.meter)
    return DiffSummary(
        a=str(context.a),
        b=str(context.b),
        api_version=context.a.api_version.label,
        other_api_version=context.b.api_version.label,
        ranges=len(context.units),
        rows=found.rows,
        bytes=found.size,
        different_ranges=len(found.ranges),
        only_a=counts.only_a,
        only_b=counts.only_b,
        value=counts.value,
        expiring=counts.expiring,
        checksum_requests=meter.checksums,
        scan_requests=meter.scans,
        scanned_bytes=meter.scanned_bytes,
        puts=repaired.puts if repaired else 0,
        deletes=repaired.deletes if repaired else 0,
        remaining=counts.total if repaired is None else repaired.counts.total,
        executor=context.options.where.executor,
        seconds=round(seconds, 3),
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
