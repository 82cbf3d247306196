"""Waits and budgets, with a clock of the test's own."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import pytest

from tests.support.clock import Clock
from tests.support.waiting import eventually
from tikv_br import retry
from tikv_br.cancellation import CLEAN_UP_SECONDS, SIGNAL_SECONDS, clean_up, clean_up_seconds, request_seconds
from tikv_br.errors import ClusterUnreachable, EtcdUnreachable, RetryBudgetExhausted
from tikv_br.retry import Backoff, Backoffer, Outage, RetryPolicy


def on_clock(clock: Clock, policy: RetryPolicy, what: str = "a call", chance: float = 0.0) -> Backoffer:
    """A call of a policy on the test's clock."""
    return Backoffer(what, policy, clock=lambda: clock.now, sleep=clock.sleep, chance=lambda: chance)


def backoffer(clock: Clock, budget: float = 100.0, busy: float = 0.0, chance: float = 0.0) -> Backoffer:
    """A backoffer on the test's clock."""
    return on_clock(clock, RetryPolicy(budget, busy), "a call", chance)


def wait_for_all(waits: Backoffer, backoff: Backoff, causes: list[str]) -> None:
    """Fail again and again."""
    for cause in causes:
        waits.wait(backoff, cause)


@pytest.mark.parametrize(
    ("backoff", "base_ms", "cap_ms", "jitter"),
    [
        (retry.REGION_MISS, 2, 500, False),
        (retry.STORE_BUSY, 2000, 10000, True),
    ],
)
def test_waits_double_up_to_their_cap(backoff: Backoff, base_ms: int, cap_ms: int, *, jitter: bool) -> None:
    """A wait is min(cap, base * 2**n), with jitter at least half and less than all of it."""
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
    """Time before the first failure does not count; the last wait is cut so that the budget is used up."""
    clock = Clock()
    waits = backoffer(clock, budget=3.0)
    clock.now += 500
    with pytest.raises(RetryBudgetExhausted, match=r"503\.0 s and 4 tries"):
        wait_for_all(waits, retry.DISK_FULL, ["x"] * 10)
    assert clock.slept == [0.5, 1.0, 1.5]


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
    """A cause that another of the last errors includes is left out."""
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
    before = clock.now
    with pytest.raises(RetryBudgetExhausted):
        wait_for_all(waits, retry.DISK_FULL, ["full"] * 10)
    assert clock.now - before == 1.0


def test_a_store_may_ask_for_a_longer_wait() -> None:
    """The server's own figure is a lower bound."""
    clock = Clock()
    backoffer(clock, busy=60.0).wait(retry.STORE_BUSY, "busy", at_least=7.0)
    assert clock.slept == [7.0]
    clock = Clock()
    with pytest.raises(RetryBudgetExhausted):
        backoffer(clock, budget=6.0).wait(retry.DISK_FULL, "x", at_least=7.0)
    assert clock.slept == []


def test_giving_up_tells_the_time_since_the_call_began() -> None:
    """A first request that hung for half a minute is part of what the user has waited for."""
    clock = Clock()
    waits = backoffer(clock, budget=1.0)
    clock.now += 30
    with pytest.raises(RetryBudgetExhausted, match=r"a call: gave up after 31\.0 s and 3 tries: full"):
        wait_for_all(waits, retry.DISK_FULL, ["full"] * 3)


def test_a_call_inside_another_one_spends_its_budget() -> None:
    """Silence of a store and of PD do not take a budget each; the message is the whole call's."""
    clock = Clock()
    with backoffer(clock, budget=10.0) as outer:
        for _ in range(3):
            outer.wait(retry.DISK_FULL, "store is silent")
        inner = on_clock(clock, RetryPolicy(10.0), "PD")
        with pytest.raises(
            RetryBudgetExhausted, match=r"a call: gave up after 10\.0 s and 8 tries: store is .*; PD is"
        ):
            wait_for_all(inner, retry.DISK_FULL, ["PD is silent"] * 100)
    assert sum(clock.slept) <= 10
    alone = backoffer(clock, budget=10.0)
    wait_for_all(alone, retry.DISK_FULL, ["x"] * 3)


