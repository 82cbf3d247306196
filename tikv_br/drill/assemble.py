"""Puts a drill's report together from what its steps have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tikv_br import __version__
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.drill.context import DrillContext
from tikv_br.drill.goals import Goal, Measured, judge
from tikv_br.drill.history import Past, past_of
from tikv_br.drill.ledger import Kind
from tikv_br.drill.report import DrillReport
from tikv_br.redaction import redact
from tikv_br.report.facts import BackupFacts, Verdict, cells, trouble_of, verdict_of
from tikv_br.storage.url import StorageLocation


def assemble(context: DrillContext, failure: BaseException | None, step: str, earlier: Sequence[Past]) -> DrillReport:
    """What there is to say of a drill; ``step`` is the one that failed, ``earlier`` the drills before, the oldest first."""
    goals, recorder = judge(context.options.objectives, _reached(context.measured)), context.recorder
    report = DrillReport(
        id=context.id,
        verdict=_verdict(failure, goals),
        scenario=context.options.scenario.value,
        target=context.options.target.name,
        started_ms=context.started_ms,
        seconds=round(recorder.now, 3),
        tool_version=__version__,
        goals=goals,
        backup=_backup_facts(context),
        trouble=None if failure is None else trouble_of(failure, step),
        phases=tuple(sorted(recorder.phases, key=lambda each: (each.begin, each.inside))),
        samples=tuple(recorder.samples),
        keyspace_map=() if context.backup is None else cells(context.backup),
        compared=tuple(context.compared),
        notices=tuple(map(redact, recorder.notices)),
        remains=tuple(each for each in context.ledger.creations if each.kind is not Kind.MADE_BACKUP),
        trend=(),
    )
    return replace(report, trend=(*earlier, past_of(report.to_json())))


def _reached(found: Measured) -> Measured:
    """How much would be lost is known only where the rest was proven to come back."""
    return found if found.rto is not None else replace(found, rpo=None, rpo_method="")


def _backup_facts(context: DrillContext) -> BackupFacts | None:
    if context.entry is None or context.backup is None:
        return None
    return facts_of(context.entry, context.backup.store.location, made_by_drill=bool(context.made_backup))


def facts_of(entry: IndexEntry, place: StorageLocation, *, made_by_drill: bool) -> BackupFacts:
    """What a report says of a backup."""
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


def _verdict(failure: BaseException | None, goals: tuple[Goal, ...]) -> Verdict:
    ended = verdict_of(failure)
    return Verdict.MISSED if ended is Verdict.PASSED and not all(goal.met for goal in goals) else ended
