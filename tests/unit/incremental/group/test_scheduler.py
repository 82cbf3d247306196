from __future__ import annotations

import string
from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.incremental.group.states import changefeed, state_of
from tikv_br.incremental.group.model import ChangefeedState, ChangefeedTask, GroupState, TaskId
from tikv_br.incremental.group.owner import Assign, DeadCaptures, Discard, Free, Split, Stop, plan

NORMAL, PAUSED, REMOVING = ChangefeedState.NORMAL, ChangefeedState.PAUSED, ChangefeedState.REMOVING
GRACE = 3


def task(number: int, holder: str = "", *, of: str = "one", stopping: bool = False) -> ChangefeedTask:
    """A sub-span of a changefeed."""
    return ChangefeedTask(
        of,
        number,
        b"%d" % number,
        b"%d" % (number + 1),
        capture=holder,
        epoch=1,
        stopping=stopping,
        write_timeout_ms=GRACE * 1000,
    )


@st.composite
def states(draw: st.DrawFn) -> GroupState:
    """Any normal changefeeds, with tasks that are free, held, stopping, or held by captures that are gone."""
    alive = draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    tasks = []
    for name in draw(st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, unique=True)):
        for number in range(draw(st.integers(1, 7))):
            holder = draw(st.sampled_from(["", *alive, "gone", "lost"]))
            tasks.append(task(number, holder, of=name, stopping=bool(holder) and draw(st.booleans())))
    return state_of(alive, [changefeed(name) for name in {each.changefeed for each in tasks}], tasks)


@given(states())
def test_a_plan_gives_out_all_that_is_free_and_moves_as_little_as_it_can(state: GroupState) -> None:
    """Each free task goes to one capture; as many leave each capture as it has beyond an even share, and no more."""
    actions = plan(state, gone={"gone"})
    assigned = [action.task for action in actions if isinstance(action, Assign)]
    assert Counter(assigned) == Counter(each for each in state.tasks.values() if each.capture in {"", "gone"})
    stopped = [action.task for action in actions if isinstance(action, Stop)]
    loads = Counter(
        each.capture for each in state.tasks.values() if each.capture in state.captures and not each.stopping
    )
    ranked = sorted((loads[name] for name in state.captures), reverse=True)
    share, rest = divmod(len(state.tasks), len(ranked))
    assert len(stopped) == sum(max(0, load - share - (at < rest)) for at, load in enumerate(ranked))
    assert not set(stopped) & set(assigned)
    assert all(each.capture in state.captures and not each.stopping for each in stopped)
    assert len(actions) == len(assigned) + len(stopped)


@given(states())
def test_once_a_plan_is_done_there_is_nothing_more_to_do(state: GroupState) -> None:
    """After what was planned, and all stopping tasks given back, one more plan ends in an even spread."""
    for _ in range(2):
        tasks = dict(state.tasks)
        for action in plan(state, gone={"gone", "lost"}):
            assert isinstance(action, Assign | Stop)
            new = action.capture if isinstance(action, Assign) else ""
            tasks[action.task.id] = replace(action.task, capture=new, stopping=False)
        tasks = {
            key: replace(each, capture="", stopping=False) if each.stopping else each for key, each in tasks.items()
        }
        state = replace(state, tasks=tasks)
    assert plan(state, gone=()) == []
    loads = Counter(each.capture for each in state.tasks.values())
    assert loads.keys() <= state.captures.keys()
    counts = [loads[name] for name in state.captures]
    assert max(counts) - min(counts) <= 1


def test_a_new_changefeed_is_split_once() -> None:
    """Without tasks it is to be split, also while there is no capture; with tasks it is not."""
    assert plan(state_of([], [changefeed("one")], []), ()) == [Split("one")]
    assert plan(state_of(["a"], [changefeed("one")], [task(0, "a")]), ()) == []
    assert plan(state_of(["a"], [changefeed("one", PAUSED)], []), ()) == []


def test_a_paused_changefeed_gives_its_tasks_back() -> None:
    """They are stopped, taken off the dead, and given to nobody."""
    tasks = [task(0, "a"), task(1, "a", stopping=True), task(2), task(3, "dead"), task(4, "silent")]
    state = state_of(["a", "b"], [changefeed("one", PAUSED)], tasks)
    assert plan(state, {"dead"}) == [Free(tasks[3]), Stop(tasks[0]), Stop(tasks[4])]


def test_a_removed_changefeed_is_forgotten_when_nobody_works_on_it() -> None:
    """Not before its last task is free; without captures too."""
    removed = changefeed("one", REMOVING)
    assert plan(state_of(["a"], [removed], [task(0, "a"), task(1)]), ()) == [Stop(task(0, "a"))]
    assert plan(state_of(["a"], [removed], [task(0, "a", stopping=True), task(1)]), ()) == []
    assert plan(state_of([], [removed], [task(0), task(1)]), ()) == [Discard("one")]


