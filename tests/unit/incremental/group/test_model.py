"""Records of a group in etcd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import msgspec.structs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.damage import FLIPS, cases
from tikv_br.cluster.etcd_values import KeyValue, absent
from tikv_br.errors import SyncStateDamaged
from tikv_br.incremental.group.model import (
    CaptureInfo,
    ChangefeedInfo,
    ChangefeedState,
    ChangefeedStatus,
    ChangefeedTask,
    GroupState,
    Keys,
    Progress,
    TaskId,
    load,
)
from tikv_br.incremental.group.store import parse
from tikv_br.records import dump

KEYS = Keys(7)
FEED = ChangefeedInfo("feed", "blackhole://", 1, b"a", b"b", start_ts=100, created_ms=5)
START, END = FEED.range.start, FEED.range.end
MIDDLE = START + b"m"


def items(**values: object) -> tuple[KeyValue, ...]:
    """Keys below the root, made one after the other; ``/`` is spelt ``__``."""
    named = [(f"{KEYS.root}{name.replace('__', '/')}", value) for name, value in values.items()]
    return tuple(
        KeyValue(key, value if isinstance(value, bytes) else dump(value), revision, revision)
        for revision, (key, value) in enumerate(named, 2)
    )


def state(**values: object) -> GroupState:
    """State according to these keys."""
    return parse(KEYS, items(**values), 99)


def builds(kind: type[object], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Values with numbers that any of its fields may have."""
    numbers = [name for name, text in kind.__annotations__.items() if text not in OTHERS]
    return st.builds(kind, **{**dict.fromkeys(numbers, st.integers(1, 9999)), **fields})


OTHERS = {"str", "bool", "Hex", "ChangefeedState", "records.Later[str]", "records.Later[tuple[str, ...]]"}
VALUES = st.one_of(
    *map(builds, (CaptureInfo, Progress, ChangefeedStatus)),
    builds(ChangefeedInfo, state=st.sampled_from(ChangefeedState), start_key=st.binary(), end_key=st.binary()),
    builds(ChangefeedTask, start=st.binary(), end=st.binary()),
)


@given(VALUES)
def test_values_come_back(value: object) -> None:
    """Whatever is written is read as it was, and a flipped byte is noticed."""
    kept = KeyValue("key", dump(value), 1, 1)
    assert load(type(value), kept) == value
    with pytest.raises(SyncStateDamaged, match="key"):
        load(type(value), msgspec.structs.replace(kept, value=kept.value.replace(b'"content"', b'"kontent"')))


def test_a_group_from_its_keys() -> None:
    """Each key lands where it belongs; the first candidate is the owner; unknown keys are of a later version."""
    found = state(
        owner__b=b"b",
        owner__a=b"a",
        capture__a=CaptureInfo("a", "", 1, "1"),
        changefeed__feed=structs.replace(FEED, state=ChangefeedState.PAUSED),
        task__feed__0001=ChangefeedTask("feed", 1, MIDDLE, END),
        task__feed__0000=ChangefeedTask("feed", 0, START, MIDDLE, "a", 3),
        progress__feed__0000=Progress("feed", 0, 120, 130, 3, "a", 1),
        novelty__x=b"?",
    )
    assert (found.owner, list(found.captures), found.changefeeds["feed"].state) == ("b", ["a"], ChangefeedState.PAUSED)
    assert [task.start for task in found.tasks_of("feed")] == [START, MIDDLE]
    assert found.progress[TaskId("feed", 0)].checkpoint_ts == 120
    assert found.unchanged(KEYS.of("status", "feed")) == absent(KEYS.of("status", "feed"))
    assert found.still_there(KEYS.of("owner", "b")).revision == 2
    assert state().owner == ""


