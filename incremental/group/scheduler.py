"""Assignment of tasks to captures: plans the owner's next actions from the state in etcd. No I/O.

A task has three states: *free* (no capture), *assigned*, and *stopping* (assigned, and its capture has been asked to free it).
Only a free task is assigned, so that no two captures ever have it. A task of a dead capture counts as free as soon as none of
its writes can still arrive at a sink (`DeadCaptures`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tikv_br.incremental.group.model import ChangefeedInfo, ChangefeedState, ChangefeedTask, GroupState


@dataclass(frozen=True, slots=True)
class Split:
    """Split the range of a changefeed into tasks."""

    changefeed_id: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Assign a free task, or one of a dead capture, to a capture."""

    task: ChangefeedTask
    capture: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the capture of a task to free it."""

    task: ChangefeedTask


@dataclass(frozen=True, slots=True)
class Free:
    """Free a stopping task of a dead capture."""

    task: ChangefeedTask


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a removed changefeed, now that all its tasks are free."""

    changefeed_id: str


Action = Split | Assign | Stop | Free | Discard


class DeadCaptures:
    """Measures, by this process's clock, how long captures have been missing.

    A capture that has lost its lease starts no more writes, but those in flight may arrive until its request timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._missed: dict[str, float] = {}

    def gone(self, state: GroupState) -> frozenset[str]:
        """The dead captures whose writes can no longer arrive."""
        now = self._clock()
        held = [task for task in state.tasks.values() if task.capture and task.capture not in state.captures]
        self._missed = {task.capture: self._missed.get(task.capture, now) for task in held}
        longest: dict[str, int] = {}
        for task in held:
            longest[task.capture] = max(longest.get(task.capture, 0), task.write_timeout_ms)
        return frozenset(each for each, since in self._missed.items() if (now - since) * 1000 >= longest[each])


def plan(state: GroupState, gone: Collection[str]) -> list[Action]:
    """The actions to take, in order. `gone`: see `DeadCaptures`.

    Every task of a normal changefeed is assigned. The numbers of tasks of two captures differ by at most one, and as few tasks
    as possible are moved.
    """
    actions: list[Action] = []
    for changefeed in state.changefeeds.values():
        actions += _for_changefeed(changefeed, state.tasks_of(changefeed.id), gone)
    if state.captures:
        actions += _balance(state, gone)
    return actions


def _for_changefeed(changefeed: ChangefeedInfo, tasks: Sequence[ChangefeedTask], gone: Collection[str]) -> list[Action]:
    """The actions that do not depend on the number of captures."""
    if changefeed.state is ChangefeedState.NORMAL:
        return [] if tasks else [Split(changefeed.id)]
    held = [task for task in tasks if task.capture]
    if not held and changefeed.state is ChangefeedState.REMOVING:
        return [Discard(changefeed.id)]
    freed: list[Action] = [Free(task) for task in held if task.capture in gone]
    return freed + [Stop(task) for task in held if not task.stopping and task.capture not in gone]


def _balance(state: GroupState, gone: Collection[str]) -> list[Action]:
    """Assign free tasks to the captures with the fewest, and stop surplus tasks of those with too many."""
    running = {each.id for each in state.changefeeds.values() if each.state is ChangefeedState.NORMAL}
    wanted = [task for task in state.tasks.values() if task.changefeed in running]
    held: dict[str, list[ChangefeedTask]] = {capture: [] for capture in sorted(state.captures)}
    for task in wanted:
        if task.capture in held and not task.stopping:
            held[task.capture].append(task)
    assigned: list[Action] = []
    for task in sorted(wanted, key=lambda each: each.id):
        if not task.capture or task.capture in gone:
            counts = {
                name: (len(tasks), sum(each.changefeed == task.changefeed for each in tasks))
                for name, tasks in held.items()
            }
            capture = min(counts, key=counts.__getitem__)
            held[capture].append(task)
            assigned.append(Assign(task, capture))
    return assigned + [Stop(task) for task in _surplus(held, len(wanted))]


def _surplus(held: Mapping[str, list[ChangefeedTask]], total: int) -> Iterable[ChangefeedTask]:
    """The tasks beyond each capture's share; the captures with the most tasks may round their share up."""
    share, rest = divmod(total, len(held))
    for at, capture in enumerate(sorted(held, key=lambda name: -len(held[name]))):
        tasks = list(held[capture])
        while len(tasks) > share + (at < rest):
            counts = Counter(task.changefeed for task in tasks)
            leaving = max(tasks, key=lambda task: (counts[task.changefeed], task.id))
            tasks.remove(leaving)
            yield leaving
