"""Contiguity of a log, its window, and the choice of files."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.unit.archive.samples import (
    CODEC,
    LOG,
    START,
    WHOLE,
    add,
    data_file,
    describe,
    save,
    segment,
    start,
    store_at,
)
from tikv_br.archive.log import LogArchive, LogGap
from tikv_br.archive.maintenance import plan_truncation, status_of, truncate
from tikv_br.archive.records import InexactPeriod, MissedIngest, Segment, SegmentName, Truncation, merge_periods
from tikv_br.archive.writer import LogWriter
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.sealed import write_record
from tikv_br.errors import BackupNotFound, LogDamaged, UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore


def keys(first: bytes, end: bytes = b"") -> KeyRange:
    """A range of user keys."""
    return CODEC.rpc_range(KeyRange(first, end))


def archive(store: ObjectStore, segments: Sequence[Segment], checkpoint_ts: int = 0) -> LogArchive:
    """A log in memory."""
    ordered = sorted(segments, key=lambda each: (each.from_ts, each.to_ts))
    return LogArchive(store, describe(), tuple(ordered), checkpoint_ts=checkpoint_ts)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """An empty store."""
    return store_at(tmp_path)


CELLS = 6
"""Keys and timestamps of the model: a grid of 6 keys by 6 steps of time."""
pairs = st.sampled_from(list(itertools.combinations(range(CELLS + 1), 2)))
rectangles = st.lists(st.tuples(pairs, pairs).map(lambda each: (*each[0], *each[1])), max_size=14)
Rectangle = tuple[int, int, int, int]


def grid_span(first: int, end: int) -> KeyRange:
    """Cells as keys."""
    return keys(b"%d" % first if first else b"", b"%d" % end if end < CELLS else b"")


def grid_segments(found: Sequence[Rectangle]) -> list[Segment]:
    """Rectangles of cells as segments, each with one file whose rows fill it."""
    return [
        segment(START + low, START + high, grid_span(first, end), token=token)
        for token, (first, end, low, high) in enumerate(found)
    ]


def covered(found: Sequence[Rectangle]) -> set[tuple[int, int]]:
    """The cells (key, step) that rectangles cover."""
    return {(key, step) for first, end, low, high in found for key in range(first, end) for step in range(low, high)}


@given(rectangles)
def test_gaps_and_end_are_those_of_the_grid(found: list[Rectangle]) -> None:
    """For any segments: the newest time without a gap before it, and a gap exactly where cells are missing."""
    log = archive(store_at(Path("/nonexistent")), grid_segments(found), checkpoint_ts=START + CELLS)
    cells = covered(found)
    whole = [all((key, step) in cells for key in range(CELLS)) for step in range(CELLS)]
    assert log.end_ts() == START + (whole.index(False) if False in whole else CELLS)
    gaps = {
        (key, step)
        for gap in log.gaps()
        for key in range(CELLS)
        for step in range(CELLS)
        if gap.span.contains(grid_span(key, key + 1)) and gap.from_ts <= START + step < gap.to_ts
    }
    assert gaps == {(key, step) for key in range(CELLS) for step in range(CELLS)} - cells


@given(rectangles, st.integers(0, 13))
def test_removing_a_segment_is_noticed_if_it_was_needed(found: list[Rectangle], removed: int) -> None:
    """A log that covers all, minus any one segment."""
    found = [*found, (0, 3, 0, 3), (3, CELLS, 0, 3), (0, CELLS, 3, CELLS)]
    rest = [each for at, each in enumerate(found) if at != removed % len(found)]
    log = archive(store_at(Path("/nonexistent")), grid_segments(rest), checkpoint_ts=START + CELLS)
    assert bool(log.gaps()) == (len(covered(rest)) < CELLS * CELLS)
    if log.gaps():
        with pytest.raises(LogDamaged, match="has no changes of"):
            log.check([WHOLE], START, START + CELLS)
    else:
        log.check([WHOLE], START, START + CELLS)


@given(rectangles, st.randoms(use_true_random=False))
def test_files_for_has_every_cell(found: list[Rectangle], chance: random.Random) -> None:
    """The chosen files cover the range and time, and no file is chosen that lies outside of them."""
    found = [*found, (0, 3, 0, 3), (3, CELLS, 0, 3), (0, CELLS, 3, CELLS)]
    blank = FileEntry("", 1, b"", b"", 0, 1, 1)
    segments = [
        structs.replace(
            each,
            files=(
                structs.replace(
                    blank,
                    name=f"{at}",
                    start_key=each.start,
                    end_key=each.end,
                    min_ts=each.from_ts + 1,
                    max_ts=each.to_ts,
                ),
            ),
        )
        for at, each in enumerate(grid_segments(found))
    ]
    first, low = chance.randrange(CELLS), chance.randrange(CELLS)
    end, high = chance.randrange(first + 1, CELLS + 1), chance.randrange(low + 1, CELLS + 1)
    log = archive(store_at(Path("/nonexistent")), segments)
    chosen = [found[int(file.name)] for file in log.files_for(grid_span(first, end), START + low, START + high)]
    assert covered([(first, end, low, high)]) <= covered(chosen)
    assert all(each[0] < end and each[1] > first and each[2] < high and each[3] > low for each in chosen)


def test_late_rows_of_a_segment_that_others_cover_are_found(store: ObjectStore) -> None:
    """A restarted writer covered a time again, and by then a row had arrived that was not there before."""
    late = data_file(store, (START + 12, START + 12))
    log = archive(store, [segment(START, START + 20), segment(START + 5, START + 15, files=[late])])
    assert log.files_for(WHOLE, START, START + 20) == [late]


def test_late_rows_are_found(store: ObjectStore) -> None:
    """A row below a resolved-ts, which only a later segment has."""
    late = data_file(store, (START + 3, START + 14))
    log = archive(store, [segment(START, START + 10), segment(START + 10, START + 20, files=[late])])
    assert log.files_for(WHOLE, START, START + 10) == [late]
    assert log.files_for(WHOLE, START, START + 2) == []


def test_open_reads_what_was_written(store: ObjectStore) -> None:
    """Records, window, checkpoint and truncation."""
    start(store)
    first, second = segment(START, 110, files=[data_file(store, (101, 110))]), segment(110, 125)
    add(store, first, second)
    save(store, 120)
    log = LogArchive.open(store, LOG)
    assert (log.segments, log.damage, log.gaps()) == ((first, second), (), [])
    assert (log.start_ts, log.end_ts(), log.checkpoint_ts) == (START, 125, 120)
    assert log.end_ts(115) == 125
    write_record(store, f"{LOG}/truncated.json", Truncation(LOG, 110, 1))
    store.delete(first.name)
    log = LogArchive.open(store, LOG)
    assert (log.start_ts, log.end_ts(), log.gaps()) == (110, 125, [])


def test_a_truncation_is_no_damage(store: ObjectStore) -> None:
    """While it runs, or after it was killed, data files are missing whose segment is missing too."""
    start(store)
    file = data_file(store, (101, 110))
    add(store, segment(START, 110, files=[file]), segment(110, 125))
    save(store, 120)
    store.delete(file.name)
    assert LogArchive.open(store, LOG).damage
    write_record(store, f"{LOG}/truncated.json", Truncation(LOG, 110, 1))
    assert not LogArchive.open(store, LOG).damage


def test_a_writer_resumes_past_a_damaged_segment_if_another_has_its_changes(store: ObjectStore) -> None:
    """Else it names what is damaged, as damage of the log."""
    start(store)
    damaged, other = segment(110, 125), segment(START, 125, token=1)
    add(store, segment(START, 110), damaged, other)
    store.put(damaged.name, b"{}")
    LogWriter(store, describe(), WHOLE).start(125)
    store.delete(other.name)
    with pytest.raises(LogDamaged, match="has no changes of"):
        LogWriter(store, describe(), WHOLE).start(125)
    store.put(f"{LOG}/log.json", b"{}")
    with pytest.raises(LogDamaged, match=r"log\.json"):
        LogWriter(store, describe(), WHOLE).start(125)


def test_names_say_what_segments_say(store: ObjectStore) -> None:
    """Names of segments parse to their fields."""
    each = segment(5, 2**63, token=77)
    assert SegmentName.parse(each.name) == (5, 2**63, each.name.split("-")[2], "0000004d")
    assert SegmentName.parse(f"{LOG}/log.json") is None


def test_a_missing_end_is_a_gap_only_with_a_checkpoint(store: ObjectStore) -> None:
    """Only the checkpoint shows that there was more."""
    log = archive(store, [segment(START, 110)])
    assert log.gaps() == []
    log = dataclasses.replace(log, checkpoint_ts=115)
    assert log.gaps() == [LogGap(WHOLE, 110, 115)]


def test_keys_and_times_outside_the_log_are_refused(store: ObjectStore) -> None:
    """Such keys and times are no damage, but there is nothing to restore from."""
    log = archive(store, [segment(START, 110)], checkpoint_ts=110)
    log.check([WHOLE], START, 110)
    for spans, after, until, words in [
        ([KeyRange(b"", b"")], START, 110, "does not contain the keys"),
        ([WHOLE], START - 1, 110, "starts at"),
        ([WHOLE], START, 111, "ends at"),
    ]:
        with pytest.raises(UsageError, match=words):
            log.check(spans, after, until)


def test_status_says_how_much_cannot_be_restored_exactly(store: ObjectStore) -> None:
    """Scan windows of any keys, counted once where they overlap, inside of the log's time."""
    second = 1000 << 18
    spans = [
        (b"a", b"b", -5, 2),
        (b"a", b"b", 10, 20),
        (b"c", b"d", 15, 30),
        (b"a", b"b", 30, 31),
        (b"c", b"d", 95, 120),
    ]
    periods = tuple(
        InexactPeriod(CODEC.rpc_key(first), CODEC.rpc_key(end), (start + 10) * second, (end_ts + 10) * second)
        for first, end, start, end_ts in spans
    )
    start(store, describe(start_ts=10 * second))
    add(store, structs.replace(segment(10 * second, 110 * second), inexact=periods))
    save(store, 110 * second)
    found = status_of(LogArchive.open(store, LOG))
    assert (found.scan_window_count, found.scan_window_seconds) == (4, 2 + 20 + 1 + 5)
    assert found.end_ts == 110 * second
    log = LogArchive.open(store, LOG)
    with pytest.raises(UsageError, match=f"can be restored is .*{105 * second}"):
        log.check([WHOLE], 10 * second, 111 * second)


