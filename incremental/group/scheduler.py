"""Which capture runs which sub-span: what the owner has to do next, from what etcd holds. Pure.

A sub-span goes through three states: *free* (no capture's name on it), *held*, and *stopping* (held, and its holder has
been asked to give it back, which makes it free). Only a free one is given to a capture, so no two ever have it. One whose
holder is gone counts as free as soon as nothing that the holder has sent can still arrive at a sink (`Patience`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from incremental.group.model import ChangefeedInfo, GroupState, State, Task


@dataclass(frozen=True, slots=True)
class Split:
    """Cut the span of a changefeed, which has no tasks yet."""

    changefeed_id: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a free task, or one whose holder is gone for good, to a capture."""

    task: Task
    capture: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the holder of a task to give it back."""

    task: Task


@dataclass(frozen=True, slots=True)
class Free:
    """Take a task that is to stop off a holder that is gone for good."""

    task: Task


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget a changefeed that was removed, now that nobody works on it."""

    changefeed_id: str


Action = Split | Assign | Stop | Free | Discard


class Patience:
    """Since when captures are gone, by the clock of whoever looks.

    One that has lost its lease begins no write, but what it has sent may still arrive, for as long as it has said that its
    requests may take.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._missed: dict[str, float] = {}

    def gone(self, state: GroupState) -> frozenset[str]:
        """The holders of tasks of whom nothing can arrive any more."""
        now = self._clock()
        held = [task for task in state.tasks.values() if task.capture and task.capture not in state.captures]
        self._missed = {task.capture: self._missed.get(task.capture, now) for task in held}
        longest: dict[str, int] = {}
        for task in held:
            longest[task.capture] = max(longest.get(task.capture, 0), task.write_timeout_ms)
        return frozenset(each for each, since in self._missed.items() if (now - since) * 1000 >= longest[each])


def plan(state: GroupState, gone: Collection[str]) -> list[Action]:
    """What is to be done, in order; nothing where all is as it should be. `gone`: see `Patience`.

    Every task of a normal changefeed goes to a capture, so that no two captures differ by more than one in how many they
    have, and as few as possible change hands.
    """
    actions: list[Action] = []
    for changefeed in state.changefeeds.values():
        actions += _for_changefeed(changefeed, state.tasks_of(changefeed.id), gone)
    if state.captures:
        actions += _balance(state, gone)
    return actions


def _for_changefeed(changefeed: ChangefeedInfo, tasks: Sequence[Task], gone: Collection[str]) -> list[Action]:
    """What does not depend on how many captures there are."""
    if changefeed.state is State.NORMAL:
        return [] if tasks else [Split(changefeed.id)]
    held = [task for task in tasks if task.capture]
    if not held and changefeed.state is State.REMOVING:
        return [Discard(changefeed.id)]
    freed: list[Action] = [Free(task) for task in held if task.capture in gone]
    return freed + [Stop(task) for task in held if not task.stopping and task.capture not in gone]


def _balance(state: GroupState, gone: Collection[str]) -> list[Action]:
    """Give free tasks to those that have fewest, and ask those that have too many for theirs."""
    wanted = [task for task in state.tasks.values() if _is_wanted(state, task)]
    held: dict[str, list[Task]] = {capture: [] for capture in sorted(state.captures)}
    for task in wanted:
        if task.capture in held and not task.stopping:
            held[task.capture].append(task)
    assigned: list[Action] = []
    for task in sorted(wanted, key=lambda each: each.id):
        if not task.capture or task.capture in gone:
            capture = min(held, key=lambda name: (len(held[name]), _how_many(held[name], task.changefeed)))
            held[capture].append(task)
            assigned.append(Assign(task, capture))
    return assigned + [Stop(task) for task in _surplus(held, len(wanted))]


def _surplus(held: Mapping[str, list[Task]], total: int) -> Iterable[Task]:
    """The tasks that must leave those that have more than their share, which the fullest may round up."""
    share, rest = divmod(total, len(held))
    for at, capture in enumerate(sorted(held, key=lambda name: -len(held[name]))):
        tasks = list(held[capture])
        while len(tasks) > share + (at < rest):
            counts = Counter(task.changefeed for task in tasks)
            leaving = max(tasks, key=lambda task: (counts[task.changefeed], task.id))
            tasks.remove(leaving)
            yield leaving


def _is_wanted(state: GroupState, task: Task) -> bool:
    changefeed = state.changefeeds.get(task.changefeed)
    return changefeed is not None and changefeed.state is State.NORMAL


def _how_many(tasks: Iterable[Task], changefeed_id: str) -> int:
    return sum(task.changefeed == changefeed_id for task in tasks)
