"""Problems that need attention, each with advice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tikv_br.archive.maintenance import LogStatus
from tikv_br.archive.records import LogState
from tikv_br.serve.model import Backup, Drills, Gc, Newest, Overview, OverviewFinding
from tikv_br.serve.sources import Sync

GC_LIMIT = 86400.0
"""Age of the GC safe point, in seconds, that is worth a look: the default of ``gc status --warn``."""
MAX_LAG = 300.0
MAX_BACKUP_AGE = 30 * 3600.0
"""Default maximum age, in seconds, for nightly backups; the same as in the alerts."""


@dataclass(frozen=True, slots=True)
class AgeLimit:
    """Maximum age of the newest backup."""

    seconds: float
    """0 = any age."""
    prefix: str = ""
    """Prefix of the paths or URLs of the backups that the limit is for; empty = all without another limit."""


@dataclass(frozen=True, slots=True)
class OverviewLimits:
    """Above which something needs attention."""

    max_lag: float = MAX_LAG
    """Seconds, of log archives."""
    ages: tuple[AgeLimit, ...] = (AgeLimit(MAX_BACKUP_AGE),)


def newest_backups(place: str, backups: Sequence[Backup], limits: OverviewLimits, now_ms: int) -> tuple[Newest, ...]:
    """The newest backup of a storage for each limit that is for it. Drills' backups, those being removed, and small ones do not count."""
    counted = [each for each in backups if not (each.made_by_drill or each.removing)]
    root = place.partition("?")[0].rstrip("/")
    prefixes = tuple(each.prefix for each in limits.ages if each.prefix)
    found = []
    for limit in limits.ages or (AgeLimit(0),):
        if limit.prefix:
            if not _can_be_in(limit.prefix, root):
                continue
            mine = [each for each in counted if _is_below(each, limit.prefix)]
        else:
            mine = [each for each in counted if not any(_is_below(each, prefix) for prefix in prefixes)]
            if counted and not mine:
                continue
        newest = max(_regular_backups(mine), key=lambda each: each.finished_ms, default=None)
        path, finished_ms = ("", 0) if newest is None else (newest.path, newest.finished_ms)
        too_old = 0 < limit.seconds < (now_ms - finished_ms) / 1000
        full = max((each for each in mine if not each.parent), key=lambda each: each.finished_ms, default=None)
        rows = ("", 0, 0) if full is None else (full.keyspaces, full.total_kvs, full.rows_before)
        found.append(Newest(place, limit.prefix, path, finished_ms, limit.seconds, too_old, *rows))
    return tuple(found)


def _regular_backups(backups: Sequence[Backup]) -> list[Backup]:
    """Return the backups without occasional ones of a part: the only one of its scope, and less than half the size of the largest."""
    scopes = Counter(each.scope for each in backups)
    largest = max((each.total_bytes for each in backups), default=0)
    return [each for each in backups if scopes[each.scope] > 1 or 2 * each.total_bytes >= largest]


def _can_be_in(prefix: str, root: str) -> bool:
    """Return whether backups below a root can have this prefix: paths may be below any root, URLs below theirs."""
    is_url = "://" in prefix or prefix.startswith("/")
    return not is_url or f"{root}/".startswith(prefix) or prefix.startswith(f"{root}/")


def _is_below(backup: Backup, prefix: str) -> bool:
    return backup.path.startswith(prefix) or backup.url.partition("?")[0].startswith(prefix)


def find_problems(shown: Overview, limits: OverviewLimits) -> Iterator[OverviewFinding]:
    """Everything that needs attention: first what cannot be read."""
    for section, _, group in shown.sections:
        for each in group:
            if each.source.error:
                yield OverviewFinding(
                    f"cannot read {each.source.place}: {each.source.error}", section, each.source.hint or RETRY
                )
    for newest in (newest for storage in shown.storages for newest in storage.newest if newest.too_old):
        yield _old_backup(newest)
    for newest in (newest for storage in shown.storages for newest in storage.newest if newest.rows_before):
        text = f"the newest full backup in {newest.where} has {newest.total_kvs:,} rows; the one before it had {newest.rows_before:,}"
        yield OverviewFinding(text, "backups", "Check that nothing is missing in the cluster or in what was selected.")
    for status in (each.status for each in shown.archives if each.status):
        yield from log_findings(status, limits.max_lag)
    for page in shown.status_pages:
        yield from (_sync_finding(each, page.source.place) for each in page.syncs if each.trouble or each.degraded)
    for drills in shown.drills:
        yield from _drill_findings(drills)
    for gc in shown.gc:
        yield from _gc_findings(gc)


RETRY = "It is read again automatically. Run `tikv-br serve` with --log-level debug to log the cause."


def _old_backup(newest: Newest) -> OverviewFinding:
    hours = newest.max_age / 3600
    limit = f"{hours:g} h" if hours >= 1 else f"{newest.max_age / 60:g} min"
    text = f"the newest backup in {newest.where} is more than {limit} old: {newest.path}"
    if not newest.path:
        text = f"there is no backup in {newest.where}"
    return OverviewFinding(
        text,
        "backups",
        "Check the job that makes backups and its log. If backups may be older, pass a longer --max-backup-age.",
    )


def log_findings(status: LogStatus, max_lag: float) -> Iterator[OverviewFinding]:
    name = status.log_id
    for gap in status.gaps:
        text = f"log {name} has no changes of {gap}"
        yield OverviewFinding(text, "logs", "Times in the gap cannot be restored. Make a new backup.")
    for damage in status.damage:
        text = f"log {name}: {damage}"
        yield OverviewFinding(
            text, "logs", "Run `tikv-br log status --level data` to see what is affected, and make a new backup."
        )
    if status.state is LogState.ACTIVE and status.rpo_seconds > max_lag:
        text = f"log {name} is {status.rpo_seconds:,.0f} s behind, which is more than {max_lag:g} s"
        yield OverviewFinding(
            text,
            "logs",
            "Check that `tikv-br log start` runs. If it does not, start the same command again: it resumes.",
        )


def _sync_finding(sync: Sync, place: str) -> OverviewFinding:
    if sync.trouble:
        return OverviewFinding(f"{sync.name}: {sync.trouble}", "syncs", f"See {place} and the log of that process.")
    return OverviewFinding(
        f"{sync.name} is degraded: {sync.degraded}", "syncs", f"It may recover without help. If not, see {place}."
    )


_OUTCOMES = {"missed": "missed an objective", "failed": "failed", "interrupted": "was interrupted"}


def _drill_findings(drills: Drills) -> Iterator[OverviewFinding]:
    if drills.drills and drills.drills[0].verdict != "passed":
        verdict = drills.drills[0].verdict
        text = f"the last drill {_OUTCOMES.get(verdict, verdict)}"
        yield OverviewFinding(text, "drills", "Read its report: the first row of the table links to it.")


def _gc_findings(gc: Gc) -> Iterator[OverviewFinding]:
    if gc.never_ran:
        text = f"GC has never run in {gc.source.place}: old versions and deleted rows are kept forever"
        yield OverviewFinding(
            text, "gc", "Start `tikv-br gc run`, unless the cluster has API V1, which has no versions."
        )
    elif gc.lag is not None and gc.lag > GC_LIMIT:
        reason = f"{gc.holder} holds it back" if gc.holder else "no GC worker advances it"
        advice = "Check whether that service still runs and is needed." if gc.holder else "Start `tikv-br gc run`."
        yield OverviewFinding(f"the GC safe point is {gc.lag / 3600:,.0f} h old: {reason}", "gc", advice)