def test_no_log(store: ObjectStore) -> None:
    """Nothing at the place, or segments without their description."""
    with pytest.raises(BackupNotFound, match="no log log1"):
        LogArchive.open(store, LOG)
    add(store, segment(START, 110))
    with pytest.raises(LogDamaged, match=r"log1/log\.json .* is missing"):
        LogArchive.open(store, LOG)


periods = st.builds(
    lambda start, size, since, length: InexactPeriod(
        CODEC.rpc_key(bytes([start])), CODEC.rpc_key(bytes([start + size])), since, since + length
    ),
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
)


@given(st.lists(periods, max_size=8))
def test_merged_periods_contain_all(found: list[InexactPeriod]) -> None:
    """Merged periods contain every key and time of their parts."""
    merged = merge_periods(found)
    assert len(merged) <= len(found)
    for each in found:
        assert any(
            kept.span.contains(each.span) and kept.from_ts <= each.from_ts and each.to_ts <= kept.to_ts
            for kept in merged
        )


@given(st.lists(periods, max_size=8), st.integers(0, 30))
def test_the_nearest_exact_times(found: list[InexactPeriod], ts: int) -> None:
    """Against asking each time in turn."""
    log = archive(store_at(Path("/unused")), [structs.replace(segment(START, START + 50), inexact=tuple(found))])
    exact = [at for at in range(40) if not any(each.from_ts < at < each.to_ts for each in found)]
    expected = max(at for at in exact if at <= ts), min(at for at in exact if at >= ts)
    assert log.inexact_around([WHOLE], ts) == expected
    assert log.inexact_around([CODEC.rpc_range(KeyRange(b"x", b"y"))], ts) == (ts, ts)


