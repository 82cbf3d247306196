"""Which backups to keep, by count and by calendar. Pure.

Backups of one group (the same cluster and ranges) are looked at from the newest to the oldest. ``last`` keeps the newest
N. ``daily``, ``weekly`` and ``monthly`` keep, for each of the newest N days, weeks (ISO, from Monday) and months *that have
a backup*, the newest backup of it. Days are UTC days. What any rule keeps is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from tikv_br.errors import UsageError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Policy:
    """How many to keep by each rule; 0 = the rule is not used. Raises `UsageError` when no rule would keep anything."""

    last: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    def __post_init__(self) -> None:
        counts = (self.last, self.daily, self.weekly, self.monthly)
        if min(counts) < 0 or not any(counts):
            raise UsageError(
                "which backups are to be kept?",
                hint="Say at least one of --keep-last, --keep-daily, --keep-weekly and --keep-monthly.",
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """What decides on one backup."""

    id: str
    group: str
    """Backups of one group replace each other."""
    finished_ms: int
    """Milliseconds since the epoch; 0 = not known, and then it is kept."""
    pinned: bool = False
    parent: str = ""
    """Id of the backup that this one continues; ``""`` = none."""


def reasons_to_keep(candidates: Iterable[Candidate], policy: Policy) -> dict[str, tuple[str, ...]]:
    """Why each backup is kept, by id; no reason = it is to be removed.

    A kept backup's parents are kept with it: it cannot be restored without them.
    """
    every = sorted(candidates, key=lambda each: (each.group, -each.finished_ms, each.id))
    reasons: dict[str, list[str]] = {each.id: ["pinned"] if each.pinned else [] for each in every}
    for _group, members in groupby(every, key=lambda each: each.group):
        _apply(list(members), policy, reasons)
    _keep_parents({each.id: each.parent for each in every}, reasons)
    return {name: tuple(why) for name, why in reasons.items()}


def _apply(newest_first: list[Candidate], policy: Policy, reasons: dict[str, list[str]]) -> None:
    for each in newest_first:
        if not each.finished_ms:
            reasons[each.id].append("age unknown")
    dated = [each for each in newest_first if each.finished_ms]
    for each in dated[: policy.last]:
        reasons[each.id].append("last")
    for name, count, period in (
        ("daily", policy.daily, _day),
        ("weekly", policy.weekly, _week),
        ("monthly", policy.monthly, _month),
    ):
        for each in _newest_of_periods(dated, count, period):
            reasons[each.id].append(name)


def _newest_of_periods(
    newest_first: list[Candidate], count: int, period: Callable[[datetime], tuple[int, ...]]
) -> list[Candidate]:
    newest: dict[tuple[int, ...], Candidate] = {}
    for each in newest_first:
        newest.setdefault(period(_EPOCH + timedelta(milliseconds=each.finished_ms)), each)
    return list(newest.values())[:count]


def _keep_parents(parents: Mapping[str, str], reasons: dict[str, list[str]]) -> None:
    to_follow = [name for name, why in reasons.items() if why]
    while to_follow:
        child = to_follow.pop()
        parent = parents[child]
        if parent not in reasons:
            continue
        if not reasons[parent]:
            to_follow.append(parent)
        reasons[parent].append(f"parent of {child}")


def _day(moment: datetime) -> tuple[int, ...]:
    return moment.year, moment.month, moment.day


def _week(moment: datetime) -> tuple[int, ...]:
    return moment.isocalendar()[:2]


def _month(moment: datetime) -> tuple[int, ...]:
    return moment.year, moment.month
