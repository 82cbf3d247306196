"""When a GC worker is unhealthy, and what it serves."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.unit.gc.fakes import FakePd
from tikv_br.gc.metrics import WorkerFigures
from tikv_br.gc.status import GcReport, report
from tikv_br.gc.watch import PATIENCE_SECONDS, WorkerWatch
from tikv_br.gc.worker import WorkerOptions
from tikv_br.web.metrics import respond

INTERVAL = 600.0


@pytest.fixture
def clock() -> Clock:
    """The watch's clock."""
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> WorkerWatch:
    """A worker that has just started."""
    return WorkerWatch("me", WorkerOptions(60.0, INTERVAL), describe, clock=clock)


def describe(found: GcReport | None) -> dict[str, object]:
    """The fields of a report, as far as the tests need them."""
    return {"gc": None if found is None else found.worker_safe_point}


def state() -> GcReport:
    """State of a PD with a service that limits GC."""
    pd = FakePd()
    pd.set_worker(pd.ago(60))
    pd.update_service_safe_point("tikv-br-sync-a", 3600, pd.ago(60))
    return report(pd.gc_status(), pd.tso())


def health(watch: WorkerWatch) -> tuple[list[str], list[str]]:
    """Problems and degradations."""
    return watch.problems(), watch.degradations()


def test_a_worker_that_joins(watch: WorkerWatch, clock: Clock) -> None:
    """It is degraded until it leads or waits, and unhealthy if that takes too long."""
    assert health(watch) == ([], ["not in the election for 0 s"])
    clock.now += PATIENCE_SECONDS + 1
    assert health(watch) == (["not in the election for 61 s"], [])
    watch.show(None, WorkerFigures(waits_for="other"))
    assert health(watch) == ([], [])


def test_rounds_that_fail(watch: WorkerWatch, clock: Clock) -> None:
    """Failures are counted from the first one; the first good round ends them. Reasons have no secrets."""
    watch.show(state(), WorkerFigures(revision=5, rounds=1))
    for failures in (1, 2):
        clock.now += 30
        watch.show(None, WorkerFigures(5, 1, failures, error="PD refuses http://user:hush@pd"))
    problems, degraded = health(watch)
    assert (problems, len(degraded)) == ([], 1)
    assert degraded[0].startswith("no round has succeeded for 30 s: PD refuses")
    assert "hush" not in degraded[0]
    clock.now += 40
    assert watch.problems()[0].startswith("no round has succeeded for 70 s")
    watch.show(state(), WorkerFigures(5, 2, 2))
    assert health(watch) == ([], [])


def test_a_long_first_round(watch: WorkerWatch, clock: Clock) -> None:
    """It has the time of an interval, counted from when the worker leads; after a failure, leading again is no success."""
    watch.show(None, WorkerFigures(revision=5))
    clock.now += INTERVAL + PATIENCE_SECONDS
    assert health(watch) == ([], [])
    clock.now += 1
    assert watch.problems() == ["the next round is late by 61 s"]
    watch.show(None, WorkerFigures(error="etcd is away"))
    watch.show(None, WorkerFigures(revision=6))
    clock.now += PATIENCE_SECONDS + 1
    assert watch.problems() == ["no round has succeeded for 61 s"]


def test_a_round_that_is_late(watch: WorkerWatch, clock: Clock) -> None:
    """A leader that hangs is unhealthy some time after its next round was due; who waits has none due."""
    watch.show(state(), WorkerFigures(revision=5, rounds=1))
    clock.now += INTERVAL + PATIENCE_SECONDS
    assert health(watch) == ([], [])
    clock.now += 1
    assert health(watch) == (["the next round is late by 61 s"], [])
    watch.show(None, WorkerFigures(0, 1, waits_for="other"))
    assert health(watch) == ([], [])


def test_status(watch: WorkerWatch) -> None:
    """A leader shows the last state of GC, also after a failed round; nobody else does."""
    watch.show(state(), WorkerFigures(revision=5, rounds=1))
    watch.show(None, WorkerFigures(5, 1, 1, error="away"))
    reported: dict[str, Any] = watch.status()
    assert (reported["name"], reported["leads"], reported["healthy"], reported["degraded"]) == ("me", True, True, True)
    assert (reported["trouble"], reported["failures"]) == ("no round has succeeded for 0 s: away", 1)
    assert reported["gc"] == state().worker_safe_point
    watch.show(None, WorkerFigures(0, 1, 1, waits_for="other"))
    reported = watch.status()
    assert (reported["gc"], reported["waits_for"]) == (None, "other")


def test_metrics(watch: WorkerWatch) -> None:
    """The same figures as in the file, and those of the process."""
    watch.show(state(), WorkerFigures(revision=5, rounds=3))
    scraped = respond(watch.metrics, "text/plain")
    names = set(re.findall(r"^([a-z_]+)", scraped.body.decode(), re.MULTILINE))
    assert scraped.content_type.startswith("text/plain")
    assert {
        "tikv_br_gc_rounds_total",
        "tikv_br_gc_service_holds_back",
        "tikv_br_build_info",
        "process_start_time_seconds",
    } <= names