def test_a_policy_of_its_own_leaves_the_outer_budget_alone() -> None:
    """A storage's patience is not the cluster's budget, even if a task reads from it in the middle of a call."""
    clock = Clock()
    with backoffer(clock, budget=1.0) as outer:
        wait_for_all(on_clock(clock, RetryPolicy(100.0, nested=False)), retry.REGION_MISS, ["x"] * 50)
        clock.now -= sum(clock.slept)
        outer.wait(retry.REGION_MISS, "y")


def test_a_policy_may_limit_tries_and_raise_the_failure_itself() -> None:
    """Without an error of its own the policy raises the last failure."""
    waits = on_clock(Clock(), RetryPolicy(max_tries=3, error=None))
    for _ in range(2):
        waits.wait(retry.REGION_MISS, ClusterUnreachable("first"))
    last = ClusterUnreachable("last")
    with pytest.raises(ClusterUnreachable) as caught:
        waits.wait(retry.REGION_MISS, last)
    assert caught.value is last


def test_run_repeats_an_action_until_it_succeeds_or_fails_otherwise() -> None:
    """Only the given class is retried; a spent budget raises the policy's own error."""
    failures: list[Exception] = [ClusterUnreachable("a"), ClusterUnreachable("b")]

    def action() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    quick = Backoff("test", 0.0, 0.0)
    assert RetryPolicy().run("work", action, quick, ClusterUnreachable) == "done"
    failures = [ValueError("other")]
    with pytest.raises(ValueError, match="other"):
        RetryPolicy().run("work", action, quick, ClusterUnreachable)
    failures = [ClusterUnreachable("a")] * 9
    with pytest.raises(EtcdUnreachable, match=r"work: gave up after .* and 3 tries: a"):
        RetryPolicy(max_tries=3, error=EtcdUnreachable).run("work", action, quick, ClusterUnreachable)


def outage(clock: Clock) -> Outage:
    """The outage of a server that is asked again for 60 s."""
    return Outage("PD 1.2.3.4:2379", 60.0, clock=lambda: clock.now)


def fail_until_given_up(clock: Clock, away: Outage) -> float:
    """Call a server that does not answer; returns the seconds until the call is given up."""
    began = clock.now
    call = Backoffer("a call", RetryPolicy(60.0), away, clock=lambda: clock.now, sleep=clock.sleep, chance=lambda: 0.0)

    def ask() -> None:
        away.fail()
        raise ClusterUnreachable("silent")

    with pytest.raises(RetryBudgetExhausted):
        repeat(call, ask)
    return clock.now - began


def repeat(call: Backoffer, action: Callable[[], None]) -> None:
    """Try until the call is given up."""
    while True:
        try:
            action()
        except ClusterUnreachable as error:
            call.wait(retry.PD_UNAVAILABLE, error)


def test_calls_to_a_server_that_is_gone_share_one_budget() -> None:
    """After 60 s of failures there are no further 60, and a call that starts after 40 s has 20; an answer ends the outage."""
    clock = Clock()
    away = outage(clock)
    assert fail_until_given_up(clock, away) == pytest.approx(60)
    assert fail_until_given_up(clock, away) == 0
    away.end()
    away.fail()
    clock.now += 38
    assert fail_until_given_up(clock, away) == pytest.approx(22)


def test_an_old_failure_is_no_part_of_a_later_outage() -> None:
    """A call that was cancelled after one failure does not cost a later one its budget."""
    clock = Clock()
    away = outage(clock)
    away.fail()
    clock.now += 50
    assert away.seconds == 0
    assert fail_until_given_up(clock, away) == pytest.approx(60)


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about the servers of these tests: threads of other tests may still wait for theirs."""
    return [line for line in caplog.messages if re.match(r"(PD 1\.2\.3\.4:2379|store 1) ", line)]


def test_an_outage_is_logged_after_ten_seconds_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the time at which the server is given up; a short silence is not logged at all."""
    clock = Clock()
    away = outage(clock)
    away.fail()
    away.end()
    for _ in range(20):
        away.fail()
        clock.now += 1
    [line] = own_lines(caplog)
    assert re.fullmatch(r"PD 1\.2\.3\.4:2379 has not answered for 10 s, trying until \d\d:\d\d:\d\d UTC", line)
    away.end()
    away.end()
    assert own_lines(caplog)[1:] == ["PD 1.2.3.4:2379 answers again, after 20 s"]


