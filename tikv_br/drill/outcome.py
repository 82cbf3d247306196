"""The report of a drill that has ended, or that was killed."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tikv_br import __version__
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.backupset.index_entry import IndexEntry
from tikv_br.drill import backups
from tikv_br.drill.context import DrillContext
from tikv_br.drill.history import REPORTS, PastDrill, backup_path, past_drill_of
from tikv_br.drill.ledger import EntryKind, Ledger
from tikv_br.drill.objectives import Goal, Measured, Objectives, judge
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.report import DrillReport
from tikv_br.errors import BackupNotFound
from tikv_br.redaction import redact
from tikv_br.report.facts import (
    BackupFacts,
    DrillVerdict,
    ReportedError,
    cells,
    reported_error,
    verdict_of,
)
from tikv_br.storage.base import exists
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
