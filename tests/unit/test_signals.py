"""Signals: handlers take no lock, whatever the main thread does as they come."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from tests.support.forks import Forks
from tests.support.tools import ROOT
from tests.support.worst_moment import strike_in_wait
from tikv_br import signals
from tikv_br.errors import Interrupted, StorageFull, Terminated, TikvBrError
from tikv_br.steps import FunctionStep, Step, run_steps

RECEIVE = {"signal", "set_wakeup_fd", "sigwait", "sigwaitinfo", "sigtimedwait", "pthread_sigmask", "siginterrupt"}
SECONDS = 20
TERMINATED = 143


def uses_of_signals(source: str) -> set[str]:
    """Functions of `signal` that receive signals, by which name ever the module calls them."""
    tree = ast.parse(source)
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name for alias in imports if alias.name in {"signal", "_signal"}}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in {"signal", "_signal"}:
            found |= {alias.name for alias in node.names} & RECEIVE
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found |= {node.attr} & RECEIVE
        elif isinstance(node, ast.Attribute) and node.attr == "add_signal_handler":
            found.add(node.attr)
    return found


def test_one_module_receives_signals() -> None:
    """A handler anywhere else could take a lock that the main thread holds."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("tikv_br", "incremental", "formats")
        for path in (ROOT / folder).rglob("*.py")
        if uses_of_signals(path.read_text(encoding="utf-8"))
    }
    assert found == {"tikv_br/signals.py"}
    assert uses_of_signals("from signal import signal as on\non(1, print)") == {"signal"}
    assert uses_of_signals("import signal\nsignal.signal(signal.SIGTERM, f)") == {"signal"}
    assert uses_of_signals("def f():\n    import signal as s\n    s.sigwait({s.SIGTERM})") == {"sigwait"}
    assert uses_of_signals("loop.add_signal_handler(15, f)") == {"add_signal_handler"}


def stopped(number: int) -> int:
    """Exit code of a process that gets a signal as it begins to wait for the event that the signal sets."""
    signal.alarm(SECONDS)
    stop = threading.Event()
    with signals.stopping(stop) as received:
        strike_in_wait(lambda event: event is stop, number)
        stop.wait()
    return received[0].exit_code


def stopped_in_a_child() -> int:
    """As `stopped`, in a child of a process that receives signals itself, which must not see those of its child."""
    stop = threading.Event()
    with signals.stopping(stop) as received:
        pid = os.fork()
        if not pid:
            os._exit(stopped(signal.SIGTERM))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if not received and not stop.wait(0.2) else 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_the_wait_for_its_event(number: int) -> None:
    """The main thread holds the event's lock as the handler runs."""
    with Forks(__name__) as forks:
        forks.start(partial(stopped, number))
        assert forks.wait() == 128 + number


def test_a_forked_child_receives_its_own_signals() -> None:
    """And its parent does not."""
    with Forks(__name__) as forks:
        forks.start(stopped_in_a_child)
        assert forks.wait() == TERMINATED


class Noisy:
    """A signal comes in its finalizer."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


class NoisyStream(io.StringIO):
    """A signal comes as it is written to."""

    def write(self, text: str) -> int:
        """Get the signal in the middle of a log line."""
        if "noisy" in text:
            signal.raise_signal(signal.SIGTERM)
        return len(text)


def in_log() -> None:
    """`logging` reports an `Exception` of a handler, and goes on."""
    logger = logging.getLogger("noisy")
    logger.addHandler(logging.StreamHandler(NoisyStream()))
    logger.warning("noisy")


def in_weak_reference() -> None:
    """Python drops everything that such a callback raises."""
    thing = io.BytesIO()
    weakref.finalize(thing, signal.raise_signal, signal.SIGTERM)
    del thing


def in_own_code() -> None:
    """Such as a look for followers, whose errors are only logged."""
    with contextlib.suppress(TikvBrError):
        signal.raise_signal(signal.SIGTERM)


def swallowed(strike: Callable[[], object]) -> int:
    """Exit code of a program that gets a signal within code that survives exceptions, and works on."""
    signals.raise_from_now()
    try:
        strike()
        for _ in range(SECONDS * 100):
            time.sleep(0.01)
    except Terminated as error:
        return error.exit_code
    return 0


@pytest.mark.parametrize("strike", [in_log, in_weak_reference, in_own_code, Noisy], ids=lambda each: each.__name__)
def test_a_signal_within_code_that_survives_exceptions(strike: Callable[[], object]) -> None:
    """The program ends all the same."""
    with Forks(__name__) as forks:
        forks.start(partial(swallowed, strike))
        assert forks.wait() == TERMINATED


def test_a_signal_that_another_thread_gets() -> None:
    """The system gives it to any thread, and no wait of the main thread is interrupted then."""
    stop = threading.Event()
    with signals.stopping(stop) as received:

        def send() -> None:
            time.sleep(0.2)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        thread = threading.Thread(target=send)
        thread.start()
        assert stop.wait(SECONDS)
        thread.join()
    assert [type(error) for error in received] == [Terminated]


def test_a_second_signal_raises() -> None:
    """At once, with the hint; but not where only the first one counts."""
    with signals.stopping(threading.Event(), "again") as received:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Terminated) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.hint == "again"
        assert [type(error) for error in received] == [Interrupted]
    with signals.stopping(threading.Event(), only_first=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_before_the_beginning_raises() -> None:
    """Nothing is there yet that would end by the event."""
    with signals.stopping(threading.Event(), "later", lambda: False) as received, pytest.raises(Terminated) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.hint == Terminated.default_hint
    assert not received


def test_a_signal_while_steps_are_undone_is_logged_by_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    """The main thread may be inside of a log handler; the follower around the steps is not stopped."""
    stop, threads = threading.Event(), set[int | None]()

    def keep(record: logging.LogRecord) -> bool:
        threads.add(record.thread)
        return True

    monitor = logging.getLogger("tikv_br.signals")
    monitor.addFilter(keep)

    def fail(_context: object) -> None:
        raise StorageFull("full")

    steps: list[Step[object]] = [FunctionStep("fill", fail, lambda _: signal.raise_signal(signal.SIGTERM))]
    try:
        with signals.stopping(stop) as received, pytest.raises(StorageFull):
            run_steps(steps, None)
    finally:
        monitor.removeFilter(keep)
    assert "SIGTERM ignored: still undoing the earlier steps" in caplog.text
    assert threading.get_ident() not in threads
    assert not received
    assert not stop.is_set()
