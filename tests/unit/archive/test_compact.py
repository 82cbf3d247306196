"""Compaction of logs: the same rows and inexact times before and after, also with failures."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.archive.samples import CODEC, LOG, START, STEP, WHOLE, describe, rows_of, start, store_at, write_log
from tests.unit.incremental.changes import Change, batch
from tikv_br.archive.compact import CompactionOptions, compact, plan_chunks
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import DAY_SECONDS, acquire_lock, plan_clean_up, plan_truncation, remove
from tikv_br.archive.records import InexactPeriod
from tikv_br.archive.writer import FlushOptions, LogWriter
from tikv_br.backupset.sealed import write_record
from tikv_br.errors import BackupNotFound, LeaseHeld, LogDamaged, TikvBrError, UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, StepFinished, StepStarted
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import Crypter, SecretText

KEYS = 8


def key_of(number: int) -> bytes:
    """One of the keys of a log."""
    return b"key%d" % number


def keys(first: int, end: int) -> KeyRange:
    """The keys from one number to another; the outermost have no bound."""
    return CODEC.rpc_range(KeyRange(key_of(first) if first else b"", key_of(end) if end < KEYS else b""))


def options_of(store: ObjectStore, **changes: object) -> CompactionOptions:
    """A compaction on this thread, by default with nothing kept that is replaced."""
    wanted = CompactionOptions(store.location, LOG, executor="driver", concurrency=1, grace=0.0)
    return structs.replace(wanted, **changes)


class Model:
    """A log that several processes write, which are started again, get rows late or twice, and see interruptions."""

    def __init__(self, store: ObjectStore, chance: random.Random) -> None:
        self.store = store
        self.chance = chance
        self.written: list[Change] = []
        self.ts = START
        description = describe(has_checkpoint=False)
        cut = chance.choice([0, 0, 3])
        self.spans = [keys(0, cut), keys(cut, KEYS)] if cut else [WHOLE]
        self.writers = [self._writer(span) for span in self.spans]
        start(store, description)
        for writer in self.writers:
            writer.start(START)

    def _writer(self, span: KeyRange) -> LogWriter:
        size = self.chance.choice([1, 1 << 20])  # a file per batch, or per segment
        return LogWriter(self.store, describe(has_checkpoint=False), span, FlushOptions(interval=1e9, size=size))

    def grow(self, steps: int) -> None:
        """Write segments."""
        for _ in range(steps):
            for at, span in enumerate(self.spans):
                if self.chance.random() < 0.15:  # killed: it writes again what follows its checkpoint
                    self.writers[at] = self._writer(span)
                    self.writers[at].start(max(START, self.ts - STEP))
                self._step(self.writers[at], span)
            self.ts += STEP

    def _step(self, writer: LogWriter, span: KeyRange) -> None:
        chance = self.chance
        here = [
            number
            for number in range(KEYS)
            if span.start <= CODEC.rpc_key(key_of(number))
            and (not span.end or CODEC.rpc_key(key_of(number)) < span.end)
        ]
        new = [
            Change(
                ts=self.ts + 1 + chance.randrange(STEP),
                key=key_of(chance.choice(here)),
                value=b"v" * chance.choice([1, 40]),
                expire_ts=chance.choice([0, 0, 77]),
                deleted=chance.random() < 0.2,
            )
            for _ in range(chance.randrange(4))
        ]
        new = [as_stored(each) for each in new]
        if chance.random() < 0.3:  # a row that arrives late
            new.append(
                Change(max(START + 1, self.ts - chance.randrange(3 * STEP)), key_of(chance.choice(here)), b"late")
            )
        known = {(each.key, each.ts) for each in self.written}
        new = [
            each for each in {(each.key, each.ts): each for each in new}.values() if (each.key, each.ts) not in known
        ]
        self.written += new
        again = [
            each
            for each in self.written
            if each.ts > writer.flushed_ts and each.ts <= self.ts and each.key in map(key_of, here)
        ]
        for each in (again, new, chance.sample(new, len(new) // 2)):
            if each:
                writer.append(batch(each))
        if chance.random() < 0.2:
            since = max(START, self.ts - chance.randrange(2 * STEP))
            writer.mark_inexact(InexactPeriod(span.start, span.end, since, self.ts + chance.randrange(1, STEP)))
        writer.flush(self.ts + STEP)

    def log(self) -> LogArchive:
        """The log as it is now."""
        return LogArchive.open(self.store, LOG)


def as_stored(change: Change) -> Change:
    """A tombstone has neither value nor expiry."""
    return change._replace(value=b"", expire_ts=0) if change.deleted else change


def questions(chance: random.Random, until: int) -> list[tuple[KeyRange, int, int]]:
    """Random spans and times of a log, and all of it."""
    found = [(WHOLE, START, until)]
    for _ in range(6):
        first, end = sorted(chance.sample(range(KEYS + 1), 2))
        after, up_to = sorted(chance.sample(range(START, until + 1), 2))
        found.append((keys(first, end), after, up_to))
    return found


def answers(log: LogArchive, asked: Sequence[tuple[KeyRange, int, int]]) -> list[object]:
    """Answers of a log to a reader."""
    spans = [[span] for span, _, _ in asked]
    return [
        [rows_of(log, *each) for each in asked],
        [log.inexact_windows(each) for each in spans],
        (log.damage, log.gaps(), log.start_ts, log.end_ts()),
    ]


@settings(max_examples=settings().max_examples // 4)  # each takes half a second or more
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([60, 300, 1 << 20]), st.booleans())
@example(2147483647, 10, 60, False)  # a late row in the middle of a new segment, whose time an older one covers too
def test_a_compaction_changes_no_answer(seed: int, steps: int, task_bytes: int, keeps: bool) -> None:
    """Rows, inexact times, gaps and bounds stay the same for any keys and times, also after a second compaction."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(store_at(Path(folder)), chance)
        for _ in range(2):
            model.grow(steps)
            asked = questions(chance, model.ts)
            before = model.log()
            expected = answers(before, asked)
            written = {(each.key, each.ts, each.value, each.expire_ts, each.deleted) for each in model.written}
            assert rows_of(before, WHOLE, START, model.ts) == written
            wanted = options_of(
                model.store,
                task_bytes=task_bytes,
                file_bytes=task_bytes // 3,
                grace=DAY_SECONDS if keeps else 0.0,
                until_ts=chance.choice([0, START + chance.randrange(model.ts - START)]),
            )
            done = compact(wanted)
            after = model.log()
            assert answers(after, asked) == expected
            assert len(after.segments) == len(before.segments) - done.segments + done.new_segments
            assert bool(after.replaced) == (keeps and any(each.replaces for each in after.segments))
            if not keeps:
                listed = {file.name for each in after.segments for file in each.files}
                assert {info.name for info in model.store.list(f"{LOG}/data")} == listed


