"""A tail without timestamps: passes that compare ranges and write what differs, for sources of API V1 and V1TTL.

Each pass asks both clusters for the checksum of every range (a region's of the source). A range whose two checksums are
as they were when its rows were last found equal is left alone; any other is compared with the target, down to the rows
that differ, and these are written, or removed. What was written before a pass began is at the target when it has ended.

The target's checksum tells of rows that went there and not at the source: a new TTL alone is seen by nobody, until the
old one is over. Changes that leave a checksum as it was (it is an XOR of CRCs, and CRC is linear) are seen by exact
passes only, which read all rows; one belongs before a cut-over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from formats.api_version import ApiVersion
from formats.checksum import Checksum
from tikv_br.diff.options import DiffOptions
from tikv_br.diff.places import ClusterPlace, Unit
from tikv_br.diff.repair import Repair, RepairJob, repair_ranges
from tikv_br.diff.steps import DiffContext, find_sides, plan_ranges
from tikv_br.diff.task import DiffJob, compare_units
from tikv_br.diff.values import Meter, Report, Span
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted, TikvBrError, UsageError
from tikv_br.spark.executor import run_tasks
from tikv_br.spark.task import TaskContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass came to. Times are in seconds, by this machine's clock."""

    number: int
    """From 1."""
    exact: bool
    began_ms: int
    """Milliseconds since the epoch: what was written before is at the target now."""
    seconds: float
    """How long it took, and how far the target is behind at its end."""
    ranges: int
    changed_ranges: int
    """Whose checksums were not those known, or were not known: they were compared."""
    puts: int
    deletes: int
    remaining: int
    """Keys that differed after they had been written: they change all the while."""
    checksum_requests: int
    """Checksums asked for."""
    scanned_bytes: int
    """Of keys and values read from both clusters."""


@dataclass(frozen=True, slots=True)
class DiffModeOptions:
    """How to follow. Times are in seconds."""

    diff: DiffOptions
    """A is the source, B the target."""
    check_target: Callable[[ApiVersion], None] = lambda _: None
    """Raises for a target of another API version than was meant."""
    interval: float = 30.0
    """From the beginning of a pass to that of the next, unless it takes longer."""
    exact_every: int = 0
    """Each so many passes one is exact; 0 = none is."""
    patience: float = 600.0
    """How long passes may fail in a row for a cluster that does not answer."""
    told: Callable[[Sequence[bytes]], object] | None = None
    """Is told user keys before they are written to the target. With it or `spare` passes run in this process."""
    spare: Callable[[Sequence[bytes]], Collection[bytes]] | None = None
    """Says which of the user keys that only the target has stay there."""


class Sums(NamedTuple):
    """What the two clusters said of a range."""

    source: Checksum
    target: Checksum


@dataclass(frozen=True, slots=True)
class Followed:
    """What became of one range. Pickles."""

    span: Span
    sums: Sums | None
    """While its rows were equal and stayed so; None = to be compared again."""
    changed: bool
    report: Report


class _Stopped(Exception):
    """Ends the pass under way."""


