"""A drill as a runbook: each scenario is a list of steps, and whatever a step makes is removed, be it by a later drill."""

from __future__ import annotations

from tikv_br.drill import choose, cut_over, damage, killed, recover, stale
from tikv_br.drill.context import DrillContext
from tikv_br.drill.ledger import left_behind
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.progress_events import Notice
from tikv_br.steps import Line, Step


def drill_steps(options: DrillOptions) -> list[Step[DrillContext]]:
    """The runbook, up to the report."""
    clean = Line("clean up", clean_up)
    return [Line("remove what earlier drills left", clean_earlier), *_before(options), *_recovery(options), clean]


def _before(options: DrillOptions) -> list[Step[DrillContext]]:
    """Up to a backup to rehearse with."""
    steps: list[Step[DrillContext]] = []
    if isinstance(options.target, ClusterTarget):
        steps.append(Line("check the target", choose.check_target))
    if options.tail is not None:
        steps.append(Line("see that the source can be followed", cut_over.require_source))
    if options.backup is not None:
        steps.append(Line("check cluster and storage", choose.check_source))
        steps.append(Line("back up", choose.make_backup, clean_up))
    elif options.existing is not None:
        steps.append(Line("choose the backup", choose.choose_named))
    else:
        steps.append(Line("choose the newest backup", choose.choose_newest))
    return steps


def _recovery(options: DrillOptions) -> list[Step[DrillContext]]:
    """What the scenario is about."""
    make: Step[DrillContext] = Line("make the target", recover.make_target, clean_up)
    match options.scenario:
        case Scenario.LOST_CLUSTER:
            steps = [make, Line("restore", recover.restore_all), Line("verify", recover.verify_all)]
            return steps if options.tail is None else [*_hand_over(), *steps, *_tail()]
        case Scenario.DELETED_RANGE:
            return [
                make,
                Line("restore everything", recover.restore_before),
                Line("delete the range", recover.delete_range),
                Line("restore the range", recover.restore_range),
                Line("verify", recover.verify_all),
            ]
        case Scenario.CORRUPT_BACKUP:
            return [
                Line("copy the backup with one byte changed", damage.copy_damaged, clean_up),
                Line("see that verify finds it", damage.verify_finds_it),
                make,
                Line("see that restore refuses it", damage.restore_refuses_it),
            ]
        case Scenario.STALE_SAFE_POINT:
            return [
                Line("see that the backup has a timestamp", stale.require_ts),
                make,
                Line("see that a sync could begin", stale.hand_over_in_time),
                Line("let GC pass the backup", stale.let_gc_pass),
                Line("see that a sync is refused", stale.hand_over_is_refused),
            ]


def _hand_over() -> list[Step[DrillContext]]:
    return [Line("see that a sync can begin at the backup", cut_over.require_hand_over)]


def _tail() -> list[Step[DrillContext]]:
    """After the proof of the restore."""
    return [
        Line("follow the source", cut_over.follow, cut_over.stop),
        Line("rehearse the cut-over", cut_over.cut_over, cut_over.stop),
    ]


def clean_earlier(context: DrillContext) -> None:
    """Remove what drills that were broken off have left; what stays is told, and is no failure of this drill."""
    for dead in left_behind(context.home):
        killed.report(context, dead)
    for problem in context.cleaner.clean_earlier():
        context.recorder(Notice(problem))


def clean_up(context: DrillContext) -> None:
    """Remove all that this drill has made, but for its backup. Raises a `TikvBrError` when something stays."""
    context.cleaner.clean(context.ledger)