def test_clean_up_does_not_wait_for_a_server_beyond_its_time() -> None:
    """Not even with a new call; a server that was silent before is not asked again, and requests have a second."""
    clock = Clock()
    away = outage(clock)
    away.check()
    with clean_up(time.monotonic() - SIGNAL_SECONDS):
        assert request_seconds(30.0) == 1.0
        away.check()
        assert fail_until_given_up(clock, away) == 0
        with pytest.raises(ClusterUnreachable, match="has not answered"):
            away.check()
    away.check()
    assert request_seconds(30.0) == 30.0


def test_clean_ups_of_threads_end_in_any_order() -> None:
    """The one that began first may end first; when all have ended, nothing hurries any more."""
    first, second = clean_up(), clean_up()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert clean_up_seconds() < CLEAN_UP_SECONDS
    second.__exit__(None, None, None)
    assert clean_up_seconds() == math.inf


def test_a_server_that_hangs_is_logged_before_any_request_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The line comes from the clock: once, whatever the requests become; answers to others show that the server does not hang."""
    clock = Clock()
    away = outage(clock)
    with away.asking():
        clock.now += 9
        away.report()
        assert own_lines(caplog) == []
        away.end()
        clock.now += 9
        away.report()
        assert own_lines(caplog) == []
        clock.now += 1
        away.report()
        clock.now += 5
        away.report()
    assert len(own_lines(caplog)) == 1
    assert "has not answered for 10 s, trying until" in caplog.text
    away.fail()
    clock.now += 15
    away.fail()
    away.end()
    assert own_lines(caplog)[1:] == ["PD 1.2.3.4:2379 answers again, after 30 s"]


def test_a_thread_watches_the_time(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a request hangs, or has failed and its next try is far away."""
    monkeypatch.setattr(retry, "REPORT_SECONDS", 0.2)
    away = Outage("store 1", math.inf)
    with away.asking():
        eventually(lambda: "store 1 has not answered for" in caplog.text)
    failing = Outage("store 2", 60)
    failing.fail()
    eventually(lambda: "store 2 has not answered for" in caplog.text)


def test_a_failure_that_comes_late_counts_from_its_begin(caplog: pytest.LogCaptureFixture) -> None:
    """As of a call that was long about its work, until pings of its connection were not answered."""
    clock = Clock()
    away = outage(clock)
    clock.now += 13
    away.fail(clock.now - 13)
    assert "has not answered for 13 s" in caplog.text


class Probed:
    """A server that works for long, and its probe."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers, self.probes = answers, 0

    def probe(self) -> bool:
        """Answer, or not until it does."""
        self.probes += 1
        eventually(lambda: self.answers)
        return True


def test_a_server_that_works_in_silence_is_probed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers the probes is not logged, whatever its work takes; one that does not is, though no request has failed."""
    for name, seconds in (("REPORT_SECONDS", 0.6), ("PROBE_SECONDS", 0.1), ("WATCH_SECONDS", 0.05)):
        monkeypatch.setattr(retry, name, seconds)
    away, server = Outage("store 1", 60), Probed()
    with away.working(server.probe):
        eventually(lambda: server.probes > 5)
        time.sleep(0.7)
        assert own_lines(caplog) == []
        server.answers = False
        eventually(lambda: re.search("store 1 has not answered for 1 s, trying until", caplog.text))
        probes = server.probes
        time.sleep(0.3)
        assert server.probes == probes, "one probe at a time"
        server.answers = True
        eventually(lambda: "store 1 answers again" in caplog.text)
    probes = server.probes
    time.sleep(0.3)
    assert server.probes <= probes + 1
    assert len(own_lines(caplog)) == 2


def test_short_work_is_not_probed() -> None:
    """Nor a server whose other requests are answered."""
    clock = Clock()
    away, server = outage(clock), Probed()
    with away.working(server.probe):
        clock.now += 0.9
        away.probe()
        away.end()
        clock.now += 0.9
        away.probe()
    clock.now += 5
    away.probe()
    assert server.probes == 0


def test_probes_that_fail_are_an_outage(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a server that refuses connections while a stream of before is still open."""
    monkeypatch.setattr(retry, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(retry, "PROBE_SECONDS", 0.05)
    away = Outage("store 1", 60)
    with away.working(lambda: False):
        eventually(lambda: "store 1 has not answered for" in caplog.text)
