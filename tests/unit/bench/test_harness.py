from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from bench.__main__ import BENCHES, NOT_QUICK, benches_of
from bench.harness import FULL, QUICK, Figure, Goal, Spread, cpu_seconds, paired, rates


def recorded(name: str, seen: list[str], seconds: list[float]) -> Callable[[], float]:
    """Return a run that notes its name and takes the next of these seconds, after an uncounted one."""
    answers = iter([99.0, *seconds])

    def run() -> float:
        seen.append(name)
        return next(answers)

    return run


def test_every_round_runs_each_once_and_turns() -> None:
    """The first runs do not count; then all run in every round, forwards and backwards by turns."""
    seen: list[str] = []
    taken = paired({name: recorded(name, seen, [1, 2, 3]) for name in "abc"}, 3)
    assert "".join(seen) == "abc" + "abc" + "cba" + "abc"
    assert taken == {name: [1, 2, 3] for name in "abc"}


def test_ratios_are_those_of_the_same_round() -> None:
    """A machine that slows down to a half between rounds changes the rates, not the ratio."""
    subjects = {"ours": recorded("ours", [], [1, 2, 2]), "theirs": recorded("theirs", [], [3, 6, 8])}
    goals = {"ours": Goal("value", at_least=7), "theirs": Goal("ratio", at_least=2)}
    ours, theirs = rates("bench", "case", 12.0, "MB/s", subjects, 3, goals)
    assert ours == Figure("bench", "case", "ours", "MB/s", Spread(6, 6, 12), 3, goal=goals["ours"])
    assert theirs.value == Spread(2, 1.5, 4)
    assert (theirs.compared_with, theirs.ratio) == ("ours", Spread(3, 3, 4))
    assert (ours.reached, theirs.reached) == (False, True)


@pytest.mark.parametrize(
    ("goal", "median", "reached"),
    [
        (Goal("value", at_least=2), 2, True),
        (Goal("value", at_least=2), 1.9, False),
        (Goal("value", at_most=2), 2, True),
        (Goal("value", at_most=2), 2.1, False),
    ],
)
def test_goals(goal: Goal, median: float, reached: bool) -> None:
    """A goal is reached at its bound."""
    figure = Figure("", "", "", "", Spread(median, 0, 9), 1, goal=goal)
    assert figure.reached is reached
    assert figure.to_json()["reached"] is reached


def test_a_goal_for_a_ratio_that_was_not_measured_is_open() -> None:
    """Without a rival nothing is reached or missed."""
    assert Figure("", "", "", "", Spread(1, 1, 1), 1, goal=Goal("ratio", at_least=2)).reached is None


def test_processor_time_leaves_out_waiting() -> None:
    """A run that only sleeps takes next to nothing."""
    import time

    assert cpu_seconds(lambda: time.sleep(2))() < 1


def test_quick_leaves_some_out() -> None:
    """Also with other values than usual; the full bench leaves out none."""
    other = dataclasses.replace(QUICK, rounds=1)
    assert benches_of(other) == benches_of(QUICK) == [name for name in BENCHES if name not in NOT_QUICK]
    assert set(BENCHES) > NOT_QUICK
    assert benches_of(FULL) == list(BENCHES)
