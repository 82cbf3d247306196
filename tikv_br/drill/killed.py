"""A report for a drill that was killed, and wrote none: so that it is seen, and its backup goes as those of others do."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace
from datetime import UTC, datetime

from tikv_br import __version__
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index
from tikv_br.drill import choose
from tikv_br.drill.assemble import facts_of
from tikv_br.drill.context import DrillContext
from tikv_br.drill.goals import Measured, Objectives, judge
from tikv_br.drill.history import REPORTS, past_of
from tikv_br.drill.ledger import Kind, Ledger
from tikv_br.drill.page import write_page
from tikv_br.drill.report import DrillReport, write_json
from tikv_br.errors import BackupNotFound, TikvBrError
from tikv_br.progress_events import Notice
from tikv_br.report.facts import BackupFacts, Trouble, Verdict
from tikv_br.storage.base import exists
from tikv_br.storage.open import open_store

log = logging.getLogger(__name__)
NOT_KNOWN = "not known"
KILLED = 128 + signal.SIGKILL
"""What a shell says of a process that was killed."""
HINT = "If nobody did that, look for a reboot or for the kernel's out-of-memory killer at that time."


def report(context: DrillContext, dead: Ledger) -> None:
    """Write the report of a drill that has none. What keeps us from it is told, and keeps nothing else from us."""
    if exists(context.home, f"{REPORTS}/{dead.drill}.json"):
        return
    try:
        facts = _made_backup(context, dead)
        found = _report(dead, facts)
        write_page(context.home, found)
        write_json(context.home, found)
    except TikvBrError as error:
        log.warning("drill %s was killed, and has no report: %s", dead.drill, error.message)
        context.recorder(Notice(f"drill {dead.drill} was killed, and has no report: {error.message}"))


def _made_backup(context: DrillContext, dead: Ledger) -> BackupFacts | None:
    """The backup that it finished; it is entered into the index, should the drill not have come to that."""
    place = context.options.backups.child(choose.path_of(dead.drill))
    said = {(each.kind, each.place) for each in dead.creations}
    if not said & {(Kind.BACKUP, place.redacted()), (Kind.MADE_BACKUP, place.redacted())}:
        return None
    try:
        found = BackupSet.open_any(open_store(place))
    except BackupNotFound:
        return None
    entry = choose.entry_at(place, found)
    index = Index(open_store(context.options.backups))
    if all(each.entry.id != entry.id for each in index.read()):
        index.add(entry)
    return facts_of(entry, place, made_by_drill=True)


def _report(dead: Ledger, backup: BackupFacts | None) -> DrillReport:
    message = "the drill was killed; what is known of it is what the next one found"
    found = DrillReport(
        id=dead.drill,
        verdict=Verdict.INTERRUPTED,
        scenario=NOT_KNOWN,
        target=NOT_KNOWN,
        started_ms=_started_ms(dead.drill),
        seconds=0.0,
        tool_version=__version__,
        goals=judge(Objectives(), Measured()),
        backup=backup,
        trouble=Trouble("Killed", KILLED, message, HINT, ""),
        phases=(),
        samples=(),
        keyspace_map=(),
        compared=(),
        notices=(),
        remains=(),
        trend=(),
    )
    return replace(found, trend=(past_of(found.to_json()),))


def _started_ms(drill: str) -> int:
    """By its id; 0 for one that says nothing."""
    try:
        began = datetime.strptime(drill.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return int(began.timestamp() * 1000)