def test_sub_spans_of_one_changefeed_are_spread() -> None:
    """Two changefeeds of two sub-spans each: both captures get one of each."""
    tasks = [task(number, of=name) for name in ("one", "two") for number in (0, 1)]
    state = state_of(["a", "b"], [changefeed("one"), changefeed("two")], tasks)
    given_to = {(action.task.changefeed, action.capture) for action in plan(state, ()) if isinstance(action, Assign)}
    assert len(given_to) == 4


def test_patience_counts_from_when_a_capture_was_first_missed() -> None:
    """Not before the grace period is over, for each capture again, and never for one that is present."""
    now = [100.0]
    patience = DeadCaptures(lambda: now[0])
    state = state_of(["a"], [changefeed("one")], [task(0, "a"), task(1, "b"), task(2)])
    assert patience.gone(state) == frozenset()
    now[0] = 102.0
    later = replace(state, tasks={**state.tasks, TaskId("one", 3): task(3, "c")})
    assert patience.gone(later) == frozenset()
    now[0] = 103.0
    assert patience.gone(later) == {"b"}
    now[0] = 105.0
    assert patience.gone(later) == {"b", "c"}


@dataclass
class Process:
    """A capture as it may be: it learns late of everything, may stand still, and may die."""

    id: str
    lease_end: int
    running: set[int] = field(default_factory=set)


class Group(RuleBasedStateMachine):
    """Captures that come, stand still, and die, with an owner that acts on old pictures.

    A capture writes only before the end of its lease, and what it sends may be on its way for `GRACE` more.
    """

    TASKS = 4
    LEASE = 4

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.alive: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.names = iter(string.ascii_letters)
        self.tasks = {TaskId("one", number): task(number) for number in range(self.TASKS)}
        self.picture = self.state()
        self.patience = DeadCaptures(lambda: self.now)
        self.under_way: dict[int, tuple[str, int]] = {}

    def state(self) -> GroupState:
        """Contents of etcd."""
        there = [each.id for each in (*self.alive.values(), *self.zombies) if each.lease_end > self.now]
        return state_of(there, [changefeed("one")], list(self.tasks.values()))

    @precondition(lambda self: len(self.alive) < 4)
    @rule()
    def join(self) -> None:
        """One more."""
        name = next(self.names, None)
        if name is not None:
            self.alive[name] = Process(name, self.now + self.LEASE)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), kill=st.booleans())
    def lose(self, data: st.DataObject, *, kill: bool) -> None:
        """Kill one, or let it stand still: its lease runs out."""
        process = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        if not kill:
            self.zombies.append(process)

    @rule()
    def tick(self) -> None:
        """Time passes; the living renew."""
        self.now += 1
        for process in self.alive.values():
            process.lease_end = self.now + self.LEASE

    @rule()
    def look(self) -> None:
        """The owner looks."""
        self.picture = self.state()

    @rule()
    def act(self) -> None:
        """The owner acts on its view, perhaps an old one; etcd refuses changes based on stale values."""
        for action in plan(self.picture, self.patience.gone(self.picture)):
            assert isinstance(action, Assign | Stop)
            key = action.task.id
            if self.tasks[key] != action.task:
                continue
            if isinstance(action, Stop):
                self.tasks[key] = replace(action.task, stopping=True)
            else:
                new = replace(action.task, capture=action.capture, epoch=action.task.epoch + 1, stopping=False)
                self.tasks[key] = new

    @rule()
    def work(self) -> None:
        """The living start what is theirs, write, and give back what they are asked for."""
        for process in self.alive.values():
            process.running &= {key.number for key, each in self.tasks.items() if each.capture == process.id}
            for key, each in self.tasks.items():
                if each.capture != process.id:
                    continue
                if each.stopping:
                    process.running.discard(each.number)
                    self.under_way.pop(each.number, None)
                    self.tasks[key] = replace(each, capture="", stopping=False)
                else:
                    process.running.add(each.number)
            self.write(process)

    @rule()
    def wake(self) -> None:
        """Suspended captures resume, if their lease lasts."""
        for process in self.zombies:
            if self.now < process.lease_end:
                self.write(process)

    def write(self, process: Process) -> None:
        """Fail when what another has sent may still arrive."""
        for number in process.running:
            writer, since = self.under_way.get(number, (process.id, 0))
            assert writer == process.id or since + GRACE <= self.now, "two write at once"
            self.under_way[number] = (process.id, self.now)

    @invariant()
    def one_at_a_time(self) -> None:
        """No sub-span is run by two whose lease lasts."""
        running = Counter(
            number
            for process in (*self.alive.values(), *self.zombies)
            if process.lease_end > self.now
            for number in process.running
        )
        assert all(count == 1 for count in running.values())


TestGroup = Group.TestCase
