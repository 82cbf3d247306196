"""Backups that a policy keeps."""

from __future__ import annotations

import calendar
import datetime as dt
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.backupset.prune import Policy, PruneCandidate, reasons_to_keep
from tikv_br.errors import UsageError

HOUR = 3_600_000
RULES = ("last", "daily", "weekly", "monthly")
policies = st.tuples(*[st.integers(0, 5)] * 4).filter(any).map(lambda counts: Policy(*counts))
times = st.integers(1, 3000).map(lambda hours: 1_700_000_000_000 + hours * HOUR)


@st.composite
def histories(draw: st.DrawFn) -> list[PruneCandidate]:
    """Backups of up to three groups over some months, some pinned, some with a parent among them."""
    size = draw(st.integers(0, 25))
    names = [f"{number:02}" for number in range(size)]
    return [
        PruneCandidate(
            name,
            draw(st.sampled_from("abc")),
            draw(st.one_of(times, st.just(0))),
            draw(st.booleans()) and draw(st.booleans()),
            draw(st.sampled_from(["", *names])) if draw(st.booleans()) else "",
        )
        for name in names
    ]


def at(text: str) -> int:
    """Milliseconds since the epoch of a time in UTC."""
    return calendar.timegm(dt.datetime.fromisoformat(text).timetuple()) * 1000


def kept(candidates: Sequence[PruneCandidate], policy: Policy) -> set[str]:
    """Ids that have a reason to stay."""
    return {name for name, reasons in reasons_to_keep(candidates, policy).items() if reasons}


def simple(*moments: str) -> list[PruneCandidate]:
    """One group, ids as the moments."""
    return [PruneCandidate(moment, "g", at(moment)) for moment in moments]


def rule_walk(group: list[PruneCandidate], policy: Policy) -> dict[str, set[str]]:
    """Independent implementation: walk from the newest; each rule takes a backup whose period it has not seen last."""
    formats = {"last": None, "daily": "%Y-%m-%d", "weekly": "%G-%V", "monthly": "%Y-%m"}
    left = {rule: getattr(policy, rule) for rule in RULES}
    seen: dict[str, str] = dict.fromkeys(RULES, "")
    found: dict[str, set[str]] = {each.id: set() for each in group}
    for each in sorted(group, key=lambda each: (-each.finished_ms, each.id)):
        moment = dt.datetime.fromtimestamp(each.finished_ms / 1000, dt.UTC)
        for rule, form in formats.items():
            period = moment.strftime(form) if form else each.id
            if left[rule] and period != seen[rule]:
                seen[rule] = period
                left[rule] -= 1
                found[each.id].add(rule)
    return found


@given(histories(), policies)
def test_rules_agree_with_a_walk_from_the_newest(history: list[PruneCandidate], policy: Policy) -> None:
    """In each group every rule keeps exactly what the independent walk takes."""
    reasons = reasons_to_keep(history, policy)
    assert set(reasons) == {each.id for each in history}
    for group in "abc":
        dated = [each for each in history if each.group == group and each.finished_ms]
        for name, rules in rule_walk(dated, policy).items():
            assert set(reasons[name]) & set(RULES) == rules


@given(histories(), policies)
def test_pinned_undated_and_ancestors_are_never_removed(history: list[PruneCandidate], policy: Policy) -> None:
    """Pinned backups, those of unknown age and the ancestors of kept ones stay under any policy."""
    stays = kept(history, policy)
    for each in history:
        if each.pinned or not each.finished_ms:
            assert each.id in stays
        if each.id in stays and each.parent:
            assert each.parent in stays


@given(histories(), policies)
def test_only_children_pins_and_rules_keep(history: list[PruneCandidate], policy: Policy) -> None:
    """Nothing stays without one of the known reasons, and a parent only for the sake of a child that stays."""
    reasons = reasons_to_keep(history, policy)
    for each in history:
        for reason in reasons[each.id]:
            child = reason.removeprefix("parent of ")
            if child != reason:
                assert reasons[child]
                assert next(other for other in history if other.id == child).parent == each.id
            else:
                assert reason in {*RULES, "pinned", "age unknown"}


@given(histories(), policies)
def test_pruning_twice_is_pruning_once(history: list[PruneCandidate], policy: Policy) -> None:
    """A second prune with the same policy removes nothing."""
    first = kept(history, policy)
    assert kept([each for each in history if each.id in first], policy) == first


def test_days_are_utc_and_empty_days_do_not_count() -> None:
    """The newest of each day stays; days without a backup do not count."""
    history = simple("2026-01-01T23:59:59", "2026-01-02T00:00:00", "2026-01-02T12:00:00", "2026-03-01T00:00:00")
    assert kept(history, Policy(daily=2)) == {"2026-03-01T00:00:00", "2026-01-02T12:00:00"}


def test_weeks_begin_on_monday_and_cross_the_year() -> None:
    """29 December 2025 is a Monday: it shares its week with 1 January 2026, and Sunday the 28th does not."""
    history = simple("2025-12-28T12:00:00", "2025-12-29T12:00:00", "2026-01-01T12:00:00")
    assert kept(history, Policy(weekly=2)) == {"2026-01-01T12:00:00", "2025-12-28T12:00:00"}


def test_months_of_different_years_differ() -> None:
    """January is not January of the year before."""
    history = simple("2025-01-31T00:00:00", "2026-01-01T00:00:00")
    assert kept(history, Policy(monthly=2)) == {each.id for each in history}
    assert kept(history, Policy(monthly=1)) == {"2026-01-01T00:00:00"}


def test_chain_of_parents_is_kept_whole() -> None:
    """An incremental of an incremental needs both of its ancestors, however old; the reasons name it."""
    history = [
        PruneCandidate("full", "g", 1),
        PruneCandidate("second", "g", 2, parent="full"),
        PruneCandidate("third", "g", 3, parent="second"),
        PruneCandidate("other", "g", 2),
    ]
    assert reasons_to_keep(history, Policy(last=1)) == {
        "third": ("last",),
        "second": ("parent of third",),
        "full": ("parent of second",),
        "other": (),
    }


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (-1, 0, 0, 5)])
def test_policy_that_keeps_nothing_is_refused(counts: tuple[int, int, int, int]) -> None:
    """Without a rule all would go: that is never what was meant."""
    with pytest.raises(UsageError):
        Policy(*counts)