class DiffMode:
    """Passes over one range, one after the other. For one thread; `stop` from any."""

    def __init__(self, options: DiffModeOptions, stop: threading.Event | None = None) -> None:
        """Nothing is asked yet. Setting `stop` is as good as `stop()`."""
        self._options = options
        self._sides: DiffContext | None = None
        self._known: dict[Span, Sums] = {}
        self._passes = 0
        self._stop = stop or threading.Event()
        self._exact = False

    def run(
        self,
        told: Callable[[Pass], None],
        begins: Callable[[], object] = lambda: None,
        broken: Callable[[TikvBrError], object] = lambda _error: None,
    ) -> None:
        """Pass after pass until `stop`; each is told when it has ended, and ``begins`` is called before it.

        ``broken`` is told why one was broken off that is to be tried again.

        Raises `UsageError` for sides that cannot be compared, `ConversionUnsupported` for a row that expires where the
        target keeps no TTL, and other `TikvBrError`; clusters that have answered once are given time when they do not.
        """
        self._find_sides()
        every = self._options.exact_every
        failing_since: float | None = None
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                begins()
                exact = self._exact or (bool(every) and (self._passes + 1) % every == 0)
                told(self.one_pass(exact=exact))
                failing_since = None
            except _Stopped:
                return
            except (ClusterUnreachable, RetryBudgetExhausted) as error:
                failing_since = failing_since or began
                if time.monotonic() - failing_since > self._options.patience:
                    raise
                log.warning("the pass was broken off, the next one takes it up: %s", error.message)
                broken(error)
            self._stop.wait(max(began + self._options.interval - time.monotonic(), 0))

    def make_sure(self) -> None:
        """Have every pass be exact that begins from now on. From any thread."""
        self._exact = True

    def stop(self) -> None:
        """Have `run` end, with the pass under way broken off: the next run's first pass finds what differs."""
        self._stop.set()

    def one_pass(self, *, exact: bool = False) -> Pass:
        """Bring the target to what the source holds; exact: whatever checksums say. Raises as `run`, also for silence."""
        began, began_ms = time.monotonic(), time.time_ns() // 1_000_000
        context, source = self._find_sides()
        plan_ranges(context)
        followed: list[Followed] = []
        run_tasks(
            context.units,
            partial(follow, self._repair(replace(context.job, exact=exact)), source, {} if exact else self._known),
            options=context.options.where,
            on_result=partial(self._note, followed),
            name_of=str,
        )
        wanted = {unit.span for unit in context.units}
        self._known = {span: sums for span, sums in self._known.items() if span in wanted}
        self._passes += 1
        return _pass(self._passes, followed, exact=exact, began_ms=began_ms, seconds=time.monotonic() - began)

    def _repair(self, job: DiffJob) -> RepairJob:
        return RepairJob(job, delete=True, told=self._options.told, spare=self._options.spare)

    def _find_sides(self) -> tuple[DiffContext, ClusterPlace]:
        """Both clusters, and the source of the two."""
        if self._sides is None:
            context = DiffContext(self._options.diff)
            find_sides(context)
            self._options.check_target(context.b.api_version)
            self._sides = context
        if not isinstance(self._sides.a, ClusterPlace):
            raise UsageError("a backup does not change: there is nothing to follow")
        return self._sides, self._sides.a

    def _note(self, followed: list[Followed], found: Followed) -> None:
        """Keep what is known of a range, also when the pass is broken off later."""
        followed.append(found)
        if found.sums is None:
            self._known.pop(found.span, None)
        else:
            self._known[found.span] = found.sums
        if self._stop.is_set():
            raise _Stopped


def follow(
    repair: RepairJob, source: ClusterPlace, known: Mapping[Span, Sums], unit: Unit, context: TaskContext
) -> Followed:
    """Bring one range of the target to what the source holds, if it is not known to be there."""
    job, meter = repair.diff, Meter()
    seen = _look(job, source, unit.span, meter)
    if known.get(unit.span) == seen:
        return Followed(unit.span, seen, changed=False, report=Report(meter=meter))
    report = compare_units(job, (unit,), context)
    sums: Sums | None = None
    if report.ranges:
        meter.add(report.meter)
        report = repair_ranges(repair, Repair(unit, _spans(report)), context)
    elif _look(job, source, unit.span, meter) == seen:  # else what was compared may be neither the old nor the new
        sums = seen
    report.meter.add(meter)
    return Followed(unit.span, sums, changed=True, report=report)


def _look(job: DiffJob, source: ClusterPlace, span: Span, meter: Meter) -> Sums:
    return Sums(*(place.side(meter).sums(span).sums for place in (source, job.b)))


def _spans(report: Report) -> tuple[Span, ...]:
    return tuple(sorted(each.span for each in report.ranges))


def _pass(number: int, followed: list[Followed], *, exact: bool, began_ms: int, seconds: float) -> Pass:
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
