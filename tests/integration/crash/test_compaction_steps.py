"""Compactions of a log broken at every boundary of their steps and killed around each change, and run again."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.crash.cells import CODES, Cell, Kind, cells, end_by_itself, ending, fail, some
from tests.integration.crash.operations import COMPACTION, COMPACTION_STEPS
from tests.integration.crash.seams import moments
from tests.integration.crash.world import Rival, files
from tests.support.forks import Forks
from tests.unit.archive.samples import LOG, START, STEP, WHOLE, rows_of, store_at, write_log
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.log import LogArchive
from tikv_br.progress_events import Reporter

SEGMENTS = 6
CHUNKS = 3


def prepare(place: Path) -> CompactionOptions:
    """A log at a place, and a compaction of it in several tasks."""
    store = store_at(place)
    write_log(store, SEGMENTS)
    size = sum(file.total_bytes for each in LogArchive.open(store, LOG).segments for file in each.files)
    return structs.replace(
        COMPACTION, storage=store.location, task_bytes=size // CHUNKS, file_bytes=size // CHUNKS // 2
    )


def run_compaction(options: CompactionOptions, reporter: Reporter) -> None:
    """Compact."""
    compact(options, reporter)


def check_rows(place: Path, expected: object) -> None:
    """The log is whole and has the same rows."""
    log = LogArchive.open(store_at(place), LOG)
    assert (log.damage, log.gaps(), log.end_ts()) == ((), [], START + SEGMENTS * STEP)
    assert rows_of(log, WHOLE, START, log.end_ts()) == expected


def check_finished(place: Path, expected: object, options: CompactionOptions) -> None:
    """Run it again: nothing remains of the interrupted run, once it is a day old."""
    for path in place.rglob("*"):
        if path.is_file() and "/lease/" not in str(path):
            os.utime(path, (0, 0))
    assert ending(partial(run_compaction, options), lambda _: None) == 0
    check_rows(place, expected)
    log = LogArchive.open(store_at(place), LOG)
    assert (len(log.segments), log.replaced) == (CHUNKS, ())
    there = {
        str(path.relative_to(place))
        for folder in ("segments", "data")
        for path in (place / LOG / folder).rglob("*")
        if path.is_file()
    }
    assert there == {each.name for each in log.segments} | {file.name for each in log.segments for file in each.files}


@pytest.mark.parametrize("cell", some(cells(COMPACTION_STEPS), 2), ids=str)
def test_a_compaction_broken_at_a_boundary(cell: Cell, forks: Forks, tmp_path: Path) -> None:
    """It ends with its exit code and the log is whole; who has lost the lock changes nothing any more."""
    options = prepare(tmp_path)
    log = LogArchive.open(store_at(tmp_path), LOG)
    expected = rows_of(log, WHOLE, START, log.end_ts())
    operation = partial(run_compaction, options)
    rival = Rival(tmp_path / LOG)
    if cell.kind is Kind.EXCEPTION:
        assert ending(operation, cell.reporter(fail)) == CODES[cell.kind]
    elif cell.kind is Kind.LOST_LEASE:
        code = ending(operation, cell.reporter(rival.take))
        if code or not rival.has_taken:
            assert code == (CODES[cell.kind] if rival.has_taken else 0)
            assert not rival.has_taken or files(tmp_path) == rival.found
        rival.leave()
    else:
        forks.start(partial(end_by_itself, operation, cell))
        assert forks.wait() == CODES[cell.kind]
    check_rows(tmp_path, expected)
    check_finished(tmp_path, expected, options)


def test_a_compaction_killed_at_each_change(forks: Forks, tmp_path: Path) -> None:
    """The log is whole at any moment, and the same command does the rest."""
    prepared: dict[int, CompactionOptions] = {}
    expected: dict[int, object] = {}

    def prepared_for(number: int) -> partial[int]:
        place = tmp_path / str(number)
        prepared[number] = prepare(place)
        log = LogArchive.open(store_at(place), LOG)
        expected[number] = rows_of(log, WHOLE, START, log.end_ts())
        return partial(ending, partial(run_compaction, prepared[number]), print)

    for number in moments(forks, prepared_for):
        check_rows(tmp_path / str(number), expected[number])
        check_finished(tmp_path / str(number), expected[number], prepared[number])
    assert number > 1
