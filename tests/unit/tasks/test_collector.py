"""The driver's book: duplicates, retries, and progress that never falls."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from tikv_br.errors import StorageFull
from tikv_br.progress_events import Event, TasksProgress
from tikv_br.tasks.task import Collector, TaskMessage


def progress(index: int, data_bytes: int, attempt: int = 0) -> TaskMessage:
    """Return a progress message with a tenth as many keys."""
    return TaskMessage("progress", index, attempt, (data_bytes, data_bytes // 10))


def result(index: int, value: object, attempt: int = 0, data_bytes: int = 0) -> TaskMessage:
    """Return a result message, with a tenth as many keys."""
    return TaskMessage("result", index, attempt, (data_bytes, data_bytes // 10), pickle.dumps(value))


def book_all(
    messages: list[TaskMessage], total: int, planned: Sequence[int] = ()
) -> tuple[list[object], list[TasksProgress]]:
    """Book messages one by one, and return results and progress."""
    results: list[object] = []
    events: list[Event] = []
    collector: Collector[object] = Collector(total, results.append, events.append, planned)
    for message in messages:
        collector.put(message)
        collector._reported = 0.0
        collector.take(0)
    return results, [event for event in events if isinstance(event, TasksProgress)]


def test_second_outcome_of_a_task_changes_nothing() -> None:
    """A result that comes both live and with the row, or from a second attempt, counts once."""
    results, _ = book_all([result(0, "a"), result(0, "a"), result(0, "b", attempt=1), result(1, "c")], 2)
    assert results == ["a", "c"]


def test_second_attempt_replaces_the_progress_of_the_first() -> None:
    """Bytes of an attempt that died are not counted beside those of the next; late words of the dead are ignored."""
    _, events = book_all([progress(0, 100), progress(0, 30, attempt=1), progress(0, 500), progress(1, 10)], 2)
    assert [event.bytes_done for event in events] == [100, 30, 30, 40]
    assert events[-1].keys_done == 4


def test_fraction_follows_bytes_and_never_falls() -> None:
    """Running tasks count by their bytes, at most as one; a retry does not move the bar back; the end is exactly 1."""
    messages = [progress(0, 50), progress(1, 1000), progress(0, 10, attempt=1), result(1, None), result(0, None)]
    _, events = book_all(messages, 2, [100, 100])
    fractions = [event.fraction for event in events]
    assert fractions == sorted(fractions)
    assert fractions[0] == pytest.approx(0.25)
    assert fractions[1] == pytest.approx((0.5 + 0.99) / 2)
    assert fractions[-1] == 1.0
    assert all(fraction < 1 for fraction in fractions[:-1])


def test_a_task_counts_by_its_planned_bytes() -> None:
    """Two of three tasks are done with 64 keys each: that is 2 %, not two thirds, if the third has nearly all bytes."""
    messages = [result(0, None, data_bytes=640), result(1, None, data_bytes=640), progress(2, 30_000)]
    _, events = book_all(messages, 3, [1000, 1000, 98_000])
    assert [round(event.fraction, 2) for event in events] == [0.01, 0.02, 0.32]
    assert events[-1].bytes_planned == 100_000


def test_error_is_raised() -> None:
    """The error that a task has sent is raised from the book."""
    with pytest.raises(StorageFull, match="no room"):
        book_all([TaskMessage("error", 0, 0, (0, 0), pickle.dumps(StorageFull("no room")))], 1)


def test_progress_after_the_result_is_ignored() -> None:
    """A progress message that was overtaken by its result adds nothing."""
    _, events = book_all([progress(0, 10), result(0, None, data_bytes=10), progress(0, 99)], 2)
    assert events[-1].bytes_done == 10


def test_a_result_brings_the_progress_that_did_not_arrive() -> None:
    """Bytes and keys add up though progress was lost, or came from an attempt whose result was not the first."""
    _, events = book_all(
        [result(0, None, data_bytes=20), progress(1, 70, attempt=1), result(1, None, data_bytes=50)], 2
    )
    assert (events[-1].bytes_done, events[-1].keys_done) == (70, 7)
