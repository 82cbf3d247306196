"""Every kind of object of a log, damaged in every way: named, and never the cause of other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.damage import read_objects
from tests.unit.archive.samples import LOG, START, WHOLE, describe, save, store_at
from tests.unit.incremental.changes import Change, batch
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import plan_clean_up, plan_truncation, remove, set_state, state_of, status_of, truncate
from tikv_br.archive.records import (
    TRUNCATION,
    Checkpoint,
    Control,
    InexactPeriod,
    LogDescription,
    LogState,
    MissedIngest,
    Truncation,
)
from tikv_br.archive.writer import FlushOptions, LogWriter
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import LogDamaged, TikvBrError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore

STEP = 10
ROWS_END = START + 5 * STEP
FLIPS = 16
"""Bits that are changed one by one, evenly spread over an object."""
KINDS = {
    "log.json": "log.json",
    "segment": "segments/*.json",
    "data file": "data/*/*.parquet",
    "truncated.json": "truncated.json",
    "control.json": "control.json",
    "checkpoint": "state/*/checkpoint-*.json",
}
Rows = dict[tuple[bytes, int], bytes]


def write_log(folder: Path) -> ObjectStore:
    """A log of several segments whose files are of one size, truncated, paused and resumed."""
    store = store_at(folder)
    writer = LogWriter(store, describe(), WHOLE, FlushOptions(interval=1e9))
    writer.start(START)
    for ts in range(START, ROWS_END, STEP):
        rows = [Change(ts + 1 + at, b"key%d" % (at % 3), b"%08d" % (ts + at)) for at in range(STEP)]
        writer.append(batch(rows))
        writer.flush(ts + STEP)
        save(store, ts + STEP)
    truncate(LogArchive.open(store, LOG), plan_truncation(LogArchive.open(store, LOG), START + STEP))
    for state in (LogState.PAUSED, LogState.ACTIVE):
        set_state(store, LOG, state)
    return store


def restored(store: ObjectStore) -> Rows:
    """All rows after the truncation, read as a merge does. Raises `TikvBrError` if anything is wrong with the log."""
    log = LogArchive.open(store, LOG)
    files = log.files_for(WHOLE, START + STEP, ROWS_END)
    if damage := log.verify_files(files):
        raise LogDamaged(damage[0].problem)
    rows = (row for file in files for part in log.rows(file) for row in part.to_pylist())
    return {(row["key"], row["ts"]): row["value"] for row in rows if row["ts"] > START + STEP}


def problems(store: ObjectStore) -> str:
    """All that the checks of a log say."""
    try:
        log = LogArchive.open(store, LOG)
        state_of(store, LOG)
    except TikvBrError as error:
        return error.message
    found = [each.problem for each in (*log.damage, *log.verify_files(whole=True))]
    return "; ".join([*found, *(f"no changes of {gap}" for gap in log.gaps())])


def objects(folder: Path, kind: str) -> list[Path]:
    """The objects of a kind, by name."""
    found = sorted((folder / LOG).glob(KINDS[kind]))
    assert found
    return found


def assert_never_wrong(store: ObjectStore, expected: Rows) -> None:
    """Rows are the right ones, or there is an error."""
    try:
        found = restored(store)
    except TikvBrError:
        return
    assert found == expected


def flipped(data: bytes) -> Iterator[bytes]:
    """The same bytes but for one bit."""
    for at in range(0, len(data), max(1, len(data) // FLIPS)):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_altered_objects_are_named(kind: str, tmp_path: Path) -> None:
    """Flipped bits, and ends that are missing."""
    store = write_log(tmp_path)
    expected = restored(store)
    assert problems(store) == ""
    victim = objects(tmp_path, kind)[1 if kind in {"segment", "data file"} else 0]
    whole = victim.read_bytes()
    cut = [whole[:length] for length in (0, 1, len(whole) // 2, len(whole) - 1)]
    for data in (*cut, *flipped(whole)):
        victim.write_bytes(data)
        assert victim.name in problems(store)
        assert_never_wrong(store, expected)
    victim.write_bytes(whole)
    assert problems(store) == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("log.json", "log.json"),
        ("segment", "no changes of"),
        ("data file", "is missing"),
        ("truncated.json", "no changes of"),
        ("control.json", ""),  # as if it had never been paused
        ("checkpoint", "checkpoint is missing"),
    ],
)
def test_missing_objects_are_named(kind: str, words: str, tmp_path: Path) -> None:
    """By name, or by the keys and times that are missing with them; also if it is the last of its kind."""
    for number in (0, -1):
        folder = tmp_path / str(number)
        store = write_log(folder)
        expected = restored(store)
        objects(folder, kind)[number].unlink()
        assert words in problems(store)
        assert bool(problems(store)) == bool(words)
        assert_never_wrong(store, expected)


def test_rows_that_cannot_be_read_are_damage_of_the_log(tmp_path: Path) -> None:
    """The error names the log, and its advice is for a log, not for a backup."""
    store = write_log(tmp_path)
    log = LogArchive.open(store, LOG)
    file = log.files_for(WHOLE, START + STEP, ROWS_END)[0]
    place = tmp_path / file.name
    data = place.read_bytes()
    place.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    with pytest.raises(LogDamaged, match=f"the log at .* is damaged: {file.name}"):
        list(log.rows(file))


@pytest.mark.parametrize("kind", ["segment", "data file"])
def test_two_that_were_swapped_are_named(kind: str, tmp_path: Path) -> None:
    """The names of segments give their contents, and segments those of the files."""
    store = write_log(tmp_path)
    expected = restored(store)
    one, other = objects(tmp_path, kind)[1:3]
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    found = problems(store)
    assert one.name in found
    assert other.name in found
    assert_never_wrong(store, expected)
    with pytest.raises(TikvBrError):
        restored(store)


RECORDS: dict[str, tuple[type, dict[str, object], dict[str, object], str]] = {
    "log.json": (LogDescription, {"log_id": "log2"}, {"start_ts": START - STEP}, ""),
    "truncated.json": (Truncation, {"log_id": "log2"}, {"restorable_from": START}, "no changes of"),
    "control.json": (Control, {"log_id": "log2"}, {"state": LogState.PAUSED}, ""),
    "checkpoint": (Checkpoint, {"changefeed_id": "log2"}, {"checkpoint_ts": START + STEP}, ""),
}
"""By kind: the record, what those of another log and earlier ones have in it, and what checks say of an earlier one."""


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_another_log_and_earlier_ones(kind: str, tmp_path: Path) -> None:
    """Records name their log; earlier records promise no more than the log has, or gaps show."""
    store = write_log(tmp_path)
    expected = restored(store)
    record, other, earlier, words = RECORDS[kind]
    victim = objects(tmp_path, kind)[0]
    name = str(victim.relative_to(tmp_path))
    for changes in (other, earlier):
        whole = victim.read_bytes()
        write_record(store, name, structs.replace(read_record(store, record, name), **changes))
        found = problems(store)
        assert (victim.name if changes is other else words) in found
        assert bool(found) == bool(changes is other or words)
        assert_never_wrong(store, expected)
        victim.write_bytes(whole)


def shown(store: ObjectStore) -> None:
    """Everything that reads the records of a log, and then what removes objects without being told a time."""
    log = LogArchive.open(store, LOG)
    status_of(log)
    log.inexact_around(log.description.ranges, log.end_ts())
    remove(log, plan_clean_up(log, grace=0.0))


@pytest.mark.parametrize("restorable_from", [ROWS_END - STEP, ROWS_END, 1 << 63, (1 << 64) - 1])
def test_a_forged_truncation_removes_nothing(tmp_path: Path, restorable_from: int) -> None:
    """It hides changes; a clean-up, which follows a compaction, does not follow it."""
    store = write_log(tmp_path)
    write_record(store, f"{LOG}/{TRUNCATION}", Truncation(LOG, restorable_from, 5))
    before = {info.name for info in store.list()}
    with contextlib.suppress(TikvBrError):
        shown(store)
    assert {info.name for info in store.list()} == before


@pytest.mark.parametrize(
    "name", ["data/../../other/data/a", "data/../segments", "data/", "data//x", "data/\0", "../other/data/x"]
)
def test_a_segment_that_lists_what_is_outside(tmp_path: Path, name: str) -> None:
    """It is damage, and counts as missing; the rest of the log can be read, and nothing outside goes."""
    store = write_log(tmp_path)
    write_log(tmp_path / "other" / "data")
    log = LogArchive.open(store, LOG)
    before, file = read_objects(tmp_path), log.segments[-1].files[0]
    forged = structs.replace(log.segments[-1], files=(structs.replace(file, name=f"{LOG}/{name}"),), token="f" * 8)
    write_record(store, forged.name, forged)
    now = LogArchive.open(store, LOG)
    assert len(now.segments) == len(log.segments)
    assert any(forged.name in each.problem or name in each.name for each in now.damage)
    shown(store)
    plan = plan_truncation(now, ROWS_END, now=1e12)
    truncate(now, plan)
    after = read_objects(tmp_path)
    assert {each: after.get(each) for each in before if each.startswith("other")} == {
        each: data for each, data in before.items() if each.startswith("other")
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"from_ts": 0, "to_ts": (1 << 64) - 1},
        {"from_ts": 1 << 63, "to_ts": 5},
        {"inexact": (InexactPeriod(b"", b"", 0, (1 << 64) - 1),)},
        {"missed": (MissedIngest(b"", b"", (1 << 64) - 1, 0, "\x1b[2J"),)},
        {"start": b"", "end": b""},
        {"start": b"z", "end": b"a"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_segments_of_impossible_times_and_keys(tmp_path: Path, changed: dict[str, Any]) -> None:
    """They are read, or refused in a sentence, and remove nothing."""
    store = write_log(tmp_path)
    log = LogArchive.open(store, LOG)
    forged = structs.replace(log.segments[-1], files=(), token="f" * 8, **changed)
    write_record(store, forged.name, forged)
    before = {info.name for info in store.list()}
    with contextlib.suppress(TikvBrError):
        shown(store)
    assert {info.name for info in store.list()} >= before


@pytest.mark.parametrize(
    "changed",
    [
        {"log_id": "../other"},
        {"keyspace_id": 1 << 40},
        {"ranges": ()},
        {"ranges": (KeyRange(b"z", b"a"),)},
        {"start_ts": (1 << 64) - 1},
        {"cluster_id": (1 << 64) - 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_descriptions_that_no_log_has(tmp_path: Path, changed: dict[str, Any]) -> None:
    """They are read, or refused in a sentence, and remove nothing."""
    store = write_log(tmp_path)
    write_record(store, f"{LOG}/log.json", structs.replace(describe(), **changed))
    before = {info.name for info in store.list()}
    with contextlib.suppress(TikvBrError):
        shown(store)
    assert {info.name for info in store.list()} == before
