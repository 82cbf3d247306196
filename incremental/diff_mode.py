"""Sync for sources without timestamps (API V1 and V1TTL): passes that compare ranges and write the differences.

Each pass requests the checksum of every range (a region of the source) from both clusters. A range is skipped if both
checksums are the same as when its rows were last found equal. All other ranges are compared row by row, and rows that differ
are written or deleted. At the end of a pass the target has everything that was written before the pass started.

Rows that changed only at the target are detected by its checksum. A changed TTL is not detected until the old one expires.
Changes that do not change the checksum (an XOR of CRCs, and CRC is linear) are detected only by exact passes, which read all
rows. Run one before a cut-over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.cluster.txnkv import refuse_transactions
from tikv_br.cluster.versions import WRITE_DEADLINE
from tikv_br.compare.report import Meter, Report
from tikv_br.diff.places import ClusterPlace, DiffOptions, Unit
from tikv_br.diff.run import DiffContext, find_sides, plan_ranges
from tikv_br.diff.task import DiffJob, Repair, RepairJob, compare_units, repair_ranges
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted, TikvBrError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.retry import Patience
from tikv_br.tasks.executor import run_tasks
from tikv_br.tasks.task import TaskContext

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Maximum wait after a pass that failed."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The result of one pass. Times are in seconds."""

    number: int
    """Number of the pass, from 1."""
    exact: bool
    began_ms: int
    """Start, in milliseconds since the epoch by PD's clock: the target has everything written before this."""
    seconds: float
    """Duration, which is also how far the target is behind at the end."""
    ranges: int
    changed_ranges: int
    """Ranges that were compared, because a checksum had changed or was not known."""
    puts: int
    deletes: int
    remaining: int
    """Keys that still differed after they had been written, because they keep changing."""
    checksum_requests: int
    scanned_bytes: int
    """Size of keys and values read from both clusters."""


@dataclass(frozen=True, slots=True)
class DiffModeOptions:
    """Times are in seconds."""

    diff: DiffOptions
    """A is the source, B the target."""
    check_target: Callable[[ApiVersion], None] = lambda _: None
    """Raises if the target has an unexpected API version."""
    interval: float = 30.0
    """Time from the start of a pass to the start of the next one; a longer pass delays the next one."""
    exact_every: int = 0
    """Make every N-th pass exact; 0 = none."""
    patience: float = 600.0
    """Seconds for which passes may fail continuously because a cluster does not answer."""
    fence: Callable[[], object] | None = None
    """Called before each write to the target; raises to prevent it. With a fence, passes must run in this process."""


class Sums(NamedTuple):
    """The checksums of a range in both clusters."""

    source: Checksum
    target: Checksum


@dataclass(frozen=True, slots=True)
class RangePass:
    """The result of one range. Picklable."""

    span: KeyRange
    sums: Sums | None
    """The checksums at which its rows were equal; None = compare it again in the next pass."""
    changed: bool
    report: Report


class _PassStopped(Exception):
    """Raised to end the current pass."""


