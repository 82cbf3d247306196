"""Owners of a group that die right before or right after anything that they change: the next one brings it to the same end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from msgspec import structs

from tests.unit.incremental.group.memory_etcd import MemoryEtcd
from tests.unit.incremental.group.states import SERVICE, SafePointBook, capture, changefeed
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import GroupState
from tikv_br.incremental.group.owner import CaptureOwner
from tikv_br.incremental.group.store import GroupStore
from tikv_br.records import dump

FEED = structs.replace(changefeed("feed"), start_ts=1000, gc_ttl=3600)
CHANGES = ((MemoryEtcd, "transact"), (SafePointBook, "update_service_safe_point"))
"""Calls by which an owner changes its environment."""
LOOK_SECONDS = 10.0
ENOUGH = 5
"""Looks in which any state settles."""


class Died(BaseException):
    """Death of an owner; nobody catches it."""


class Group:
    """Two captures that do what their tasks say. The first owns the group until it dies at a moment: before or after a change."""

    def __init__(self, moment: int) -> None:
        self.store, self.pd = GroupStore(MemoryEtcd(), 1), SafePointBook()
        self.left = moment
        self._now = 0.0
        for name in ("one", "two"):
            self.store.etcd.put(self.store.keys.of("owner", name), b"")
            self.store.etcd.put(self.store.keys.of("capture", name), dump(capture(name)))
        self._owners = {name: CaptureOwner(name, self.store, self.pd, lambda: self._now) for name in ("one", "two")}
        self.changefeeds = Changefeeds(self.store, self.pd, lambda _seconds: self.look())

    def settle(self) -> GroupState:
        """Let all look as often as it takes."""
        for _ in range(ENOUGH):
            self.look()
        return self.store.snapshot()

    def look(self) -> None:
        """Let all look once."""
        self._now += LOOK_SECONDS
        for name, owner in list(self._owners.items()):
            try:
                with ExitStack() as stack:
                    for part, change in CHANGES:
                        stack.enter_context(mock.patch.object(part, change, self._around(getattr(part, change))))
                    owner.step()
            except Died:
                self._end(name)
        state = self.store.snapshot()
        for task in state.tasks.values():
            if task.stopping and task.capture in state.captures:
                self.store.etcd.put(
                    self.store.keys.of("task", task.id), dump(replace(task, capture="", stopping=False))
                )

    def _around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: object, **named: object) -> object:
            self._tick()
            done = change(*arguments, **named)
            self._tick()
            return done

        return changed

    def _tick(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise Died

    def _end(self, name: str) -> None:
        """As when its lease has run out."""
        del self._owners[name]
        self.store.etcd.delete(self.store.keys.of("owner", name))
        self.store.etcd.delete(self.store.keys.of("capture", name))


def test_the_next_owner_continues_wherever_one_died() -> None:
    """A changefeed starts, pauses, resumes and is removed; each state is as without a death, and nothing remains."""
    for moment in itertools.count():
        group = Group(moment)
        group.changefeeds.create(FEED)
        begun = group.settle()
        assert {task.capture for task in begun.tasks.values()} <= begun.captures.keys()
        assert begun.tasks
        assert group.pd.held == {SERVICE: (999, 3600)}
        group.changefeeds.pause("feed")
        rests = group.settle()
        assert {task.capture for task in rests.tasks.values()} == {""}
        assert group.pd.held == {SERVICE: (999, 3600)}
        group.changefeeds.resume("feed")
        again = group.settle()
        assert {task.capture for task in again.tasks.values()} <= again.captures.keys()
        group.changefeeds.remove("feed")
        assert group.settle().changefeeds == {}
        kinds = {key.removeprefix(group.store.keys.root).partition("/")[0] for key in group.store.snapshot().items}
        assert kinds == {"capture", "owner"}
        assert group.pd.held == {}
        if group.left >= 0:
            assert moment > 10, "an owner has more to do than that"
            return
