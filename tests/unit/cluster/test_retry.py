"""Waits and budgets, with a clock of the test's own."""

from __future__ import annotations

import pytest

from tikv_br.cluster import retry
from tikv_br.cluster.retry import Backoff, Backoffer
from tikv_br.errors import RetryBudgetExhausted


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.slept.append(seconds)
        self.now += seconds


def backoffer(clock: Clock, budget: float = 100.0, busy: float = 0.0, chance: float = 0.0) -> Backoffer:
    """A backoffer on the test's clock."""
    return Backoffer("a call", budget, busy, clock=lambda: clock.now, sleep=clock.sleep, chance=lambda: chance)


def wait_for_all(waits: Backoffer, backoff: Backoff, causes: list[str]) -> None:
    """Fail again and again."""
    for cause in causes:
        waits.wait(backoff, cause)


@pytest.mark.parametrize(
    ("backoff", "base_ms", "cap_ms", "jitter"),
    [
        (retry.REGION_MISS, 2, 500, False),
        (retry.NO_LEADER, 2, 500, False),
        (retry.STALE_COMMAND, 2, 1000, False),
        (retry.NOT_READY, 2, 500, False),
        (retry.STORE_BUSY, 2000, 10000, True),
        (retry.DISK_FULL, 500, 5000, False),
        (retry.RECOVERY, 100, 10000, True),
        (retry.WITNESS, 1000, 10000, True),
        (retry.STORE_UNREACHABLE, 100, 2000, True),
        (retry.PD_TROUBLE, 500, 3000, True),
    ],
)
def test_waits_double_up_to_their_cap(backoff: Backoff, base_ms: int, cap_ms: int, *, jitter: bool) -> None:
    """Each row of the table waits min(cap, base * 2**n), with jitter at least half and less than all of it."""
    for tries in range(40):
        full = min(cap_ms, base_ms * 2**tries) / 1000
        least, most = backoff.delay(tries, 0.0), backoff.delay(tries, 0.999999)
        assert least == pytest.approx(full / 2 if jitter else full)
        assert most == pytest.approx(full, rel=1e-5)


def test_each_cause_counts_its_own_tries() -> None:
    """A wait for one cause does not lengthen the next one for another."""
    clock = Clock()
    waits = backoffer(clock)
    for backoff in (retry.REGION_MISS, retry.DISK_FULL, retry.REGION_MISS, retry.DISK_FULL):
        waits.wait(backoff, "x")
    assert clock.slept == [0.002, 0.5, 0.004, 1.0]


def test_the_budget_runs_from_the_first_failure() -> None:
    """Time spent before the first failure does not count; waits never overrun what is left."""
    clock = Clock()
    waits = backoffer(clock, budget=3.0)
    clock.now += 500
    waits.wait(retry.DISK_FULL, "x")
    waits.wait(retry.DISK_FULL, "x")
    with pytest.raises(RetryBudgetExhausted):
        waits.wait(retry.DISK_FULL, "x")
    assert clock.slept == [0.5, 1.0]


def test_time_between_waits_counts() -> None:
    """Slow failures spend the budget as waits do."""
    clock = Clock()
    waits = backoffer(clock, budget=3.0)
    waits.wait(retry.REGION_MISS, "x")
    clock.now += 3
    with pytest.raises(RetryBudgetExhausted):
        waits.wait(retry.REGION_MISS, "x")


def test_giving_up_tells_what_was_seen_last() -> None:
    """The message names the call and its last distinct errors, in order."""
    clock = Clock()
    waits = backoffer(clock, budget=1.0)
    with pytest.raises(RetryBudgetExhausted) as caught:
        wait_for_all(waits, retry.REGION_MISS, ["first", "second", "third", "fourth", "third", *["fifth"] * 50])
    assert caught.value.message.startswith("a call: gave up after ")
    assert caught.value.message.endswith("fourth; third; fifth")


def test_giving_up_tells_the_same_cause_once() -> None:
    """What another of the last errors says as well is left out."""
    waits = backoffer(Clock(), budget=1.0)
    with pytest.raises(RetryBudgetExhausted) as caught:
        wait_for_all(waits, retry.REGION_MISS, ["PD a: silent", *["nobody answers: PD a: silent"] * 50])
    assert caught.value.message.endswith("tries: nobody answers: PD a: silent")


def test_a_busy_store_has_a_budget_of_its_own() -> None:
    """Waits for a busy store leave the call's budget alone until theirs is spent."""
    clock = Clock()
    waits = backoffer(clock, budget=1.0, busy=40.0)
    with pytest.raises(RetryBudgetExhausted):
        wait_for_all(waits, retry.STORE_BUSY, ["busy"] * 100)
    assert 35 < sum(clock.slept) <= 41


def test_waits_for_a_busy_store_leave_the_budget_for_other_causes() -> None:
    """After a long wait for a busy store the call still has all of its own budget."""
    clock = Clock()
    waits = backoffer(clock, budget=1.0, busy=40.0)
    wait_for_all(waits, retry.STORE_BUSY, ["busy"] * 3)
    waits.wait(retry.DISK_FULL, "full")
    with pytest.raises(RetryBudgetExhausted):
        waits.wait(retry.DISK_FULL, "full")


def test_a_store_may_ask_for_a_longer_wait() -> None:
    """The server's own figure is a lower bound."""
    clock = Clock()
    backoffer(clock, busy=60.0).wait(retry.STORE_BUSY, "busy", at_least=7.0)
    assert clock.slept == [7.0]
