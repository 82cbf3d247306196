from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.incremental.changes import Change, batch, changes
from tests.unit.incremental.fake_source import FakeSource
from tikv_br.cluster.timestamps import compose
from tikv_br.errors import (
    ClusterUnreachable,
    RequestRefused,
    RetryBudgetExhausted,
    SafePointError,
    StorageUnreachable,
    SyncFenced,
)
from tikv_br.incremental.checkpoint import Checkpoint, CheckpointStore, ObjectCheckpoints
from tikv_br.incremental.feed.events import Resolved, Rows
from tikv_br.incremental.pipeline import Replicator
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.sorter import Sorter
from tikv_br.incremental.status import MAX_SAMPLES, Rate, WriteLag
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
START = 1000


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it and go on."""


class Target(Sink):
    """Keeps what arrives, in order, and fails on demand."""

    place = "a test"

    def __init__(self) -> None:
        self.arrived: list[Change] = []
        self.last: dict[bytes, Change] = {}
        self.fail: list[BaseException | None] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Apply row by row: a failure comes in the middle."""
        failure = self.fail.pop(0) if self.fail else None
        taken = changes([rows])
        for row in taken[: len(taken) // 2] if failure else taken:
            self.arrived.append(row)
            self.last[row.key] = row
        if failure:
            raise failure

    def close(self) -> None:
        """Nothing to do."""

    def state(self) -> dict[bytes, bytes]:
        """The live rows."""
        return {key: row.value for key, row in self.last.items() if not row.deleted}


class Guard:
    """A safe point that remembers."""

    def __init__(self) -> None:
        self.points = [START - 1]
        self.lost: SafePointError | None = None
        self.silent_seconds = 0.0

    def check(self) -> None:
        """See `SafePoint.check`."""
        if self.lost:
            raise self.lost

    def advance(self, safe_point: int) -> None:
        """See `SafePoint.advance`."""
        self.points.append(safe_point)


class Sync:
    """A sync that can be started again and again on the same state and target."""

    def __init__(self, tmp_path: Path) -> None:
        self.store: ObjectStore = open_store(parse(f"local://{tmp_path}/state"))
        self.scratch = tmp_path
        self.target = Target()
        self.guard = Guard()
        self.stack = contextlib.ExitStack()

    def checkpoint(self) -> int:
        """The checkpoint that a restart would find."""
        found = ObjectCheckpoints(self.store, "one").load()
        return START if found is None else found.checkpoint_ts

    def replicator(
        self,
        feed: Iterable[Rows | Resolved],
        save_every: float = 0.0,
        patience: float = 5.0,
        state_patience: float = 60.0,
        rate_limit: int = 0,
    ) -> Replicator:
        """One process's worth of it."""
        checkpoints = ObjectCheckpoints(self.store, "one")
        self.stop = threading.Event()
        epoch = checkpoints.claim()
        return Replicator(
            Checkpoint("one", self.checkpoint(), 0, epoch, 0),
            feed=feed,
            sorter=self.stack.enter_context(Sorter(100_000, self.scratch)),
            sink=self.target,
            checkpoints=checkpoints,
            safe_point=self.guard,
            options=ReplicateOptions(save_every, patience, state_patience, rate_limit=rate_limit),
            stop=self.stop,
            clock=time.time,
        )


def test_the_lag_of_writes_counts_from_their_arrival() -> None:
    """A timestamp may be 3 s older than its write; what came later than that has been delayed on its way."""
    now = [1000.0]
    lag = WriteLag(clock=lambda: now[0])
    assert lag.value() is None
    for number, (arrived, age) in enumerate(((1000.0, 2.9), (1000.2, 0.1), (1000.4, 103.0))):  # the last by 100 s
        now[0] = arrived
        lag.record_arrival(compose(round(1000 * (arrived - age)), number))
        lag.record_arrival(compose(1, 1))  # of the same moment: not followed
    now[0] = 1000.5
    assert lag.value() == pytest.approx(100.1)  # nothing is acknowledged, the oldest has waited
    lag.record_confirmed(compose(1000 * 998))
    assert lag.value() == pytest.approx((0.5 + 100.1) / 2)  # of the first and the last
    now[0] = 1001.0
    lag.record_confirmed(compose(1000 * 1001))
    assert lag.value() == pytest.approx(0.8)  # the median of 0.5, 100.1 and 0.8
    now[0] = 1011.5
    assert lag.value() is None


def test_the_lag_of_writes_is_bounded_in_memory() -> None:
    """While nothing is acknowledged samples are thinned out, and the oldest stays."""
    now = [1000.0]
    lag = WriteLag(clock=lambda: now[0])
    for _ in range(5000):
        lag.record_arrival(compose(round(1000 * now[0])))
        now[0] += 1.0
    assert lag.value() == pytest.approx(5000)
    assert len(lag._pending) <= MAX_SAMPLES


@pytest.fixture
def sync(tmp_path: Path) -> Iterator[Sync]:
    """A sync without state."""
    sync = Sync(tmp_path)
    with sync.stack:
        yield sync


def check_history(source: FakeSource, target: Target, checkpoints: list[tuple[int, int]]) -> None:
    """Fail if a key went back behind a checkpoint, or took a value that the source never had.

    ``checkpoints`` are pairs: how many rows had arrived, and the checkpoint saved then.
    """
    written = set(source.history)
    floors: dict[bytes, int] = {}
    saved = iter([*checkpoints, (len(target.arrived) + 1, 0)])
    at, checkpoint = next(saved)
    for number, row in enumerate(target.arrived):
        while number >= at:
            for old in source.history:
                if old.ts <= checkpoint:
                    floors[old.key] = old.ts
            at, checkpoint = next(saved)
        assert row in written
        assert row.ts >= floors.get(row.key, 0), "an older value came back after the checkpoint had passed it"


@pytest.mark.parametrize("seed", SEEDS[1:3])
def test_no_kill_loses_a_change_or_turns_a_key_back(sync: Sync, seed: int) -> None:
    """Thirty kills at random moments, at the sink, in the feed and between: the histories hold and the states agree."""
    source = FakeSource(seed)
    saved: list[tuple[int, int]] = []

    def mortal(feed: Iterator[Rows | Resolved], lifetime: int) -> Iterator[Rows | Resolved]:
        for number, event in enumerate(feed):
            if number == lifetime:
                raise Killed
            yield event
            saved.append((len(sync.target.arrived), sync.checkpoint()))

    for life in range(30):
        before = sync.checkpoint()
        sync.target.fail = [None] * source.random.randrange(8) + [Killed()] if life % 2 else []
        feed = mortal(source.feed(before, rounds=6), source.random.randrange(1, 80))
        with contextlib.suppress(Killed):
            sync.replicator(feed, save_every=source.random.choice([0, 0.001, 99])).run()
        assert sync.checkpoint() >= before
    sync.target.fail = []
    sync.replicator(source.feed(sync.checkpoint(), rounds=3)).run()
    assert sync.target.state() == source.state()
    assert sync.checkpoint() == source.ts
    check_history(source, sync.target, saved)


@pytest.mark.parametrize("seed", SEEDS)
def test_undisturbed_each_key_has_its_history_in_order(sync: Sync, seed: int) -> None:
    """Without kills every key's rows arrive by rising ts, none twice, and the safe point follows the checkpoint."""
    source = FakeSource(seed)
    replicator = sync.replicator(source.feed(START, rounds=20), save_every=0.02)
    replicator.run()
    last: dict[bytes, int] = {}
    for row in sync.target.arrived:
        assert row.ts > last.get(row.key, 0)
        last[row.key] = row.ts
    assert sync.target.state() == source.state()
    assert sync.guard.points == sorted(sync.guard.points)
    assert sync.guard.points[-1] == sync.checkpoint() - 1 == source.ts - 1
    status = replicator.status()
    assert status.checkpoint_ts == status.resolved_ts == source.ts
    assert status.events >= len(source.history) >= status.written > 0
    assert (status.late_rows, status.sink_failures, status.sorter_disk_bytes) == (0, 0, 0)


def test_the_checkpoint_waits_for_the_sink(sync: Sync) -> None:
    """While a batch is refused nothing is confirmed; the same batch comes again until it is there."""
    away = [ClusterUnreachable("away"), RetryBudgetExhausted("busy"), None]
    sync.target.fail = list(away)
    replicator = sync.replicator([Rows(batch([Change(1001, b"a", b"1"), Change(1002, b"b", b"2")])), Resolved(1005)])
    replicator.run()
    assert sync.checkpoint() == 1005
    assert sync.target.state() == {b"a": b"1", b"b": b"2"}
    assert replicator.status().sink_failures == 2
    assert (replicator.status().sink_failing_seconds, replicator.status().last_error) == (0, "busy")


def test_a_sink_that_refuses_ends_it_and_confirms_nothing(sync: Sync) -> None:
    """An error for good comes out as it is; the checkpoint stays before the batch."""
    sync.target.fail = [None, RequestRefused("no")]
    one, two = Rows(batch([Change(1001, b"a", b"1")])), Rows(batch([Change(1003, b"b", b"2")]))
    with pytest.raises(RequestRefused):
        sync.replicator([one, Resolved(1002), two, Resolved(1005)], save_every=99).run()
    assert sync.checkpoint() == 1002


def test_patience_ends(sync: Sync) -> None:
    """A sink that stays away ends the sync once its time is over."""
    sync.target.fail = [ClusterUnreachable("away")] * 10
    rows = Rows(batch([Change(1001, b"a", b"1")]))
    with pytest.raises(ClusterUnreachable):
        sync.replicator([rows, Resolved(1002)], patience=0.0).run()
    assert sync.checkpoint() == START


def test_the_outage_of_a_sink_includes_its_own_retries(sync: Sync) -> None:
    """The outage counts from the start of the failed write, not from its end."""

    class Slow(Target):
        def write(self, rows: pa.RecordBatch) -> None:
            threading.Event().wait(0.2)
            raise ClusterUnreachable("away")

    sync.target = Slow()
    replicator = sync.replicator([Rows(batch([Change(1001, b"a", b"1")])), Resolved(1002)], patience=99)
    runner = threading.Thread(target=replicator.run)
    runner.start()
    while not (failing := replicator.status().sink_failing_seconds):
        assert runner.is_alive()
        threading.Event().wait(0.001)
    sync.stop.set()
    runner.join(60)
    assert failing >= 0.2


def changes_of(count: int, value: bytes) -> Rows:
    """Changes of as many keys, from the first ts on."""
    return Rows(batch([Change(START + 1 + n, b"%06d" % n, value) for n in range(count)]))


def test_a_rate_limit_bounds_what_the_sink_is_given(sync: Sync) -> None:
    """No second exceeds the limit plus a credit of one second; all rows arrive in order, and the status names the limit."""
    given: list[tuple[float, int]] = []

    class Clocked(Target):
        def write(self, rows: pa.RecordBatch) -> None:
            given.append((time.monotonic(), sum(map(len, rows["key"].to_pylist() + rows["value"].to_pylist()))))
            super().write(rows)

    sync.target, rate = Clocked(), 20_000
    replicator = sync.replicator([changes_of(600, bytes(94)), Resolved(START + 600)], rate_limit=rate)
    replicator.run()
    begin, total = given[0][0], sum(size for _, size in given)
    assert total == 600 * 100
    assert all(size <= rate / 4 for _, size in given)
    done = 0
    for at, size in given:
        done += size
        assert done <= rate * (at - begin + 1.3)
    assert [row.key for row in sync.target.arrived] == [b"%06d" % n for n in range(600)]
    assert sync.checkpoint() == START + 600
    status = replicator.status()
    assert status.sink_rate_limit == rate
    assert 0 < status.sink_limited_share <= 1


def test_a_row_larger_than_the_limit_s_portion_goes_alone(sync: Sync) -> None:
    """It is not refused, and the wait for it ends with the sync."""
    rows = Rows(
        batch([Change(START + 1, b"a", b"1"), Change(START + 2, b"b", bytes(1 << 20)), Change(START + 3, b"c", b"3")])
    )
    replicator = sync.replicator([rows, Resolved(START + 3)], rate_limit=1024)
    runner = threading.Thread(target=replicator.run)
    runner.start()
    while not (sync.target.last and replicator.status().sink_limited_share):
        assert runner.is_alive()
        time.sleep(0.001)
    sync.stop.set()
    runner.join(60)
    assert not runner.is_alive()
    assert list(sync.target.last) == [b"a"]


def test_stop_saves_what_is_confirmed(sync: Sync) -> None:
    """A stop, also during an outage of the sink, ends cleanly with the checkpoint of what has arrived."""

    def endless() -> Iterator[Rows | Resolved]:
        ts = START
        while True:
            ts += 1
            yield Rows(batch([Change(ts, b"k", b"%d" % ts)]))
            yield Resolved(ts)
            if ts == START + 50:
                sync.target.fail = [ClusterUnreachable("away")] * 100

    replicator = sync.replicator(endless(), save_every=99, patience=99)
    runner = threading.Thread(target=replicator.run)
    runner.start()
    while not replicator.status().sink_failing_seconds:
        assert runner.is_alive()
        threading.Event().wait(0.01)
    sync.stop.set()
    runner.join(60)
    assert not runner.is_alive()
    assert sync.checkpoint() == START + 50
    assert sync.target.last[b"k"].ts == START + 50


class Flaky(CheckpointStore):
    """A storage that does not answer some saves."""

    def __init__(self, store: CheckpointStore, failures: int) -> None:
        self._store, self.failures = store, failures

    def claim(self) -> int:
        """See `CheckpointStore.claim`."""
        return self._store.claim()

    def load(self) -> Checkpoint | None:
        """See `CheckpointStore.load`."""
        return self._store.load()

    def save(self, checkpoint: Checkpoint) -> None:
        """See `CheckpointStore.save`."""
        if self.failures:
            self.failures -= 1
            raise StorageUnreachable("no answer")
        self._store.save(checkpoint)


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_storage_that_is_away_for_a_while_is_waited_for(
    sync: Sync, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written until the checkpoint is saved; after its patience the sync ends with what the storage said."""
    monkeypatch.setattr("tikv_br.incremental.pipeline.SAVE_RETRY_SECONDS", 0.01)
    first, second = (Rows(batch([Change(ts, b"a", b"%d" % ts)])) for ts in (1001, 1002))
    replicator = sync.replicator([first, Resolved(1001), second, Resolved(1002)], state_patience=patience)
    replicator._checkpoints = Flaky(replicator._checkpoints, 3)
    if patience:
        replicator.run()
        assert sync.checkpoint() == 1002
        return
    with pytest.raises(StorageUnreachable):
        replicator.run()
    assert [row.ts for row in sync.target.arrived] == [1001]


def test_a_lost_safe_point_ends_it(sync: Sync) -> None:
    """Nothing is written once GC may have passed."""
    sync.guard.lost = SafePointError("gone")
    with pytest.raises(SafePointError):
        sync.replicator([Rows(batch([Change(1001, b"a", b"1")])), Resolved(1002)]).run()
    assert sync.target.arrived == []


def test_a_replaced_sync_stops(sync: Sync) -> None:
    """After another process has claimed the sync, this one ends and its safe point stays."""

    def feed() -> Iterator[Rows | Resolved]:
        yield Resolved(1002)
        ObjectCheckpoints(sync.store, "one").claim()
        yield Resolved(1003)

    with pytest.raises(SyncFenced):
        sync.replicator(feed()).run()
    assert sync.checkpoint() == 1002
    assert sync.guard.points == [START - 1, 1001]


def test_the_rate_is_of_the_last_while() -> None:
    """Events long ago do not count."""
    now = [0.0]
    rate = Rate(lambda: now[0])
    for second in range(1, 31):
        now[0] = second
        rate.record(min(second, 10) * 100)
    assert rate.value(1000) == 0
    now[0] = 31
    assert 0 < rate.value(1100) < 20
    rate.record(1100)
    now[0] = 1000
    assert rate.value(1100) == 0
