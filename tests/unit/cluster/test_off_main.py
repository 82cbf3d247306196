"""Signals end the waiting for gRPC, and never break into it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.forks import Forks
from tests.unit.cluster.fakes import PD, FakeCluster
from tikv_br.cluster.channel import run_in_worker_thread
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.errors import Terminated

SECONDS = 4.0
AT_MOST = 400
"""Signals in that time."""
LONGEST_DELAY = 0.006
"""Seconds, about as long as it takes on a quiet machine to connect, to ask twice and to close."""


class Reported:
    """A handler of SIGTERM that raises once each time that it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.count = 0

    def __call__(self, *_: object) -> None:
        """Raise, once."""
        if self.armed:
            self.armed = False
            self.count += 1
            raise Terminated("SIGTERM")


@pytest.fixture
def reported() -> Iterator[Reported]:
    """The handler for the length of a test."""
    handler = Reported()
    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def end_soon(seconds: float) -> threading.Thread:
    """Have the main thread sent SIGTERM in so many seconds."""

    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def _main() -> int:
    ident = threading.main_thread().ident
    assert ident
    return ident


def test_it_runs_in_another_thread() -> None:
    """Results and errors are passed on; in threads other than the main one the call runs in place."""
    assert run_in_worker_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        run_in_worker_thread(lambda: 1 // 0)
    seen: list[bool] = []
    thread = threading.Thread(
        target=lambda: seen.append(run_in_worker_thread(threading.get_ident) == threading.get_ident())
    )
    thread.start()
    thread.join()
    assert seen == [True]


def test_one_within_another() -> None:
    """It is the same thread."""
    assert run_in_worker_thread(lambda: run_in_worker_thread(threading.get_ident) == threading.get_ident())


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_signal_ends_the_wait(interrupts: bool, reported: Reported) -> None:
    """The action goes on, and does not hold up the next, though the signal has not interrupted the wait: it came just before."""
    over = threading.Event()

    def work() -> None:
        signal.pthread_kill(_main() if interrupts else threading.get_ident(), signal.SIGTERM)
        over.wait(60)

    reported.armed = True
    begin = time.monotonic()
    with pytest.raises(Terminated):
        run_in_worker_thread(work)
    assert time.monotonic() - begin < 50
    assert run_in_worker_thread(lambda: 7) == 7
    over.set()


def test_a_forked_child_has_threads_of_its_own() -> None:
    """A child knows none of its parent's threads, which are not there."""
    with Forks("tests.unit.cluster.test_off_main") as forks:
        forks.start(work_in_a_child)
        assert forks.wait() == 7


def work_in_a_child() -> int:
    """Exit code of a child forked beside a thread: 7, from a thread of its own."""
    run_in_worker_thread(int)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(run_in_worker_thread(lambda: 7))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.timeout(120)
def test_no_signal_at_whatever_moment_makes_closing_wait_for_ever(fake: FakeCluster, reported: Reported) -> None:
    """SIGTERM at random moments of connecting, asking and closing, by gRPC's futures, streams and plain calls."""
    fake.pd.script(PD + "GetGCSafePoint", pdpb_pb2.GetGCSafePointResponse(safe_point=1))
    fake.pd.script(PD + "Tso", pdpb_pb2.TsoResponse(count=1, timestamp=pdpb_pb2.Timestamp(physical=1)))
    chance, until, tried = random.Random(6), time.monotonic() + SECONDS, 0
    while tried < AT_MOST and time.monotonic() < until:
        tried += 1
        killer = end_soon(chance.uniform(0, LONGEST_DELAY))
        with contextlib.suppress(Terminated):
            reported.armed = True
            with PdClient(fake.config()) as pd:
                pd.gc_safe_point()
                pd.tso()
            reported.armed = False
        killer.join()
    assert reported.count > 0
