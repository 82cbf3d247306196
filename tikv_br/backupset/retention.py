"""Retention rules: which backups to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from tikv_br.errors import UsageError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Policy:
    """Number of backups to keep by each rule; 0 = unused. Raises `UsageError` if no rule would keep any."""

    last: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    def __post_init__(self) -> None:
        counts = (self.last, self.daily, self.weekly, self.monthly)
        if min(counts) < 0 or not any(counts):
            raise UsageError(
                "no retention rule was passed",
                hint="Pass at least one of --keep-last, --keep-daily, --keep-weekly and --keep-monthly.",
            )


@dataclass(frozen=True, slots=True)
class PruneCandidate:
    """Properties of a backup that decide whether it is kept."""

    id: str
    group: str
    """Backups of one group replace each other."""
    finished_ms: int
    """Milliseconds since the epoch; 0 = not known, and then it is kept."""
    pinned: bool = False
    parent: str = ""
    """Id of the backup that this one continues; ``""`` = none."""


def reasons_to_keep(candidates: Iterable[PruneCandidate], policy: Policy) -> dict[str, tuple[str, ...]]:
    """Return the reasons to keep each backup, by id; without any it is removed.

    A kept backup's parents are kept with it: it cannot be restored without them.
    """
    every = sorted(candidates, key=lambda each: (each.group, -each.finished_ms, each.id))
    reasons: dict[str, list[str]] = {each.id: ["pinned"] if each.pinned else [] for each in every}
    for _group, members in groupby(every, key=lambda each: each.group):
        _apply(list(members), policy, reasons)
    _keep_parents({each.id: each.parent for each in every}, reasons)
    return {name: tuple(why) for name, why in reasons.items()}


def _apply(newest_first: list[PruneCandidate], policy: Policy, reasons: dict[str, list[str]]) -> None:
    for each in newest_first:
        if not each.finished_ms:
            reasons[each.id].append("age unknown")
    dated = [each for each in newest_first if each.finished_ms]
    for each in dated[: policy.last]:
        reasons[each.id].append("last")
    for name, count, period in (
        ("daily", policy.daily, lambda moment: (moment.year, moment.month, moment.day)),
        ("weekly", policy.weekly, lambda moment: moment.isocalendar()[:2]),
        ("monthly", policy.monthly, lambda moment: (moment.year, moment.month)),
    ):
        newest: dict[tuple[int, ...], PruneCandidate] = {}
        for each in dated:
            newest.setdefault(period(_EPOCH + timedelta(milliseconds=each.finished_ms)), each)
        for each in list(newest.values())[:count]:
            reasons[each.id].append(name)


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
