"""The first steps of ``point-in-time``: choose a time and the backup for it, and restore. `log_comparison` compares."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tikv_br.archive.log import LogArchive
from tikv_br.backupset.index import IndexEntry
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.dataflow.read import MergeSources
from tikv_br.drill import backups
from tikv_br.drill.context import DrillContext
from tikv_br.drill.log_comparison import source_of
from tikv_br.drill.options import PointChoice
from tikv_br.drill.recovery import ownership_reporter
from tikv_br.drill.report import ChosenPoint
from tikv_br.errors import BackupSetError, BackupUnsupported, LogDamaged, OutsideRestoreWindow, TikvBrError, UsageError
from tikv_br.point_in_time import PointOptions, restore_to_point
from tikv_br.progress_events import Notice
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

MAX_SEED = 2**32 - 1


def select(context: DrillContext) -> None:
    """Choose a time, and the newest backup from which it can be restored.

    Raises `UsageError` for backups without timestamps and for a log of another cluster, `LogDamaged` if the log lacks changes
    since the backup, `OutsideRestoreWindow`, and as `BackupSet.open` and `LogArchive.open`.
    """
    choice = context.options.point
    if choice is None:
        raise ValueError("no log was requested")
    archive = LogArchive.open(open_store(choice.log.storage), choice.log.id)
    found = _usable_backups(context, choice, archive)
    newest, oldest = found[0].sources, found[-1].sources
    last = newest.window()[1]
    first = max(oldest.window()[0], minus_seconds(last, choice.seconds))
    seed = None
    if choice.ts is None:
        seed = secrets.randbelow(MAX_SEED + 1) if context.options.seed is None else context.options.seed
        ts = choose_ts(archive.inexact_windows(oldest.base.ranges), first, last, seed)
    else:
        ts = choice.ts or last
        first = oldest.window()[0]
    chosen = next((each for each in found if each.sources.window()[0] <= ts), found[-1])
    chosen.sources.check(ts)
    if choice.compare_source:
        source_of(context, chosen.sources.base.cluster_id)
    context.sources = chosen.sources
    context.point = ChosenPoint(chosen.sources.urls[-1], ts, seed, first, last)
    context.recorder(Notice(f"the drill {context.point}"))
    backups.select(context, chosen.place, chosen.sources.newest, chosen.entry)
    context.lost_ms, context.lost_clock = context.started_ms, backups.MACHINE_CLOCK


def choose_ts(inexact: Iterable[tuple[int, int]], first: int, last: int, seed: int) -> int:
    """A random timestamp from ``first`` to ``last`` that is not within one of the ``inexact`` windows, as ``last`` is not.

    The windows are as `LogArchive.inexact_windows` returns them.
    """
    periods: list[tuple[int, int]] = []
    start = first
    for before, after in inexact:
        if after <= start or before >= last:
            continue
        if start <= before:
            periods.append((start, before))
        start = after
    periods.append((start, last))
    chance = random.Random(seed)  # noqa: S311 - reproducible by its seed
    (period,) = chance.choices(periods, [end - begin + 1 for begin, end in periods])
    return chance.randint(*period)


def restore(context: DrillContext) -> None:
    """Restore to the chosen time as `tikv-br restore point` does; merged rows are first saved in the drill's folder."""
    choice, destination = context.options.point, context.destination
    if choice is None:
        raise ValueError("no log was requested")
    context.restore_start = context.recorder.now
    work = context.options.home.child(f"{context.folder}/merged")
    options = destination.restore_options(context.location, context.restore_state)
    restore_to_point(
        PointOptions(options, choice.log, context.point.restore_ts, work=work), ownership_reporter(context)
    )
    context.restored = context.recorder.now


@dataclass(frozen=True, slots=True)
class _Candidate:
    place: StorageLocation
    entry: IndexEntry
    sources: MergeSources


def _usable_backups(context: DrillContext, choice: PointChoice, archive: LogArchive) -> list[_Candidate]:
    """The newest backup that the log continues, and older ones until one is old enough for the time; the newest first."""
    if archive.damage:
        raise LogDamaged(f"the log at {archive.store.location.redacted()} is damaged: {archive.damage[0].problem}")
    found: list[_Candidate] = []
    refusal: TikvBrError | None = None
    for place, entry in _candidates(context):
        try:
            sources = _open(place, archive)
            first, last = sources.window()
            archive.check(sources.base.ranges, sources.newest.backup_ts, last)
            sources.check(last)
            _check_reaches_end(archive, sources)
        except (UsageError, OutsideRestoreWindow, BackupSetError) as error:
            if found:  # an older backup that the log does not continue, or that is damaged, does not matter
                break
            if not isinstance(error, UsageError | OutsideRestoreWindow):
                raise
            refusal = refusal or error
            continue
        each = _Candidate(place, entry or backups.entry_at(place, sources.newest), sources)
        if found and last < found[0].sources.window()[1]:
            break
        found.append(each)
        if first <= (minus_seconds(last, choice.seconds) if choice.ts is None else choice.ts or last):
            break
    if not found:
        raise refusal or UsageError("there is no backup")
    return found


def _candidates(context: DrillContext) -> Iterator[tuple[StorageLocation, IndexEntry | None]]:
    """The named backup, without its entry, or the folder's backups that replace each other, the newest first."""
    if context.options.existing is not None:
        yield context.options.existing, None
        return
    for entry in backups.newest_of_scope(context):
        yield context.options.backups.child(entry.path), entry


def _open(place: StorageLocation, archive: LogArchive) -> MergeSources:
    try:
        return MergeSources.open(place, None).with_log(archive)
    except BackupUnsupported as error:
        raise UsageError(f"--scenario point-in-time: {error.message}", hint=error.hint) from None


def _check_reaches_end(archive: LogArchive, sources: MergeSources) -> None:
    """Raise `LogDamaged` for a gap between the backup and the end of the log: the window would only be shorter."""
    end = max([archive.checkpoint_ts, *(segment.to_ts for segment in archive.segments)])
    with contextlib.suppress(UsageError):  # without a gap, a part of the keys may be ahead
        archive.check(sources.base.ranges, sources.newest.backup_ts, end)
