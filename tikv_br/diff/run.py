"""Run a comparison from its options to its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tikv_br.diff.options import DiffOptions
from tikv_br.diff.steps import Confirm, DiffContext, diff_steps
from tikv_br.diff.values import DifferentRange, KeyDifference
from tikv_br.errors import UsageError
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
    step_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The summary, with what it counts."""

    summary: DiffSummary
    ranges: list[DifferentRange]
    """By ascending key."""
    keys: list[KeyDifference]
    """The first ones; no more than were asked for."""


def diff(options: DiffOptions, reporter: Reporter = silent, confirm: Confirm = lambda _counts: False) -> DiffResult:
    """Compare, and repair where ``confirm`` agrees to what was counted; whoever calls looks at ``remaining``.

    Raises `UsageError` for options that contradict themselves, and a `TikvBrError` for what kept us from comparing.
    """
    if options.delete and not options.repair:
        raise UsageError("--repair-delete goes with --repair")
    if options.executor == "spark":
        check_master(options.spark_master)
    began = time.monotonic()
    context = DiffContext(options, reporter, confirm)
    timings = run_steps(diff_steps(options), context, reporter)
    return DiffResult(
        _summary(context, time.monotonic() - began, timings),
        sorted(context.found.ranges),
        sorted(context.found.keys, key=lambda difference: difference.key)[: options.keys],
    )


def _summary(context: DiffContext, seconds: float, timings: dict[str, float]) -> DiffSummary:
    found, repaired = context.found, context.repaired
    counts = found.counts
    if repaired is not None:
        found.meter.add(repaired.meter)
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
        checksum_requests=found.meter.checksums,
        scan_requests=found.meter.scans,
        scanned_bytes=found.meter.scanned_bytes,
        puts=repaired.puts if repaired else 0,
        deletes=repaired.deletes if repaired else 0,
        remaining=counts.total if repaired is None else repaired.counts.total,
        executor=context.options.where.executor,
        seconds=round(seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
    )