@pytest.mark.parametrize(
    "odd",
    [
        {"changefeed__bad": b"?"},
        {"status__bad": b""},
        {"task__bad__0000": b"{}"},
        {"task__bad__0000": ChangefeedTask("bad", 1, START, END)},
        {"task__bad__x": ChangefeedTask("bad", 1, START, END)},
        {"task__bad__0000": ChangefeedTask("feed", 0, START, END)},
        {"progress__bad__0000": dump(Progress("bad", 0, 1, 1, 1, "a", 1))[:-1]},
        {"progress__bad__0000": Progress("bad", 1, 1, 1, 1, "a", 1)},
        {"status__bad": ChangefeedStatus("feed", 1, 1, 1, "a")},
        {"changefeed__bad": FEED},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_a_damaged_value_costs_its_own_changefeed(odd: dict[str, object]) -> None:
    """A damaged value affects only its own changefeed, which reports just the damage."""
    sound = {"changefeed__feed": FEED, "task__feed__0000": ChangefeedTask("feed", 0, START, END)}
    bad = {
        "changefeed__bad": structs.replace(FEED, id="bad"),
        "task__bad__0001": ChangefeedTask("bad", 1, START, END),
        "status__bad": ChangefeedStatus("bad", 1, 1, 1, "a"),
    }
    found = state(**sound, **{**bad, **odd})
    assert list(found.damaged) == ["bad"]
    assert next(iter(odd)).replace("__", "/") in found.damaged["bad"]
    assert (list(found.changefeeds), list(found.tasks), found.statuses, found.progress) == (
        ["feed"],
        [TaskId("feed", 0)],
        {},
        {},
    )


def group(reached: int) -> dict[str, bytes]:
    """The values of a group with two changefeeds of two tasks each that have come so far."""
    values: dict[str, object] = {KEYS.of("capture", "a"): CaptureInfo("a", "", 1, "1")}
    values[KEYS.of("capture", "b")] = CaptureInfo("b", "", 1, "1")
    for far, name in enumerate(("feed", "other")):
        values[KEYS.of("changefeed", name)] = structs.replace(FEED, id=name, created_ms=reached)
        values[KEYS.of("status", name)] = ChangefeedStatus(name, reached + far, reached + far, 1, "a")
        for number in (0, 1):
            task = ChangefeedTask(name, number, START + b"%d" % number, START + b"%d" % (number + 1), "a", reached)
            values[KEYS.of("task", task.id)] = task
            ts = reached + 100 * far + 10 * number
            values[KEYS.of("progress", task.id)] = Progress(name, number, ts, ts, 1, "a", 1)
    return {key: dump(value) for key, value in values.items()}


def read(values: Mapping[str, bytes | None]) -> GroupState:
    """State that a group reads from them."""
    there = [(key, data) for key, data in values.items() if data is not None]
    return parse(KEYS, tuple(KeyValue(key, data, at, at) for at, (key, data) in enumerate(there, 2)), 99)


def test_no_damage_moves_a_checkpoint_forward() -> None:
    """Whichever value is damaged, swapped, older or missing: other changefeeds are unaffected, and no change is skipped."""
    objects, seen = group(1000), set()
    sound = read(objects)
    for case in cases(objects, group(900), lambda _kind: FLIPS):
        seen.add((case.kind, case.damage))
        found = read({**objects, **case.change})
        touched = {key.split("/")[4] for key in case.change}
        for name in {"feed", "other"} & found.changefeeds.keys():
            assert found.checkpoint_ts(name) <= sound.checkpoint_ts(name), str(case)
        if case.kind == "etcd capture":
            assert found.captures.keys() == sound.captures.keys() - (touched if case.damage == "missing" else set())
        elif case.damage not in {"missing", "older"}:
            assert touched >= found.damaged.keys() != set(), str(case)
            assert any(key in text for key in case.change for text in found.damaged.values()), str(case)
            assert not found.damaged.keys() & {task.changefeed for task in found.tasks}
        else:
            assert not found.damaged, str(case)
    assert len(seen) == 5 * 7 - 1  # a capture of before is the same


def test_a_damaged_capture_is_there_all_the_same() -> None:
    """Its key stands by its lease: to take it for dead would give its tasks to another while it writes."""
    found = state(capture__a=b"?", capture__b=CaptureInfo("a", "", 1, "1"))
    assert {name: info.id for name, info in found.captures.items()} == {"a": "a", "b": "b"}
    assert found.captures["a"].write_timeout_ms == 30_000


def test_the_checkpoint_of_a_changefeed() -> None:
    """It is the least of all its tasks, the start before they all have one, and never less than the owner has said."""
    tasks = {
        "task__feed__0000": ChangefeedTask("feed", 0, START, MIDDLE),
        "task__feed__0001": ChangefeedTask("feed", 1, MIDDLE, END),
    }
    first = {"progress__feed__0000": Progress("feed", 0, 120, 130, 1, "a", 1)}
    both = {**first, "progress__feed__0001": Progress("feed", 1, 110, 140, 1, "a", 1)}
    reported = {"status__feed": ChangefeedStatus("feed", 115, 115, 1, "a")}
    for more, reached in (
        ({}, 100),
        (first, 100),
        (both, 110),
        ({**both, **reported}, 115),
        ({**first, **reported}, 115),
    ):
        assert state(changefeed__feed=FEED, **tasks, **more).checkpoint_ts("feed") == reached


@pytest.mark.parametrize("keyspace_id", [0, 5])
def test_the_range_is_of_its_keyspace(keyspace_id: int) -> None:
    """The span of a changefeed has the prefix of its keyspace, also where it has no end."""
    whole = structs.replace(FEED, keyspace_id=keyspace_id, start_key=b"", end_key=b"").range
    assert whole.start == b"r" + keyspace_id.to_bytes(3)
    assert whole.end == b"r" + (keyspace_id + 1).to_bytes(3)


@pytest.mark.parametrize(
    "changed",
    [
        {"start_ts": 0},
        {"keyspace_id": 1 << 24},
        {"start_ts": 1 << 63},
        {"created_ms": 1 << 60},
        {"spans": 0},
        {"batch_rows": 0},
        {"concurrency": 0},
        {"gc_ttl": 1 << 62},
        {"backoff_ms": 1 << 62},
        {"hold_back_ms": 1 << 62},
        {"patience_ms": 1 << 62},
        {"sorter_bytes": 1 << 62},
        {"rate_limit": 1 << 62},
    ],
    ids=str,
)
def test_numbers_that_no_program_can_work_with(changed: dict[str, Any]) -> None:
    """The changefeed is stopped; others are not."""
    good = structs.replace(FEED, id="good")
    found = state(changefeed__feed=structs.replace(FEED, **changed), changefeed__good=good)
    assert set(found.damaged) == {"feed"}
    assert set(found.changefeeds) == {"good"}


@pytest.mark.parametrize("checkpoint_ts", [0, 1 << 63])
def test_checkpoints_that_are_no_timestamps(checkpoint_ts: int) -> None:
    """0 - 1 would be the safe point of the changefeed."""
    status = ChangefeedStatus("feed", checkpoint_ts, 5, 5, "one")
    progress = Progress("feed", 0, checkpoint_ts, 5, 1, "one", 5)
    for forged in ({"status__feed": status}, {"progress__feed__0000": progress}):
        assert set(state(changefeed__feed=FEED, **forged).damaged) == {"feed"}


@pytest.mark.parametrize("number", ["²", "9" * 5000, "1", "00001", "-001", "x"])
def test_keys_that_no_task_has(number: str) -> None:
    """A second key of a task, and one that is no number, stop its changefeed and no others."""
    task = ChangefeedTask("feed", 1, FEED.range.start, FEED.range.end)
    found = state(
        changefeed__feed=FEED,
        changefeed__good=structs.replace(FEED, id="good"),
        **{f"task__feed__{number}": task},
    )
    assert (set(found.damaged), set(found.changefeeds)) == ({"feed"}, {"good"})


@pytest.mark.parametrize(
    ("start", "end"), [(b"", b""), (b"r\0\0\2", b"r\0\0\3"), (b"r\0\0\3", b"r\0\0\2"), (FEED.range.start, b"r\0\0\2")]
)
def test_task_outside_of_its_changefeed(start: bytes, end: bytes) -> None:
    """It would send rows of other keyspaces to the sink."""
    found = state(changefeed__feed=FEED, task__feed__0000=ChangefeedTask("feed", 0, start, end))
    assert "not within the range" in found.damaged["feed"]
    assert not found.tasks


@pytest.mark.parametrize("name", ["../other", "", "a/b", "x" * 200, "a\x1b[2J"])
def test_names_that_no_changefeed_can_have(name: str) -> None:
    """They are nobody's."""
    found = parse(KEYS, (KeyValue(f"{KEYS.root}changefeed/{name}", dump(structs.replace(FEED, id=name)), 2, 2),), 9)
    assert not found.changefeeds
