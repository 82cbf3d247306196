"""Messages of a topic become rows and resolved-ts in the right order, with bounded memory, and with offsets that are safe to commit."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.errors import SyncStateDamaged, TopicDamaged
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore
from tikv_br.incremental.feed.events import Resolved, Rows
from tikv_br.incremental.kafka.group import Record, Start
from tikv_br.incremental.kafka.messages import Change, PartitionEnd, Received
from tikv_br.incremental.kafka.open_protocol import OpenCodec, UserKeys
from tikv_br.incremental.kafka.topic_feed import ReplayLimits, TopicFeed, Unapplied
from tikv_br.incremental.pipeline import Replicator
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.sorter import Sorter

CODEC = OpenCodec()
Batch = list[Received | PartitionEnd]


class FakeReader:
    """Answers polls from a list; ends the feed after the last one."""

    def __init__(self, batches: list[Batch], stop: threading.Event) -> None:
        self._batches, self._stop = iter(batches), stop

    def poll(self, seconds: float) -> Batch:
        """The next batch."""
        try:
            return next(self._batches)
        except StopIteration:
            self._stop.set()
            return []


class Log:
    """Partitions that are written to in any order, as a list of messages."""

    def __init__(self, partitions: int) -> None:
        self.ends = [0] * partitions
        self.messages: Batch = []

    def change(self, partition: int, *changes: Change) -> None:
        """Add one message with changes."""
        [message] = CODEC.encode(changes)
        self._add(partition, message.key, message.value)

    def resolve(self, partition: int, ts: int) -> None:
        """Add a resolved-ts."""
        message = CODEC.resolved(ts)
        self._add(partition, message.key, message.value)

    def _add(self, partition: int, key: bytes, value: bytes | None) -> None:
        self.messages.append(Received(partition, self.ends[partition], key, value))
        self.ends[partition] += 1

    def feed(self, stop: threading.Event, starts: dict[int, Start] | None = None, **options: object) -> TopicFeed:
        """A feed of what the partitions have from `starts` on."""
        starts = starts or {number: Start(0, end) for number, end in enumerate(self.ends)}
        left = [
            each
            for each in self.messages
            if isinstance(each, Received) and each.offset >= starts[each.partition].offset
        ]
        batches: list[Batch] = [list(left[at : at + 3]) for at in range(0, len(left), 3)]
        return TopicFeed(FakeReader(batches, stop), "t", CODEC, starts, **options)  # type: ignore[arg-type]


def put(ts: int, key: bytes = b"k", value: bytes = b"v") -> Change:
    """A change."""
    return Change(key, value, ts)


def seen(feed: TopicFeed, stop: threading.Event) -> list[tuple[str, object]]:
    """Short form of what the feed yields."""
    return [
        ("rows", sorted(event.batch["ts"].to_pylist())) if isinstance(event, Rows) else ("resolved", event.ts)
        for event in feed.events(stop)
        if isinstance(event, Rows | Resolved)
    ]


def test_the_lowest_resolved_ts_counts() -> None:
    """A resolved-ts is yielded when the last partition has reached it, after the rows up to it."""
    log, stop = Log(2), threading.Event()
    log.change(0, put(1), put(5))
    log.resolve(0, 10)
    log.change(1, put(7))
    log.resolve(1, 8)
    log.resolve(1, 12)
    assert seen(log.feed(stop), stop) == [("rows", [1, 5, 7]), ("resolved", 10)]


def test_events_at_or_below_their_partitions_resolved_ts_are_repeats() -> None:
    """Each partition ignores what its own resolved-ts covers, and the record that it starts from."""
    log, stop = Log(2), threading.Event()
    log.resolve(0, 10)
    log.change(0, put(10), put(11), put(3))
    log.change(1, put(4), put(10))
    starts = {0: Start(0, 2), 1: Start(0, 1, Record(4))}
    feed = log.feed(stop, starts)
    assert seen(feed, stop) == [("rows", [10, 11]), ("resolved", 4)]
    assert feed.repeats == 3


def test_it_ends_where_the_partitions_ended() -> None:
    """With `once`, messages after the end at the start are not waited for, except for the first resolved-ts; an end without messages counts."""
    log, stop = Log(2), threading.Event()
    log.change(0, put(1))
    starts = {0: Start(0, 1), 1: Start(5, 7)}
    batches: list[Batch] = [[log.messages[0]], [PartitionEnd(1, 7)], [PartitionEnd(1, 8)]]
    reader = FakeReader(batches, stop)
    assert seen(TopicFeed(reader, "t", CODEC, starts, once=True, resolved_seconds=0.0), stop) == [("rows", [1])]
    assert reader.poll(0) == [PartitionEnd(1, 8)]
    assert not stop.is_set()


@pytest.mark.parametrize(("until_ts", "is_trouble"), [(None, True), (4, False), (6, True)])
def test_changes_that_wait_are_not_applied(until_ts: int | None, *, is_trouble: bool) -> None:
    """A resolved-ts below all changes applies none of them; those after the wanted time are not missed."""
    log, stop = Log(1), threading.Event()
    log.resolve(0, 5)
    log.change(0, put(9))
    feed = log.feed(stop, once=True, until_ts=until_ts, resolved_seconds=0.0)
    assert ("resolved", min(until_ts or 5, 5)) in seen(feed, stop)
    assert feed.has_applied_nothing == is_trouble


def test_events_before_a_damaged_message_are_yielded() -> None:
    """The error comes after the rows and the resolved-ts before it."""
    log, stop = Log(1), threading.Event()
    log.change(0, put(1))
    log.resolve(0, 2)
    log.messages.append(Received(0, 2, None, b""))
    events = log.feed(stop).events(stop)
    assert isinstance(next(events), Rows)
    assert next(events) == Resolved(2)
    with pytest.raises(TopicDamaged, match="offset 2 of partition 0 of topic t: it has no key"):
        next(events)


def test_limits_are_those_of_the_consumer_of_tikv_cdc() -> None:
    """A single event may be above max-message-bytes; two may not."""
    stop, limits = threading.Event(), ReplayLimits(message_bytes=60)
    one, two = Log(1), Log(1)
    one.change(0, put(1, value=b"v" * 100))
    two.change(0, put(1), put(2))
    assert seen(one.feed(stop, limits=limits), stop) == [("rows", [1])]
    stop.clear()
    with pytest.raises(TopicDamaged, match="max-message-bytes=60"):
        seen(two.feed(stop, limits=limits), stop)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 8), st.integers(0, 60))
def test_no_offset_is_committed_before_its_events_are_applied(tss: list[int], limit: int, applied_ts: int) -> None:
    """Every message before the offset is applied, however few groups are remembered; with enough, it is the first that is not."""
    few, enough = Unapplied(limit), Unapplied(1000)
    for offset, ts in enumerate(tss):
        few.add(offset, ts)
        enough.add(offset, ts)
        assert len(few) <= limit + 1
    safe = next((offset for offset, ts in enumerate(tss) if ts > applied_ts), None)
    assert enough.first(applied_ts) == safe
    found = few.first(applied_ts)
    assert (found is None) == (safe is None)
    assert found is None or safe is None or found <= safe


class Target(Sink):
    """Rows as a cluster has them; the process dies after so many writes."""

    place = "here"

    def __init__(self, rows: dict[bytes, bytes], lifetime: int) -> None:
        self._rows, self._left = rows, lifetime

    def write(self, batch: object) -> None:
        """Apply a batch in the order of its rows."""
        self._left -= 1
        for row in batch.to_pylist():  # type: ignore[attr-defined]
            if row["deleted"]:
                self._rows.pop(row["key"], None)
            else:
                self._rows[row["key"]] = row["value"]
        if self._left <= 0:
            raise RuntimeError("killed")

    def close(self) -> None:
        """Nothing is open."""


class Offsets(CheckpointStore):
    """Committed offsets and their record."""

    def __init__(self, feed: TopicFeed) -> None:
        self.feed = feed
        self.saved: tuple[dict[int, int], Record] | None = None

    def claim(self) -> int:
        """Always ours."""
        return 1

    def load(self) -> Checkpoint | None:
        """Nothing."""
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        """Commit."""
        ts = checkpoint.checkpoint_ts
        self.saved = self.feed.offsets(ts), Record(self.feed.complete_up_to(ts))


class Free:
    """No safe point to hold."""

    silent_seconds = 0.0

    def check(self) -> None:
        """Never lost."""

    def advance(self, safe_point: int) -> None:
        """Nothing to do."""


def topic_of(chance: random.Random, *, resolved: bool) -> tuple[Log, dict[bytes, bytes]]:
    """Changes with repeats as restarted changefeeds send them, and the rows at the end."""
    log, rows, sent = Log(3), dict[bytes, bytes](), [list[Change]() for _ in range(3)]
    for ts in range(1, 200):
        partition, key = chance.choice([(number, b"%d-%d" % (number, chance.randrange(5))) for number in range(3)])
        change = Change(key, b"%d" % ts, ts, deleted=chance.random() < 0.2)
        if change.deleted:
            rows.pop(key, None)
        else:
            rows[key] = change.value
        sent[partition].append(change)
        log.change(partition, change)
        if chance.random() < 0.15:
            number = chance.randrange(3)
            repeated = sent[number][chance.randrange(len(sent[number]) + 1) :]
            if repeated:
                log.change(number, *repeated[:16])
                for each in repeated[16:]:
                    log.change(number, each)
        if resolved and chance.random() < 0.2:
            for number in chance.sample(range(3), 3):
                log.resolve(number, ts)
    for number in range(3 if resolved else 0):
        log.resolve(number, 200)
    return log, rows


def runs(
    log: Log, rows: dict[bytes, bytes], chance: random.Random, folder: Path, resolved_seconds: float
) -> Iterator[int]:
    """Replay until a run ends, each from the commit of the previous one; yields the number of messages of each."""
    starts = {number: Start(0, end) for number, end in enumerate(log.ends)}
    for lifetime in itertools.chain(chance.choices(range(1, 12), k=5), [1 << 30]):
        stop = threading.Event()
        feed = log.feed(stop, starts, once=True, keys=UserKeys(), resolved_seconds=resolved_seconds)
        offsets = Offsets(feed)
        with Sorter(1 << 10, folder) as sorter:
            replicator = Replicator(
                Checkpoint("", feed.start_ts, feed.start_ts, 1, 0),
                feed=feed.events(stop),
                sorter=sorter,
                sink=Target(rows, lifetime),
                checkpoints=offsets,
                safe_point=Free(),
                options=ReplicateOptions(save_every=0.0),
                stop=stop,
                clock=time.time,
            )
            with contextlib.suppress(RuntimeError):
                replicator.run()
        yield feed.messages
        if offsets.saved is not None:
            positions, record = offsets.saved
            starts = {number: Start(offset, log.ends[number], record) for number, offset in positions.items()}


@pytest.mark.parametrize("resolved", [True, False], ids=["resolved-ts", "as it arrives"])
@pytest.mark.parametrize("seed", range(12))
def test_killed_runs_lead_to_the_same_rows(seed: int, tmp_path: Path, *, resolved: bool) -> None:
    """Whatever order partitions are read in, whatever is repeated and wherever a run dies, the rows are those of the last changes."""
    chance = random.Random(seed)
    log, wanted = topic_of(chance, resolved=resolved)
    if not resolved:  # partitions are read one after the other, so that their timestamps go back
        log.messages.sort(key=lambda each: each.partition)
    found: dict[bytes, bytes] = {}
    counts = list(runs(log, found, chance, tmp_path, 10.0 if resolved else 0.0))
    assert found == wanted
    assert counts[-1] < len(log.messages)


def test_rows_beyond_the_memory_wait_on_disk(tmp_path: Path) -> None:
    """While the resolved-ts does not advance, memory is bounded; what is remembered of offsets, too."""
    log, stop = Log(1), threading.Event()
    for ts in range(1, 5001):
        log.change(0, put(ts, b"%d" % ts, b"v" * 100))
    feed = log.feed(stop)
    with Sorter(64 << 10, tmp_path) as sorter:
        for event in feed.events(stop):
            assert isinstance(event, Rows)
            sorter.add(event.batch)
            assert sorter.memory_bytes < 64 << 10
        assert sorter.disk_bytes
        assert sum(batch.num_rows for batch in sorter.take(5000)) == 5000
    assert feed.offsets(0) == {0: 0}
    assert 4000 < feed.offsets(4500)[0] <= 4500


def test_records_of_offsets() -> None:
    """A record survives; one of another program is empty, one of a later version is refused."""
    record = Record(5, "keyspace 0 of cluster 7")
    assert Record.load(record.dump(), "here") == record
    assert [Record.load(text, "here") for text in (None, "", "x", "[]", '{"ts":"x"}')] == [Record()] * 5
    with pytest.raises(SyncStateDamaged, match="version 2"):
        Record.load(json.dumps({"v": 2}), "here")
