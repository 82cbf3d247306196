"""Cells of syncs: a sync is broken in a call between its parts, and run again."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from tests.integration.crash.cells import FULL, Kind, When, ending, fail
from tests.integration.incremental import forked_sync  # noqa: F401 - loads the kernels
from tests.support.forks import Forks
from tests.support.waiting import eventually
from tikv_br import signals
from tikv_br.errors import StorageUnreachable, SyncFenced, Terminated
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

PATIENCE = 120.0
NOT_OF_A_SYNC = {"SafePointKeeper.stop", "SafePointKeeper.confirm", "TikvSink.mark_missed", "KafkaSink.mark_missed"}
"""Methods that a sync never calls, or only once it has been fenced, or when an ingest kept its timestamps."""
KINDS = tuple(kind for kind in Kind if kind is not Kind.PD_GONE)
"""A sync waits for PD as long as it takes, so it does not end for want of it."""


def calls(parts: Sequence[tuple[type, type]]) -> list[tuple[type, str]]:
    """Every public method of every part."""
    return [
        (part, name)
        for part, said in parts
        for name, _method in inspect.getmembers(said, inspect.isfunction)
        if not name.startswith("_") and f"{part.__name__}.{name}" not in NOT_OF_A_SYNC
    ]


Cell = tuple[type, str, When, Kind]


def chosen(parts: Sequence[tuple[type, type]]) -> list[Cell]:
    """Each call, before or after it and in one way in turn; with `FULL` in all of them."""
    ways = list(itertools.product(When, KINDS))
    found: list[Cell] = []
    for number, (part, name) in enumerate(calls(parts)):
        mine = ways if os.environ.get(FULL) else [ways[number % len(ways)]]
        found += [(part, name, when, kind) for when, kind in mine]
    return found


def name_of(value: object) -> str | None:
    """As a part of a test's name."""
    return value.__name__ if isinstance(value, type) else None


class Charge:
    """Acts once, at the first call of a method."""

    def __init__(self, when: When, act: Callable[[], object]) -> None:
        self._when, self._act = when, act
        self.struck = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method with the charge laid."""

        def called(*args: object, **named: object) -> object:
            if self._when is When.BEFORE:
                self._strike()
            found = method(*args, **named)
            if self._when is When.AFTER:
                self._strike()
            return found

        return called

    def _strike(self) -> None:
        if not self.struck:
            self.struck = True
            self._act()


def broken(
    options: SyncOptions, until: int, part: type, name: str, when: When, act: Callable[[], object]
) -> tuple[int, bool]:
    """Run a sync until it has saved that it has come to a ts, with a charge at a call: its exit code, and whether that was met."""
    stop, charge = threading.Event(), Charge(when, act)
    save = ObjectCheckpoints.save

    def counted(self: ObjectCheckpoints, checkpoint: Any) -> None:  # noqa: ANN401
        save(self, checkpoint)
        if checkpoint.checkpoint_ts >= until:
            stop.set()

    def run(_reporter: object) -> None:
        with signals.stopping(stop) as reported:
            sync(options, stop, lambda _: None)
        if reported:
            raise reported[0]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ObjectCheckpoints, "save", counted))
        stack.enter_context(mock.patch.object(part, name, charge.around(getattr(part, name))))
        return ending(run, lambda _: None), charge.struck


def broken_by(number: int, options: SyncOptions, until: int, part: type, name: str, when: When) -> int:
    """As `broken`, by a signal to this process. For a fork."""
    return broken(options, until, part, name, when, lambda: os.kill(os.getpid(), number))[0]


def break_in(options: SyncOptions, until: int, part: type, name: str, when: When, kind: Kind, forks: Forks) -> None:
    """Break a sync in a call, and see how it ends."""
    if kind is Kind.EXCEPTION:
        code, struck = broken(options, until, part, name, when, fail)
        assert struck
        assert code in {0, StorageUnreachable.exit_code}  # 0: it had finished, or could try again
    elif kind is Kind.LOST_LEASE:
        assert isinstance(options.state, StorageLocation)
        rival = ObjectCheckpoints(open_store(options.state), options.changefeed_id)
        code, struck = broken(options, until, part, name, when, rival.claim)
        assert struck
        assert code in {0, SyncFenced.exit_code}  # 0: it had finished, or had yet to begin
    elif kind is Kind.SIGKILL:
        forks.start(partial(broken_by, signal.SIGKILL, options, until, part, name, when))
        assert forks.wait() == -signal.SIGKILL
    else:
        forks.start(partial(broken_by, signal.SIGTERM, options, until, part, name, when))
        assert forks.wait() == Terminated.exit_code


def run_until(options: SyncOptions, is_done: Callable[[], bool]) -> None:
    """Run the sync in order until a condition holds."""
    stop, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            sync(options, stop, lambda _: None)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: bool(errors) or is_done(), PATIENCE)
    finally:
        stop.set()
        thread.join()
    assert errors == []