def names(store: ObjectStore, folder: str) -> set[str]:
    """The objects in a folder of a log."""
    return {info.name for info in store.list(f"{LOG}/{folder}".rstrip("/"))}


def test_files_follow_each_other_in_key_order(tmp_path: Path) -> None:
    """One segment of files that do not overlap and are about as large as wanted; a reader of few keys needs one."""
    store = store_at(tmp_path)
    write_log(store)
    total = sum(file.total_bytes for each in LogArchive.open(store, LOG).segments for file in each.files)
    done = compact(options_of(store, file_bytes=total // 5))
    log = LogArchive.open(store, LOG)
    (found,) = log.segments
    ranges = [file.key_range for file in found.files]
    assert (found.from_ts, found.to_ts, len(ranges)) == (START, START + 6 * STEP, 5)
    assert all(one.start < other.start and one.end <= other.end for one, other in pairwise(ranges))
    assert all(abs(file.total_bytes - total / 5) < total / 20 for file in found.files)
    assert len(log.files_for(CODEC.rpc_range(KeyRange(b"key001", b"key002")), START, log.end_ts())) == 1
    for file in found.files:
        rows = [row for part in log.rows(file) for row in part.to_pylist()]
        assert rows == sorted(rows, key=lambda row: (row["key"], -row["ts"]))
    assert (done.segments, done.files, done.rows, done.new_segments, done.new_files) == (6, 6, 300, 1, 5)
    assert (done.duplicate_rows, done.removed_segments, done.removed_files) == (0, 6, 6)


def test_large_segments_of_a_compaction_are_left_alone(tmp_path: Path) -> None:
    """Each row is rewritten few times, and the same command twice does nothing the second time."""
    store = store_at(tmp_path)
    write_log(store)
    log = LogArchive.open(store, LOG)
    size = sum(file.total_bytes for file in log.segments[0].files)
    assert [len(chunk.segments) for chunk in plan_chunks(log, 0, 3 * size)] == [3, 3]
    assert [len(chunk.segments) for chunk in plan_chunks(log, START + 5 * STEP, 3 * size)] == [3, 2]
    compact(options_of(store, task_bytes=3 * size, until_ts=START + 5 * STEP))
    times = [(each.from_ts, each.to_ts) for each in LogArchive.open(store, LOG).segments]
    assert times == [(START, START + 30), (START + 30, START + 50), (START + 50, START + 60)]
    assert compact(options_of(store, task_bytes=3 * size)).segments == 0
    plan = plan_truncation(LogArchive.open(store, LOG), START + 40)
    assert [name.split("/")[-1][:33] for name in plan.segments] == [f"{START:016x}-{START + 30:016x}"]


def test_replaced_segments_stay_for_a_day(tmp_path: Path) -> None:
    """Restores that have chosen their files can read them; no other reader does, and truncation knows them."""
    store = store_at(tmp_path)
    write_log(store)
    old = LogArchive.open(store, LOG)
    chosen = old.files_for(WHOLE, START, old.end_ts())
    done = compact(options_of(store, grace=DAY_SECONDS))
    assert (done.segments, done.removed_segments, done.removed_files) == (6, 0, 0)
    log = LogArchive.open(store, LOG)
    assert (len(log.segments), log.replaced) == (1, old.segments)
    assert old.verify_files(chosen, whole=True) == []
    assert {file.name for file in log.files_for(WHOLE, START, log.end_ts())} == {
        file.name for file in log.segments[0].files
    }
    written = log.segments[0].written_ms / 1000
    assert plan_clean_up(log, now=written + DAY_SECONDS - 1).segments == ()
    later = written + DAY_SECONDS + 1
    for plan in (plan_clean_up(log, now=later), plan_truncation(log, START + 1, now=later)):
        assert set(plan.segments) == {each.name for each in old.segments}
        assert set(plan.files) == {file.name for file in chosen}
    early = plan_truncation(log, START + 20)
    assert set(early.segments) == {each.name for each in old.segments[:2]}
    remove(log, plan)
    assert names(store, "segments") == {log.segments[0].name}
    assert LogArchive.open(store, LOG).replaced == ()


def test_a_new_segment_that_is_damaged_replaces_nothing(tmp_path: Path) -> None:
    """As long as the old ones are there."""
    store = store_at(tmp_path)
    write_log(store)
    expected = rows_of(LogArchive.open(store, LOG), WHOLE, START, START + 60)
    compact(options_of(store, grace=DAY_SECONDS))
    (new,) = LogArchive.open(store, LOG).segments
    store.delete(new.files[0].name)
    log = LogArchive.open(store, LOG)
    assert [each.name for each in log.damage] == [new.files[0].name]
    assert (len(log.segments), log.replaced, log.gaps()) == (6, (), [])
    assert rows_of(log, WHOLE, START, START + 60) == expected


def damaged(store: ObjectStore, kind: str) -> str:
    """Damage an object of a log; its name."""
    log = LogArchive.open(store, LOG)
    folder = Path(store.location.path)
    segment_name, file = log.segments[2].name, log.segments[2].files[0].name
    name = segment_name if "segment" in kind else file
    path = folder / name
    if "missing" in kind:
        path.unlink()
    elif "truncated" in kind:
        path.write_bytes(path.read_bytes()[:-1])
    else:  # in the middle, where only reading finds it
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 1
        path.write_bytes(bytes(data))
    return "no changes of" if kind == "segment missing" else name


@pytest.mark.parametrize(
    "kind", ["segment missing", "segment truncated", "file missing", "file truncated", "file altered"]
)
def test_damage_is_named_and_nothing_changes(kind: str, tmp_path: Path) -> None:
    """Whatever is wrong: no new segment, nothing removed, no new file."""
    store = store_at(tmp_path)
    write_log(store)
    words = damaged(store, kind)
    before = names(store, "segments") | names(store, "data")
    with pytest.raises(LogDamaged, match=words.replace(".", r"\.")):
        compact(options_of(store))
    assert names(store, "segments") | names(store, "data") == before
    acquire_lock(store, LOG, "test").release()


def test_rows_that_a_record_does_not_know_are_damage(tmp_path: Path) -> None:
    """A segment whose record has another number of rows: the file is another one than was written."""
    store = store_at(tmp_path)
    write_log(store, segments=2)
    first = LogArchive.open(store, LOG).segments[0]
    file = structs.replace(first.files[0], total_kvs=49)
    write_record(store, first.name, structs.replace(first, files=(file,)))
    with pytest.raises(LogDamaged, match=r"has 50 rows .* not 49"):
        compact(options_of(store))
    assert len(LogArchive.open(store, LOG).segments) == 2


def test_other_logs_and_times_outside_are_refused(tmp_path: Path) -> None:
    """Nothing is written, not even a lock."""
    store = store_at(tmp_path)
    with pytest.raises(BackupNotFound):
        compact(options_of(store))
    assert not list(store.list())
    write_log(store)
    for ts in (START - 1, START + 61):
        with pytest.raises(UsageError, match="outside the log"):
            compact(options_of(store, until_ts=ts))
    with pytest.raises(UsageError, match="needs --concurrency"):
        compact(options_of(store, executor="spark", spark_master="spark://host:7077", concurrency=None, rate_limit=1))
    assert compact(options_of(store, until_ts=START)).segments == 0
    before = names(store, "")
    assert compact(options_of(store, dry_run=True)).segments == 6
    assert names(store, "") == before


def test_two_at_once_and_a_truncation_wait_for_each_other(tmp_path: Path) -> None:
    """By the lock of the log; logs beside it are not concerned."""
    store = store_at(tmp_path)
    write_log(store)
    with acquire_lock(store, LOG, "log truncate"), pytest.raises(LeaseHeld, match="log truncate"):
        compact(options_of(store))
    with acquire_lock(store, "log2", "log truncate"):
        assert compact(options_of(store)).segments == 6


def test_a_writer_beside_a_compaction_loses_nothing(tmp_path: Path) -> None:
    """Segments that are written between any two steps, and a writer that starts while old segments are removed."""
    store = store_at(tmp_path)
    write_log(store)
    writer = LogWriter(store, describe(), WHOLE, FlushOptions(interval=1e9))
    writer.start(START + 60)
    expected = rows_of(LogArchive.open(store, LOG), WHOLE, START, START + 60)

    def reporter(event: Event) -> None:
        if isinstance(event, StepStarted | StepFinished):
            ts = writer.flushed_ts
            writer.append(batch([Change(ts + 1, b"key", b"new"), Change(ts - 3, b"late%d" % ts, b"new")]))
            expected.update({(b"key", ts + 1, b"new", 0, False), (b"late%d" % ts, ts - 3, b"new", 0, False)})
            writer.flush(ts + STEP)

    done = compact(options_of(store), reporter)
    assert done.segments > 6
    log = LogArchive.open(store, LOG)
    assert (log.damage, log.gaps(), log.end_ts()) == ((), [], writer.flushed_ts)
    assert rows_of(log, WHOLE, START, log.end_ts()) == expected
    LogWriter(store, describe(), WHOLE).start(START + 30)


def test_an_interrupted_compaction_keeps_finished_chunks(tmp_path: Path) -> None:
    """A failure after the first of several chunks leaves the log whole, and the same command does the rest."""
    store = store_at(tmp_path)
    write_log(store)
    log = LogArchive.open(store, LOG)
    expected = rows_of(log, WHOLE, START, log.end_ts())
    size = sum(file.total_bytes for file in log.segments[0].files)
    victim = Path(store.location.path) / log.segments[5].files[0].name
    data = victim.read_bytes()
    broken = bytearray(data)
    broken[len(data) // 4] ^= 1
    victim.write_bytes(bytes(broken))
    with pytest.raises(LogDamaged):
        compact(options_of(store, task_bytes=2 * size))
    log = LogArchive.open(store, LOG)
    assert (len(log.segments), len(log.replaced)) == (4, 4)
    victim.write_bytes(data)
    done = compact(options_of(store, task_bytes=2 * size))
    assert (done.segments, done.removed_segments) == (2, 6)
    log = LogArchive.open(store, LOG)
    assert (len(log.segments), log.replaced) == (3, ())
    assert rows_of(log, WHOLE, START, log.end_ts()) == expected


def test_late_segments_of_old_times_are_kept(tmp_path: Path) -> None:
    """A process that was thought dead writes a segment of a time that is compacted: its rows are still found."""
    store = store_at(tmp_path)
    write_log(store)
    late = LogWriter(store, describe(), WHOLE, FlushOptions(interval=1e9))
    late.start(START + 20)
    compact(options_of(store))
    late.append(batch([Change(START + 5, b"late", b"late")]))
    late.flush(START + 30)
    for _ in range(2):
        log = LogArchive.open(store, LOG)
        assert (b"late", START + 5, b"late", 0, False) in rows_of(log, WHOLE, START, START + 60)
        compact(options_of(store))
    assert len(LogArchive.open(store, LOG).segments) == 1


def test_spans_that_change(tmp_path: Path) -> None:
    """Segments of two processes for half of the keys each lie between segments for all keys: neither contains the other."""
    store = store_at(tmp_path)
    start(store, describe(has_checkpoint=False))
    for at, spans in enumerate([[WHOLE], [WHOLE], [keys(0, 3), keys(3, KEYS)], [WHOLE], [WHOLE]]):
        ts = START + at * STEP
        for span in spans:
            writer = LogWriter(store, describe(has_checkpoint=False), span, FlushOptions(interval=1e9))
            writer.start(ts)
            here = [number for number in range(KEYS) if span.contains(KeyRange(*2 * (CODEC.rpc_key(key_of(number)),)))]
            writer.append(batch([Change(ts + 1, key_of(number), b"%d" % ts) for number in here]))
            writer.flush(ts + STEP)
    expected = rows_of(LogArchive.open(store, LOG), WHOLE, START, START + 5 * STEP)
    assert len(expected) == 5 * KEYS
    assert compact(options_of(store)).segments == 4
    log = LogArchive.open(store, LOG)
    times = [(each.from_ts - START, each.to_ts - START) for each in log.segments]
    assert times == [(0, 20), (20, 30), (20, 30), (30, 50)]
    assert rows_of(log, WHOLE, START, START + 5 * STEP) == expected


def test_encrypted_logs(tmp_path: Path) -> None:
    """New objects are encrypted as well; without the key there is nothing to be seen."""
    crypter = Crypter.of("", SecretText("07" * 32))
    store = store_at(tmp_path, crypter)
    writer = LogWriter(store, structs.replace(describe(has_checkpoint=False), encryption=crypter.method), WHOLE)
    writer.start(START)
    for at in range(3):
        writer.append(batch([Change(START + 1 + at, b"secret key", b"secret value")]))
        writer.flush(START + 1 + at)
    compact(options_of(store))
    log = LogArchive.open(store, LOG)
    assert len(log.segments) == 1
    assert len(rows_of(log, WHOLE, START, START + 3)) == 3
    for info in store.list(f"{LOG}"):
        assert b"secret" not in store.get(info.name), info.name
    with pytest.raises(TikvBrError):
        compact(options_of(store_at(tmp_path)))


@pytest.mark.parametrize("how", ["an older time", "an empty segment in the middle", "another log", "another span"])
def test_a_segment_replaces_no_others_than_it_covers(how: str, tmp_path: Path) -> None:
    """One that names all others, as whoever may write to the storage can make it: nothing is hidden, and nothing removed."""
    store = store_at(tmp_path)
    write_log(store)
    log = LogArchive.open(store, LOG)
    before, middle = names(store, ""), log.segments[2]
    replaces = [each.name for each in log.segments if how == "another span" or each is not middle]
    if how == "another log":
        replaces = [name.replace(LOG, "other", 1) for name in replaces]
    forged = structs.replace(middle, files=(), replaces=tuple(replaces), token="f" * 8)
    if how == "an older time":
        forged = structs.replace(forged, from_ts=1, to_ts=2)
    elif how == "another span":
        forged = structs.replace(forged, start=WHOLE.start + b"a", from_ts=1, to_ts=2**60)
    write_record(store, forged.name, forged)
    now = LogArchive.open(store, LOG)
    assert now.replaced == ()
    plan = plan_clean_up(now, grace=0.0)
    assert (plan.segments, plan.files) == ((), ())
    remove(now, plan)
    assert before <= names(store, "")
