"""Probes run side by side, each with a time of its own; the line for Nagios."""

from __future__ import annotations

import re
import threading

import pytest

from tikv_br.check import run
from tikv_br.check.probe import (
    CheckOptions,
    Figure,
    Probe,
    ProbeContext,
    ProbeOutcome,
    ProbeSkipped,
    Result,
    Status,
    fail,
    ok,
    skipped,
    warn,
)
from tikv_br.check.run import count, run_probes
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import StorageDenied

NOWHERE = ClusterConfig(pd=("127.0.0.1:1",), connect_timeout=1.0, retry_budget=0.1)


def around(timeout: float = 60.0) -> ProbeContext:
    """ProbeContext that nothing can be reached in."""
    return ProbeContext(CheckOptions(NOWHERE, timeout=timeout))


def test_probes_run_at_the_same_time() -> None:
    """Two that wait for each other both end, and results keep the order of the probes."""
    both = threading.Barrier(2)

    def meet(_: ProbeContext) -> ProbeOutcome:
        both.wait(60)
        return ok("met")

    results = run_probes([Probe("first", meet), Probe("second", meet)], around())
    assert [(result.name, result.outcome.seen) for result in results] == [("first", "met"), ("second", "met")]


def test_one_that_hangs_has_failed_and_the_others_count() -> None:
    """It is reported after its time, and its late result is ignored."""
    release = threading.Event()

    def hang(_: ProbeContext) -> ProbeOutcome:
        release.wait(60)
        return ok("too late")

    reported: list[str] = []
    probes = [Probe("hangs", hang, seconds=1.5), Probe("well", lambda _: ok("fine"))]
    results = run_probes(probes, around(), lambda result: reported.append(result.name))
    release.set()
    assert reported == ["well", "hangs"]
    assert [result.outcome.status for result in results] == [Status.FAIL, Status.OK]
    assert "no answer within 1.5 s" in results[0].outcome.seen


def test_errors_become_failures_with_their_hint() -> None:
    """An error of ours is an outcome; a subject that was not named is skipped."""

    def refuse(_: ProbeContext) -> ProbeOutcome:
        raise StorageDenied("no right to write", hint="Ask for it.")

    def pass_by(_: ProbeContext) -> ProbeOutcome:
        raise ProbeSkipped("nothing to look at")

    failed, passed = run_probes([Probe("refused", refuse), Probe("passed", pass_by)], around())
    assert failed.outcome == fail("no right to write", "Ask for it.")
    assert passed.outcome == skipped("nothing to look at")


def test_a_defect_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither lost nor waited for, and its traceback is logged."""
    reported = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _defect: reported.set())

    def break_down(_: ProbeContext) -> ProbeOutcome:
        raise ZeroDivisionError

    [result] = run_probes([Probe("broken", break_down)], around(timeout=60))
    assert result.outcome.status is Status.FAIL
    assert result.seconds < 50
    assert "bug in tikv-br" in result.outcome.seen
    assert reported.wait(30)


def test_without_pd_one_probe_fails_and_the_others_are_skipped() -> None:
    """The cause is reported once."""
    unreached = around()
    results = run_probes(
        [Probe("pd", lambda here: ok(str(here.connection))), Probe("other", lambda here: ok(str(here.cluster)))],
        unreached,
    )
    assert [result.outcome.status for result in results] == [Status.FAIL, Status.SKIPPED]


def result(name: str, outcome: ProbeOutcome) -> Result:
    """A result at once."""
    return Result(name, outcome, 0.0)


FINE = result("clock", ok("in step", Figure("clock", 0.25, "s", "-1:1", "-5:5")))
POOR = result("gc", warn("held | for long\nby cdc", "Look.", Figure("age", 90000, "s", "86400")))
BAD = result("stores", fail("store 1 is Down", "Repair it."))
NOT = result("space", skipped("not known"))


@pytest.mark.parametrize(
    ("results", "code", "word"),
    [
        ([FINE, NOT], 0, "OK"),
        ([FINE, POOR, NOT], 1, "WARNING"),
        ([POOR, FINE, BAD], 2, "CRITICAL"),
        ([NOT], 3, "UNKNOWN"),
    ],
)
def test_the_worst_decides_for_nagios(results: list[Result], code: int, word: str) -> None:
    """Exit code and word of the line agree."""
    assert run.state(results) == code
    assert run.line(results).startswith(f"TIKV-BR {word} - ")


def test_the_line_is_one_line_with_figures_as_nagios_reads_them() -> None:
    """Problems come first, failures before warnings; after the only bar stand label=value with unit and ranges."""
    line = run.line([FINE, POOR, BAD, NOT])
    text, _, figures = line.partition(" | ")
    assert "\n" not in line
    assert line.count("|") == 1
    assert text.index("stores: store 1 is Down") < text.index("gc: held / for long by cdc")
    assert text.endswith("1 ok, 1 warn, 1 fail, 1 skipped")
    form = r"'[a-z_0-9]+'=-?[\d.]+(s|%|B)?(;[-\d.:]*;[-\d.:]*)?"
    assert re.fullmatch(rf"{form}( {form})*", figures)
    assert figures.split() == ["'clock'=0.25s;-1:1;-5:5", "'age'=90000s;86400;"]


def test_counts_name_every_status() -> None:
    """Also those that nobody has."""
    assert count([FINE, BAD, BAD]) == {Status.OK: 1, Status.WARN: 0, Status.FAIL: 2, Status.SKIPPED: 0}
