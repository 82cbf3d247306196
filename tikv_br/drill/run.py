"""A drill from its options to its report: the steps of each scenario, the final steps that always run, and the pages of one and of all drills."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from tikv_br import __version__, run_id
from tikv_br.backupset import lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, IndexEntry
from tikv_br.backupset.lease import PathLease
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.drill import backups, cutover, damage, point, recovery
from tikv_br.drill.context import DrillContext
from tikv_br.drill.history import (
    MAX_TREND,
    REPORTS,
    PastDrill,
    backup_path,
    past_drill_of,
    read_past_drills,
    remove_old_drills,
)
from tikv_br.drill.ledger import BackupRemover, Cleaner, EntryKind, Ledger, Remover, read_ledgers
from tikv_br.drill.objectives import Goal, Measured, Objectives, judge
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.report import DrillReport, notify, page_url, write_json
from tikv_br.drill.tail import SafePointRemover
from tikv_br.drill.targets import ClusterTarget, OwnedRowsRemover
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    Failure,
    LeaseHeld,
    ObjectivesMissed,
    StorageError,
    TikvBrError,
)
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.redaction import redact
from tikv_br.report import plot
from tikv_br.report.facts import BackupFacts, DrillVerdict, ReportedError, cells, figure, reported_error, verdict_of
from tikv_br.report.page import render, render_list
from tikv_br.report.recorder import Recorder
from tikv_br.steps import FunctionStep, Step, run_steps
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

UNKNOWN = "unknown"
KILLED = 128 + signal.SIGKILL
"""The exit status that a shell reports for a killed process."""
KILLED_MESSAGE = "the drill was killed; this report is what the next drill found of it"
KILLED_HINT = "If nobody killed it, check for a reboot or the kernel's out-of-memory killer at that time."


def make_report(
    context: DrillContext, failure: BaseException | None, step: str, earlier: Sequence[PastDrill]
) -> DrillReport:
    """The report of a drill that has ended; ``step`` is the one that failed, ``earlier`` has the oldest drill first."""
    goals, recorder = judge(context.options.objectives, _without_rpo_of_failed(context.measured)), context.recorder
    backup: BackupSet | None = getattr(context, "backup", None)  # None: the drill failed before it had one
    facts = None
    if backup is not None:
        facts = _facts_of(context.entry, backup.store.location, made_by_drill=bool(context.made_backup))
    report = DrillReport(
        id=context.id,
        verdict=_verdict(failure, goals),
        scenario=context.options.scenario.value,
        target=context.options.target.name,
        started_ms=context.started_ms,
        seconds=round(recorder.now, 3),
        tool_version=__version__,
        goals=goals,
        backup=facts,
        trouble=None if failure is None else reported_error(failure, step),
        phases=tuple(sorted(recorder.phases, key=lambda each: (each.begin, each.inside))),
        samples=tuple(recorder.samples),
        keyspace_map=() if backup is None else cells(backup),
        compared=tuple(context.compared),
        notices=tuple(map(redact, recorder.notices)),
        remains=tuple(each for each in context.ledger.creations if each.kind is not EntryKind.MADE_BACKUP),
        point=getattr(context, "point", None),
        source=",".join(_source_pd(context.options)),
    )
    return replace(report, trend=(*earlier, past_drill_of(report.to_json())))


def _source_pd(options: DrillOptions) -> tuple[str, ...]:
    source = options.source or (options.backup.cluster if options.backup is not None else None)
    return () if source is None else source.pd


def make_report_of_killed(context: DrillContext, killed: Ledger) -> DrillReport | None:
    """The report of a drill that was killed before it wrote one; None if it has one.

    Its complete backup is added to the index, so that retention removes it like any other.
    """
    if exists(context.home, f"{REPORTS}/{killed.drill}.json"):
        return None
    report = DrillReport(
        id=killed.drill,
        verdict=DrillVerdict.INTERRUPTED,
        scenario=UNKNOWN,
        target=UNKNOWN,
        started_ms=_started_ms(killed.drill),
        seconds=0.0,
        tool_version=__version__,
        goals=judge(Objectives(), Measured()),
        backup=_backup_of_killed(context, killed),
        trouble=ReportedError("Killed", KILLED, KILLED_MESSAGE, KILLED_HINT, ""),
    )
    return replace(report, trend=(past_drill_of(report.to_json()),))


def _without_rpo_of_failed(found: Measured) -> Measured:
    """The RPO counts only if the rest was verified to be restored."""
    return found if found.rto is not None else replace(found, rpo=None, rpo_method="")


def _facts_of(entry: IndexEntry, place: StorageLocation, *, made_by_drill: bool) -> BackupFacts:
    return BackupFacts(
        id=entry.id,
        place=place.redacted(),
        made_by_drill=made_by_drill,
        cluster_id=entry.cluster_id,
        engine=entry.engine,
        api_version=entry.dst_api_version.label,
        backup_ts=entry.backup_ts,
        finished_ms=entry.finished_ms,
        keys=entry.total_kvs,
        data_bytes=entry.total_bytes,
        stored_bytes=entry.backup_size,
        files=entry.files,
    )


def _verdict(failure: BaseException | None, goals: tuple[Goal, ...]) -> DrillVerdict:
    verdict = verdict_of(failure)
    return DrillVerdict.MISSED if verdict is DrillVerdict.PASSED and not all(goal.met for goal in goals) else verdict


def _backup_of_killed(context: DrillContext, killed: Ledger) -> BackupFacts | None:
    place = context.options.backups.child(backup_path(killed.drill))
    made = {(each.kind, each.place) for each in killed.creations}
    if not made & {(EntryKind.BACKUP, place.redacted()), (EntryKind.MADE_BACKUP, place.redacted())}:
        return None
    try:
        found = BackupSet.open_any(open_store(place))
    except BackupNotFound:
        return None
    entry = backups.entry_at(place, found)
    index = Index(open_store(context.options.backups))
    if all(each.entry.id != entry.id for each in index.read()):
        index.add(entry)
    return _facts_of(entry, place, made_by_drill=True)


def _started_ms(drill: str) -> int:
    """Return the start according to the drill's id, in Unix milliseconds; 0 if the id has no time."""
    try:
        start = datetime.strptime(drill.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return int(start.timestamp() * 1000)


PACKAGE = "tikv_br.drill"
INDEX = "index.html"
INTERRUPTED = "The drill was interrupted. It says nothing about the backup."
OUTCOMES = {
    "corrupt-backup": (
        "The damage was detected: verify named the file, and restore refused it before it wrote to any store.",
        "The drill could not show that damage to a backup is detected. Until this is fixed, do not rely on checks of copies.",
    ),
    "stale-safe-point": (
        "A sync from a backup that GC has passed was refused, as required.",
        "The drill could not show that a sync from a backup that GC has passed is refused.",
    ),
}
"""Meaning of a pass and of a failure, by scenario without a recovery."""
EMPTY_BACKUP = "But the backup has no keys, so this proves little. With --min-keys such a drill misses its objective."
RECOVERED = "The recovery worked."
NOT_RECOVERED = "The drill could not show that a recovery would work. Until this is fixed, do not rely on the backup."
SCENARIOS = {
    "lost-cluster": "The cluster is lost: the whole backup is restored into another one.",
    "deleted-range": "A range of keys was deleted: only this range is restored, into a cluster that has the rest.",
    "corrupt-backup": "A copy of the backup is damaged: verify and restore must detect it.",
    "stale-safe-point": "GC of the source has passed the backup: a sync from it must be refused.",
    "point-in-time": "Wrong rows were written: the rows of an earlier time are restored, from a backup and a log.",
}


def write_page(home: ObjectStore, report: DrillReport) -> None:
    home.put(f"{REPORTS}/{report.id}.html", render_report(report).encode())


def write_index(home: ObjectStore, drills: Sequence[PastDrill]) -> None:
    home.put(INDEX, render_index(drills).encode())


def render_report(report: DrillReport) -> str:
    trend = [past for past in report.trend if past.scenario == report.scenario]
    return render(
        PACKAGE,
        "drill.html",
        report,
        remains=[
            f"Not removed: {each.kind.value} at {each.place}. The next drill tries again." for each in report.remains
        ],
        sentence=_sentence(report),
        story=SCENARIOS.get(report.scenario, ""),
        trend=trend,
        trends=_trends(report, trend),
    )


def _sentence(report: DrillReport) -> str:
    success, failure = OUTCOMES.get(report.scenario, (RECOVERED, NOT_RECOVERED))
    match report.verdict:
        case DrillVerdict.PASSED:
            if report.value("keys") == 0:
                return f"{success} {EMPTY_BACKUP}"
            limits = [goal for goal in report.goals if goal.limit is not None]
            return f"{success} {'All objectives were met.' if limits else 'No objectives were set.'}"
        case DrillVerdict.MISSED:
            missed = ", ".join(goal.name for goal in report.goals if not goal.met)
            return f"{success} But it missed objectives: {missed}."
        case DrillVerdict.INTERRUPTED:
            return INTERRUPTED
        case _:
            return failure


def render_index(drills: Sequence[PastDrill]) -> str:
    newest_first = list(reversed(drills))
    passed = next((each for each in newest_first if each.verdict == DrillVerdict.PASSED), None)
    return render_list(PACKAGE, "index.html", drills=newest_first, passed=passed)


def _trends(report: DrillReport, trend: Sequence[PastDrill]) -> list[tuple[str, str, list[float | None], plot.Curve]]:
    """Name, unit, values and curve of each figure, with one value per drill."""
    limits = {goal.name: goal.limit for goal in report.goals}
    figures: tuple[tuple[str, str, float | None, Callable[[PastDrill], float | None]], ...] = (
        ("RTO", "s", limits.get("RTO"), lambda past: past.rto),
        ("RPO", "s", limits.get("RPO"), lambda past: past.rpo),
        ("size", "B", None, lambda past: past.data_bytes or None),
        ("speed", "B/s", None, lambda past: past.speed),
    )
    places = [float(place) for place in range(len(trend))]
    found = []
    for name, unit, limit, value_of in figures:
        values = [value_of(past) for past in trend]
        if any(value is not None for value in values):
            curve = plot.curve(places, values, limit, unit=unit, marks=places[:: len(places) - 1 or 1])
            found.append((name, unit, values, curve))
    return found


C = TypeVar("C")
LOCKED_HINT = "Another drill with the same --reports is running. The lock of a killed one expires within 40 s, on S3 within 100 s."
WRITE_REPORT, NOTIFY = "write the report", "notify"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedStep(Generic[C]):
    """A step that runs only while the lease is held: once the lease is lost, another drill removes what this one made."""

    step: Step[C]
    lease: PathLease

    @property
    def name(self) -> str:
        return self.step.name

    def run(self, context: C) -> None:
        """Run the step. Raises `LeaseLost`."""
        self.lease.confirm()
        self.step.run(context)

    def undo(self, context: C) -> bool:
        """Undo the step unless the lease is lost."""
        return self.lease.still_holds() and self.step.undo(context)


def drill(options: DrillOptions, reporter: Reporter = silent) -> DrillReport:
    """Run a drill. Returns the report of one that passed; otherwise raises what failed, or `ObjectivesMissed`.

    A report is written in either case, except after `LeaseLost`: then another drill uses the same home, cleans up after
    this one and writes its report. Raises `LeaseHeld` while another drill runs.
    """
    options.check()
    home = open_store(options.home)
    try:
        held = lease.acquire(home, "drill")
    except LeaseHeld as error:
        error.hint = LOCKED_HINT
        raise
    try:
        with ClusterPool() as clusters:
            return _drill(options, home, reporter, held, clusters)
    finally:
        _release(held)


def drill_steps(options: DrillOptions) -> list[Step[DrillContext]]:
    steps: list[Step[DrillContext]] = [FunctionStep("clean up earlier drills", clean_up_earlier)]
    if isinstance(options.target, ClusterTarget):
        steps.append(FunctionStep("check the target", backups.check_target))
    if options.tail is not None:
        steps.append(FunctionStep("check the source for the tail", cutover.check_source))
    if options.scenario is Scenario.POINT_IN_TIME:
        steps.append(FunctionStep("select time and backup", point.select))
    elif options.backup is not None:
        steps.append(FunctionStep("check cluster and storage", backups.check_source))
        steps.append(FunctionStep("back up", backups.make_backup, clean_up))
    elif options.existing is not None:
        steps.append(FunctionStep("select the backup", backups.select_named))
    else:
        steps.append(FunctionStep("select the newest backup", backups.select_newest))
    return [*steps, *_scenario_steps(options), FunctionStep("clean up", clean_up)]


def _scenario_steps(options: DrillOptions) -> list[Step[DrillContext]]:
    prepare: Step[DrillContext] = FunctionStep("prepare the target", recovery.prepare_target, clean_up)
    match options.scenario:
        case Scenario.LOST_CLUSTER:
            recover = [
                prepare,
                FunctionStep("restore", recovery.restore_all),
                FunctionStep("verify", recovery.verify_all),
            ]
            if options.tail is None:
                return recover
            return [
                FunctionStep("check the backup for the tail", cutover.check_start),
                *recover,
                FunctionStep("follow the source", cutover.follow, cutover.stop),
                FunctionStep("rehearse the cut-over", cutover.cut_over, cutover.stop),
            ]
        case Scenario.DELETED_RANGE:
            return [
                prepare,
                FunctionStep("restore everything", recovery.restore_before),
                FunctionStep("delete the range", damage.delete_range),
                FunctionStep("restore the range", recovery.restore_range),
                FunctionStep("verify", recovery.verify_all),
            ]
        case Scenario.CORRUPT_BACKUP:
            return [
                FunctionStep("copy and damage the backup", damage.copy_damaged, clean_up),
                FunctionStep("verify the damaged copy", damage.verify_damaged),
                prepare,
                FunctionStep("restore the damaged copy", damage.restore_damaged),
            ]
        case Scenario.STALE_SAFE_POINT:
            return [
                FunctionStep("check that the backup has a timestamp", damage.check_has_ts),
                prepare,
                FunctionStep("check that a sync can start", damage.check_sync_can_start),
                FunctionStep("advance GC past the backup", damage.advance_gc),
                FunctionStep("check that a sync is refused", damage.check_sync_is_refused),
            ]
        case Scenario.POINT_IN_TIME:
            return [prepare, FunctionStep("restore", point.restore), FunctionStep("verify", point.verify)]


def report_steps() -> list[Step[DrillContext]]:
    return [
        FunctionStep(WRITE_REPORT, _write_report),
        FunctionStep("remove old drills", _remove_old_drills),
        FunctionStep("write the index", lambda context: write_index(context.home, read_past_drills(context.home))),
        FunctionStep(NOTIFY, _notify),
    ]


def clean_up_earlier(context: DrillContext) -> None:
    """Remove what interrupted drills left. What cannot be removed is a notice, not a failure of this drill."""
    for killed in read_ledgers(context.home):
        try:
            found = make_report_of_killed(context, killed)
            if found is not None:
                write_page(context.home, found)
                write_json(context.home, found)
        except TikvBrError as error:
            message = f"cannot write a report of drill {killed.drill}, which was killed: {error.message}"
            log.warning(message)
            context.recorder(Notice(message))
    for problem in context.cleaner.clean_earlier():
        context.recorder(Notice(problem))


def clean_up(context: DrillContext) -> None:
    """Remove all that this drill made, except its backup. Raises a `TikvBrError` if something remains."""
    context.cleaner.clean(context.ledger)


def new_id() -> str:
    """Unique, and sorts by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{run_id.current_or_new()[:6]}"


def _drill(
    options: DrillOptions, home: ObjectStore, reporter: Reporter, held: PathLease, clusters: ClusterPool
) -> DrillReport:
    steps, drill_id = _leased(drill_steps(options), held), new_id()
    recorder = Recorder(reporter, len(steps) + len(report_steps()))
    cleaner = Cleaner(home, _removers(options, drill_id), drill_id)
    context = DrillContext(options, drill_id, home, recorder, Ledger(home, drill_id), cleaner, clusters, held.check)
    try:
        run_steps(steps, context, recorder)
    except BaseException as failure:
        cutover.stop(context)  # also without the lease, when nothing is undone: the tail writes nothing then
        step = recorder.step
        recorder.failed()
        try:
            _report(context, failure, step, held)
            if isinstance(failure, Failure):
                failure.hint = f"{failure.hint} {_report_hint(context)}"
        except TikvBrError as problem:
            log.warning("cannot write the drill's report: %s", problem.message)
            failure.add_note(f"cannot write the report: {problem.message}")
        raise
    report = _report(context, None, "", held)
    if report.verdict is DrillVerdict.MISSED:
        missed = ", ".join(_missed(goal) for goal in report.goals if not goal.met)
        raise ObjectivesMissed(
            f"the recovery of drill {report.id} worked, but missed {missed}",
            hint=f"{ObjectivesMissed.default_hint} {_report_hint(context)}",
        )
    return report


def _removers(options: DrillOptions, drill_id: str) -> dict[EntryKind, Remover]:
    source = options.backup.cluster if options.backup is not None else options.source
    removers: dict[EntryKind, Remover] = {
        **options.removers,
        EntryKind.BACKUP: BackupRemover(options.backups, source),
        EntryKind.ROWS: OwnedRowsRemover(drill_id, options.target, source),
    }
    if options.source is not None:
        removers[EntryKind.SAFE_POINT] = SafePointRemover(drill_id, options.source)
    return removers


def _leased(steps: Sequence[Step[C]], held: PathLease) -> list[Step[C]]:
    return [LeasedStep(step, held) for step in steps]


def _release(held: PathLease) -> None:
    """A lease that cannot be released expires, so that is no failure of the drill."""
    try:
        held.release()
    except (StorageError, BackupDamaged) as error:
        log.warning("cannot release the drill's lock, which will expire: %s", error.message)


def _missed(goal: Goal) -> str:
    measured = "not measured" if goal.value is None else figure(goal.value, goal.unit)
    return f"{goal.name} ({measured}, objective {figure(goal.limit, goal.unit)})"


def _report_hint(context: DrillContext) -> str:
    return f"Report: {page_url(context.options.home, context.id)}"


def _report(context: DrillContext, failure: BaseException | None, step: str, held: PathLease) -> DrillReport:
    earlier: tuple[PastDrill, ...] = ()
    try:
        held.confirm()
        earlier = read_past_drills(context.home)[-(MAX_TREND - 1) :]
        context.report = make_report(context, failure, step, earlier)
        run_steps(_leased(report_steps(), held), context, context.recorder)
    except StorageError as problem:
        if context.recorder.step != NOTIFY:
            _notify_without_report(context, failure or problem, step, earlier)
        raise
    return context.report


def _notify_without_report(
    context: DrillContext, failure: BaseException, step: str, earlier: Sequence[PastDrill]
) -> None:
    """Hooks are also notified of a drill whose report, or what follows it, could not be written."""
    here = context.recorder.step
    report = make_report(context, failure, step or here, earlier)
    page = "" if here in {"", WRITE_REPORT} else page_url(context.options.home, context.id)
    notify(context.options.hooks, report, page)


def _write_report(context: DrillContext) -> None:
    write_json(context.home, context.report)
    write_page(context.home, context.report)
    context.ledger.remove_finished_backup()
    context.recorder(Notice(f"the report is {REPORTS}/{context.report.id}.html in {context.home.location}"))


def _remove_old_drills(context: DrillContext) -> None:
    """A failed drill removes nothing: earlier backups and reports help to find the cause."""
    if context.report.verdict in {DrillVerdict.PASSED, DrillVerdict.MISSED}:
        folder = open_store(context.options.backups)
        problems = remove_old_drills(context.home, folder, read_past_drills(context.home), context.options.keep_last)
        _add_notices(context, problems)


def _notify(context: DrillContext) -> None:
    """A hook that fails does not fail the drill; it is a notice of the report."""
    problems = notify(context.options.hooks, context.report, page_url(context.options.home, context.report.id))
    if problems:
        report = replace(context.report, notices=(*context.report.notices, *problems))
        write_json(context.home, report)
        write_page(context.home, report)
    _add_notices(context, problems)


def _add_notices(context: DrillContext, problems: list[str]) -> None:
    for problem in problems:
        context.recorder(Notice(problem))