class DiffMode:
    """Runs passes over one range, one after the other. Not thread-safe, except for `stop` and `force_exact`."""

    def __init__(self, options: DiffModeOptions, stop: threading.Event | None = None) -> None:
        """Does not connect yet. Setting the event `stop` has the effect of `stop()`."""
        self._options = options
        self._clusters = ClusterPool()
        self._sides: DiffContext | None = None
        self._known: dict[KeyRange, Sums] = {}
        self._passes = 0
        self._stop = stop or threading.Event()
        self._exact = False

    def run(
        self,
        on_pass: Callable[[Pass], None],
        on_start: Callable[[], object] = lambda: None,
        on_failure: Callable[[TikvBrError], object] = lambda _error: None,
    ) -> None:
        """Run passes until `stop`. Calls `on_start` before each pass, and `on_pass` after each that succeeded.

        If a cluster does not answer, also at the start, calls `on_failure` and retries for the patience in the options.
        Raises `UsageError` for clusters that cannot be compared, `ConversionUnsupported` for a row with a TTL if the target
        does not support TTLs, and other `TikvBrError`.
        """
        every = self._options.exact_every
        failures = Patience(self._options.patience, "--sink-patience")
        with self._clusters, suppress(_PassStopped):
            while not self._stop.is_set():
                began, wait = time.monotonic(), self._options.interval
                try:
                    on_start()
                    exact = self._exact or (bool(every) and (self._passes + 1) % every == 0)
                    on_pass(self.run_pass(exact=exact))
                    failures.end()
                except (ClusterUnreachable, RetryBudgetExhausted) as error:
                    failures.fail(error, began)
                    log.warning("the pass failed, retrying: %s", error.message)
                    on_failure(error)
                    wait = min(wait, RETRY_SECONDS)
                self._stop.wait(max(began + wait - time.monotonic(), 0))

    def force_exact(self) -> None:
        """Make all passes exact that start from now on. Thread-safe."""
        self._exact = True

    def stop(self) -> None:
        """End `run` and the current pass; the first pass of the next run compares the remaining ranges. Thread-safe."""
        self._stop.set()

    def run_pass(self, *, exact: bool = False) -> Pass:
        """Make the target equal to the source. An exact pass ignores checksums. Raises as `run`, without retries."""
        began = time.monotonic()
        context, source = self._find_sides()
        began_ms = physical_ms(self._clusters.get(source.config).pd.tso())
        plan_ranges(context)
        followed: list[RangePass] = []
        repair = RepairJob(replace(context.job, exact=exact), delete=True, fence=self._options.fence)
        run_tasks(
            context.units,
            partial(sync_range, repair, source, {} if exact else self._known),
            options=context.options.where,
            on_result=partial(self._record, followed),
            name_of=str,
            shared=[context.clusters],
        )
        wanted = {unit.span for unit in context.units}
        self._known = {span: sums for span, sums in self._known.items() if span in wanted}
        self._passes += 1
        return _pass(self._passes, followed, exact=exact, began_ms=began_ms, seconds=time.monotonic() - began)

    def _find_sides(self) -> tuple[DiffContext, ClusterPlace]:
        if self._sides is None:
            context = DiffContext(self._options.diff, clusters=self._clusters)
            find_sides(context)
            self._options.check_target(context.b.codec.api_version)
            for place in (context.a, context.b):
                if isinstance(place, ClusterPlace):
                    refuse_transactions(self._clusters.get(place.config), context.options.span)
            self._clusters.get(context.b.config).notice_without(WRITE_DEADLINE)
            self._sides = context
        if not isinstance(self._sides.a, ClusterPlace):
            raise UsageError("the source of --mode diff must be a cluster, not a backup")
        return self._sides, self._sides.a

    def _record(self, followed: list[RangePass], found: RangePass) -> None:
        """Record the result of a range, which remains valid if the pass fails later."""
        followed.append(found)
        if found.sums is None:
            self._known.pop(found.span, None)
        else:
            self._known[found.span] = found.sums
        if self._stop.is_set():
            raise _PassStopped


def sync_range(
    repair: RepairJob, source: ClusterPlace, known: Mapping[KeyRange, Sums], unit: Unit, context: TaskContext
) -> RangePass:
    """Make one range of the target equal to the source, unless both checksums are known."""
    job, meter, clusters = repair.diff, Meter(), context.shared(ClusterPool)
    before = _checksums(clusters, job, source, unit.span, meter)
    if known.get(unit.span) == before:
        return RangePass(unit.span, before, changed=False, report=Report(meter=meter))
    report = compare_units(job, (unit,), context)
    sums: Sums | None = None
    if report.ranges:
        meter.add(report.meter)
        spans = tuple(sorted(each.span for each in report.ranges))
        report = repair_ranges(repair, Repair(unit, spans), context)
    elif (
        not report.counts.expiring  # a row that is about to expire may be kept longer, which changes no checksum
        and _checksums(clusters, job, source, unit.span, meter) == before
    ):  # else the range changed while its rows were compared
        sums = before
    report.meter.add(meter)
    return RangePass(unit.span, sums, changed=True, report=report)


def _checksums(clusters: ClusterPool, job: DiffJob, source: ClusterPlace, span: KeyRange, meter: Meter) -> Sums:
    return Sums(*(place.side(clusters, meter).sums(span).sums for place in (source, job.b)))


def _pass(number: int, followed: list[RangePass], *, exact: bool, began_ms: int, seconds: float) -> Pass:
    reports = [each.report for each in followed]
    return Pass(
        number=number,
        exact=exact,
        began_ms=began_ms,
        seconds=seconds,
        ranges=len(followed),
        changed_ranges=sum(each.changed for each in followed),
        puts=sum(report.puts for report in reports),
        deletes=sum(report.deletes for report in reports),
        remaining=sum(report.counts.total for report in reports),
        checksum_requests=sum(report.meter.checksums for report in reports),
        scanned_bytes=sum(report.meter.scanned_bytes for report in reports),
    )
