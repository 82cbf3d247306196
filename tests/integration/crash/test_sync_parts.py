"""Syncs broken in every call between their parts, in every way, and run again until the clusters are equal.

A sync is no list of steps: its boundaries are the calls of feed, sorter, sink, checkpoint and safe point, taken here from the
very classes, so that a new method is covered from its first day.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integration.crash.cells import FULL, Kind, When, ending, fail
from tests.integration.crash.world import files, forget_safe_points, safe_points
from tests.integration.incremental import forked_sync  # noqa: F401 - loads the kernels
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cli.sync_view import signals_stop
from tikv_br.cluster.safepoint import SafePointKeeper
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import StorageUnreachable, SyncFenced, Terminated
from tikv_br.formats.api_version import ApiVersion
from tikv_br.incremental.checkpoint import CheckpointStore, ObjectCheckpoints
from tikv_br.incremental.feed.feed import Feed, FeedOptions
from tikv_br.incremental.handover import FromTs
from tikv_br.incremental.pipeline import ReplicateOptions
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.tikv import TikvSink
from tikv_br.incremental.sinks.url import parse
from tikv_br.incremental.sorter import Sorter
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

PATIENCE = 120.0
PARTS: tuple[tuple[type, type], ...] = (
    (ObjectCheckpoints, CheckpointStore),
    (SafePointKeeper, SafePointKeeper),
    (Feed, Feed),
    (Sorter, Sorter),
    (TikvSink, Sink),
)
"""What a sync is made of, and the class that says what is called."""
NOT_OF_A_SYNC = {"SafePointKeeper.stop", "TikvSink.mark_missed"}
"""Methods that a sync only calls once it has been fenced, or when an ingest kept its timestamps."""
KINDS = tuple(kind for kind in Kind if kind is not Kind.PD_GONE)
"""A sync waits for PD as long as it takes, so it does not end for want of it."""
numbers = itertools.count(1)


def calls() -> list[tuple[type, str]]:
    """Every public method of every part."""
    return [
        (part, name)
        for part, said in PARTS
        for name, _method in inspect.getmembers(said, inspect.isfunction)
        if not name.startswith("_") and f"{part.__name__}.{name}" not in NOT_OF_A_SYNC
    ]


Cell = tuple[type, str, When, Kind]


def chosen() -> list[Cell]:
    """Each call, before or after it and in one way in turn; with `FULL` in all of them."""
    ways = list(itertools.product(When, KINDS))
    found: list[Cell] = []
    for number, (part, name) in enumerate(calls()):
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
        with signals_stop(stop, "") as told:
            sync(options, stop, lambda _: None)
        if told:
            raise told[0]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ObjectCheckpoints, "save", counted))
        stack.enter_context(mock.patch.object(part, name, charge.around(getattr(part, name))))
        return ending(run, lambda _: None), charge.struck


def broken_by(number: int, options: SyncOptions, until: int, part: type, name: str, when: When) -> int:
    """As `broken`, by a signal to this process. For a fork."""
    return broken(options, until, part, name, when, lambda: os.kill(os.getpid(), number))[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster to follow."""
    settings = {"stores": 1, "regions": 2, "resolved_ts_interval": 0.1, "ts_ahead": 0.1}
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, **settings) as live:
        yield live


@pytest.mark.parametrize(("part", "name", "when", "kind"), chosen(), ids=name_of)
def test_a_sync_broken_in_a_call(
    part: type,
    name: str,
    when: When,
    kind: Kind,
    source: LiveCluster,
    target: LiveCluster,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """It ends with its exit code; run again, the target has every change, one checkpoint and one safe point are there."""
    turn = next(numbers)
    state = StorageLocation("local", str(tmp_path / "state"))
    options = SyncOptions(
        changefeed_id="broken",
        source=source.config,
        target=parse(f"tikv://{target.pd}"),
        state=state,
        start=FromTs(minus_seconds(source.cluster.pd.tso(), 10)),
        scratch=tmp_path,
        feed=FeedOptions(hold_back=0.1),
        replicate=ReplicateOptions(save_every=0.01),
    )
    source.raw().batch_put({b"key-%d" % number: b"turn %d" % turn for number in range(turn, turn + 5)})
    source.raw().delete(b"key-%d" % turn)
    break_in(options, source.cluster.pd.tso(), part, name, when, kind, forks)
    run_until_equal(options, source, target)
    assert list(safe_points(source)) == ["tikv-br-sync-broken"]
    left = sorted(name.partition("-")[0] for name in files(tmp_path / "state" / "broken"))
    assert left == ["checkpoint", "epoch"]
    assert set(files(tmp_path, but="/state/")) == set()
    forget_safe_points(source)
    source.raw().delete_range(b"", b"")


def break_in(options: SyncOptions, until: int, part: type, name: str, when: When, kind: Kind, forks: Forks) -> None:
    """Break a sync in a call, and see how it ends."""
    if kind is Kind.EXCEPTION:
        code, struck = broken(options, until, part, name, when, fail)
        assert struck
        assert code in {0, StorageUnreachable.exit_code}  # 0: it was at its end, or could try again
    elif kind is Kind.LOST_LEASE:
        assert isinstance(options.state, StorageLocation)
        rival = ObjectCheckpoints(open_store(options.state), options.changefeed_id)
        code, struck = broken(options, until, part, name, when, rival.claim)
        assert struck
        assert code in {0, SyncFenced.exit_code}  # 0: it was at its end, or had yet to begin
    elif kind is Kind.SIGKILL:
        forks.start(partial(broken_by, signal.SIGKILL, options, until, part, name, when))
        assert forks.wait() == -signal.SIGKILL
    else:
        forks.start(partial(broken_by, signal.SIGTERM, options, until, part, name, when))
        assert forks.wait() == Terminated.exit_code


def run_until_equal(options: SyncOptions, source: LiveCluster, target: LiveCluster) -> None:
    """Run the sync in order until the target has what the source has."""
    stop, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            sync(options, stop, lambda _: None)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: bool(errors) or contents(target) == contents(source), PATIENCE)
    finally:
        stop.set()
        thread.join()
    assert errors == []
