"""Limits of failures and waits."""

from __future__ import annotations

import re

import pytest

from tests.support.clock import Clock
from tikv_br.errors import ClusterUnreachable, KafkaUnreachable
from tikv_br.retry import Patience, wait_until


def test_failures_in_a_row_count_from_the_first() -> None:
    """A success starts over."""
    clock = Clock(100.0)
    patience = Patience(10, "--sink-patience", clock=clock)
    patience.fail(ClusterUnreachable("store 1 is silent"), began=98.0)
    clock.now = 107.0
    patience.fail(ClusterUnreachable("store 1 is silent"))
    assert (patience.is_failing, patience.failing_seconds) == (True, 9.0)
    patience.end()
    assert (patience.is_failing, patience.failing_seconds) == (False, 0.0)
    clock.now = 200.0
    patience.fail(ClusterUnreachable("store 1 is silent"))
    assert patience.failing_seconds == 0.0


def test_a_spent_patience_raises_the_last_error_with_the_time() -> None:
    """The class and the hint stay: they decide the exit code and what the user does."""
    clock = Clock(100.0)
    patience = Patience(10, "--kafka-patience", "the sink", clock=clock)
    patience.begin()
    clock.now += 10.6
    message = "the sink: no broker answers (for 11 s, which is longer than --kafka-patience)"
    with pytest.raises(KafkaUnreachable, match=f"^{re.escape(message)}$") as raised:
        patience.fail(KafkaUnreachable("no broker answers", hint="Start one."))
    assert raised.value.hint == "Start one."


def test_a_wait_ends_with_the_state() -> None:
    """What is checked between two looks may end it earlier."""
    looks = iter([False, False, True])
    checks: list[int] = []
    wait_until(lambda: next(looks), 60, lambda: ClusterUnreachable("late"), poll=0, check=lambda: checks.append(1))
    assert checks == [1, 1]


def test_a_wait_ends_with_its_time() -> None:
    """The error is made at the end, so it may have the last state in it."""
    with pytest.raises(ClusterUnreachable, match=r"^late$"):
        wait_until(lambda: False, 0, lambda: ClusterUnreachable("late"), poll=0.01)