def test_an_ingest_that_no_feed_delivers_is_a_gap(store: ObjectStore) -> None:
    """No state between a backup before it and a time after it can be made; before it, and from a backup after it, all can."""
    start(store)
    first, last = segment(START, START + 10), segment(START + 10, START + 20)
    span = keys(b"k", b"m")
    missed = MissedIngest(span.start, span.end, START + 9, START + 14, "restore raw (0123)")
    add(store, first, structs.replace(last, missed=(missed,)))
    save(store, START + 20)
    log = LogArchive.open(store, LOG)
    assert log.gaps() == [LogGap(span, START + 9, START + 14, missed.cause)]
    assert log.end_ts() == START + 9
    log.check([WHOLE], START, START + 9)
    log.check([WHOLE], START + 14, START + 20)
    log.check([keys(b"n")], START, START + 20)
    for after_ts, up_to_ts in [(START, START + 20), (START + 12, START + 20), (START + 5, START + 12)]:
        with pytest.raises(LogDamaged, match="restore raw"):
            log.check([WHOLE], after_ts, up_to_ts)
    [shown] = status_of(log).gaps
    assert "restore raw (0123) ingested rows with older timestamps" in shown
    truncate(log, plan_truncation(log, START + 14))
    assert LogArchive.open(store, LOG).gaps() == []


def test_truncation_keeps_what_says_that_a_later_time_is_inexact(store: ObjectStore) -> None:
    """A segment that has ended, with a period that has not: it goes with the next truncation."""
    start(store)
    span = WHOLE.start, WHOLE.end
    files = [data_file(store, (START + 10 * at + 1,) * 2, token=at) for at in range(3)]
    old, reaching, last = (segment(START + 10 * at, START + 10 * at + 10, files=files[at : at + 1]) for at in range(3))
    old = structs.replace(old, inexact=(InexactPeriod(*span, START + 1, START + 5),))
    reaching = structs.replace(reaching, inexact=(InexactPeriod(*span, START + 15, START + 26),))
    add(store, old, reaching, last)
    save(store, START + 30)
    log = LogArchive.open(store, LOG)
    plan = plan_truncation(log, START + 20)
    assert (plan.segments, plan.files) == ((old.name,), (files[0].name,))
    truncate(log, plan)
    log = LogArchive.open(store, LOG)
    assert (log.segments, log.damage, log.start_ts) == ((reaching, last), (), START + 20)
    assert log.inexact_around([WHOLE], START + 24) == (START + 15, START + 26)
    assert plan_truncation(log, START + 26).segments == (reaching.name,)
