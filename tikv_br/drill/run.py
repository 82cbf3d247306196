"""Run a drill from its options to its report, and whatever befalls it, clean up, report and tell."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tikv_br import run_id
from tikv_br.backupset import lease
from tikv_br.backupset.lease import PathLease
from tikv_br.drill import cut_over
from tikv_br.drill.assemble import assemble
from tikv_br.drill.canary import CanaryRemover
from tikv_br.drill.cleaning import Cleaner, Remover, forget_backup
from tikv_br.drill.context import DrillContext
from tikv_br.drill.goals import Goal
from tikv_br.drill.held import held
from tikv_br.drill.history import REPORTS, TREND, Past, read_past
from tikv_br.drill.ledger import Kind, Ledger
from tikv_br.drill.notify import tell
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.page import write_index, write_page
from tikv_br.drill.report import DrillReport, page_url, write_json
from tikv_br.drill.retention import remove_old
from tikv_br.drill.scratch import ScratchRemover
from tikv_br.drill.steps import drill_steps
from tikv_br.drill.unfinished import UnfinishedBackup
from tikv_br.errors import BackupDamaged, LeaseHeld, ObjectivesMissed, StorageError, TikvBrError
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.report.facts import Verdict
from tikv_br.report.figures import figure
from tikv_br.report.recorder import Recorder
from tikv_br.steps import Line, Step, run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store

HELD = "Another drill with the same --reports is at work; one that was killed on another machine counts for up to 40 s."
WRITE, TELL = "write the report", "tell"
"""Two of the steps after a drill's own."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ending:
    """The report, for the steps that hand it on."""

    options: DrillOptions
    home: ObjectStore
    report: DrillReport
    recorder: Recorder
    ledger: Ledger


def drill(options: DrillOptions, reporter: Reporter = silent) -> DrillReport:
    """Run a drill. Returns only for one that has passed; else raises what failed, or `ObjectivesMissed`.

    The report is written in either case, but for `LeaseLost`: then another drill is at work with the same home, cleans up
    after this one and reports it. Raises `LeaseHeld` while another one runs.
    """
    options.check()
    home = open_store(options.home)
    try:
        alone = lease.acquire(home, "drill")
    except LeaseHeld as error:
        error.hint = HELD
        raise
    try:
        return _drill(options, home, reporter, alone)
    finally:
        _give_back(alone)


def _give_back(alone: PathLease) -> None:
    """By now the report has been written and told: a lease that stays is an untidiness, and runs out."""
    try:
        alone.release()
    except (StorageError, BackupDamaged) as error:
        log.warning("the drill's lease stays until it runs out: %s", error.message)


def new_id() -> str:
    """Sorts by time, and is like no other."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{run_id.current_or_new()[:6]}"


def _drill(options: DrillOptions, home: ObjectStore, reporter: Reporter, alone: PathLease) -> DrillReport:
    steps, drill_id = held(drill_steps(options), alone), new_id()
    recorder = Recorder(reporter, len(steps) + len(_ending_steps()))
    cleaner = _cleaner(options, home, drill_id)
    context = DrillContext(options, drill_id, home, recorder, Ledger(home, drill_id), cleaner, alone.check)
    try:
        run_steps(steps, context, recorder)
    except BaseException as failure:
        cut_over.stop(context)  # also with the lease lost, when nothing is undone: it writes nothing then
        step = recorder.step
        recorder.failed()
        try:
            _end(context, failure, step, alone)
            if isinstance(failure, TikvBrError):
                failure.hint = f"{failure.hint} {_where(context)}"
        except TikvBrError as problem:
            log.warning("the drill's report: %s", problem.message)
            failure.add_note(f"the report was not written: {problem.message}")
        raise
    report = _end(context, None, "", alone)
    if report.verdict is Verdict.MISSED:
        missed = ", ".join(_missed(goal) for goal in report.goals if not goal.met)
        raise ObjectivesMissed(
            f"drill {report.id} worked, and missed {missed}",
            hint=f"{ObjectivesMissed.default_hint} {_where(context)}",
        )
    return report


def _missed(goal: Goal) -> str:
    """For who gets a mail of cron: by how much."""
    measured = "not measured" if goal.value is None else figure(goal.value, goal.unit)
    return f"{goal.name} ({measured}, asked {figure(goal.limit, goal.unit)})"


def _where(context: DrillContext) -> str:
    """For the same."""
    return f"The report: {page_url(context.options.home, context.id)}"


def _cleaner(options: DrillOptions, home: ObjectStore, drill_id: str) -> Cleaner:
    source = options.backup.cluster if options.backup is not None else options.source
    removers: dict[Kind, Remover] = {
        **options.removers,
        Kind.BACKUP: UnfinishedBackup(options.backups, source),
        Kind.KEYS: ScratchRemover(drill_id, source, home, options.locate),
    }
    if options.source is not None:
        removers[Kind.CANARY] = CanaryRemover(options.source)
    return Cleaner(home, removers)


def _end(context: DrillContext, failure: BaseException | None, step: str, alone: PathLease) -> DrillReport:
    earlier: tuple[Past, ...] = ()
    try:
        alone.confirm()
        earlier = read_past(context.home)[-(TREND - 1) :]
        report = assemble(context, failure, step, earlier)
        ending = _Ending(context.options, context.home, report, context.recorder, context.ledger)
        run_steps(held(_ending_steps(), alone), ending, context.recorder)
    except StorageError as problem:
        if context.recorder.step != TELL:
            _tell_all_the_same(context, failure or problem, step, earlier)
        raise
    return report


def _tell_all_the_same(context: DrillContext, failure: BaseException, step: str, earlier: Sequence[Past]) -> None:
    """Who is told of each drill hears of this one, too, whose report could not be written, or what comes after it."""
    here = context.recorder.step
    report = assemble(context, failure, step or here, earlier)
    page = "" if here in {"", WRITE} else page_url(context.options.home, context.id)
    tell(context.options.hooks, report, page)


def _ending_steps() -> list[Step[_Ending]]:
    return [
        Line(WRITE, _write),
        Line("remove old drills", _remove_old),
        Line("write the index", _write_index),
        Line(TELL, _tell),
    ]


def _write(ending: _Ending) -> None:
    write_json(ending.home, ending.report)
    write_page(ending.home, ending.report)
    forget_backup(ending.ledger)
    ending.recorder(Notice(f"the report is {REPORTS}/{ending.report.id}.html in {ending.home.location}"))


def _remove_old(ending: _Ending) -> None:
    """A failed drill removes nothing: who has to find out why needs what there was before."""
    if ending.report.verdict in {Verdict.PASSED, Verdict.MISSED}:
        backups = open_store(ending.options.backups)
        problems = remove_old(ending.home, backups, read_past(ending.home), ending.options.keep_last)
        _note(ending, problems)


def _write_index(ending: _Ending) -> None:
    write_index(ending.home, read_past(ending.home))


def _tell(ending: _Ending) -> None:
    """What did not work is no failure of the drill; it is told, and stands in the report."""
    problems = tell(ending.options.hooks, ending.report, page_url(ending.options.home, ending.report.id))
    if problems:
        told = replace(ending.report, notices=(*ending.report.notices, *problems))
        write_json(ending.home, told)
        write_page(ending.home, told)
    _note(ending, problems)


def _note(ending: _Ending, problems: list[str]) -> None:
    for problem in problems:
        ending.recorder(Notice(problem))
