"""One item ahead: order, errors, and not a second one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tikv_br.cluster.scan import Prefetcher
from tikv_br.errors import ClusterUnreachable


def test_the_next_item_is_under_way_while_one_is_worked_on() -> None:
    """When the consumer holds item n, item n + 1 has been asked for, and no further one."""
    asked: list[int] = []
    progress = threading.Condition()

    def items() -> Iterator[str]:
        for number in range(5):
            with progress:
                asked.append(number)
                progress.notify_all()
            yield f"item {number}"

    seen = []
    for number, item in enumerate(Prefetcher(items())):
        seen.append(item)
        with progress:
            assert progress.wait_for(lambda: len(asked) >= min(number + 2, 5), timeout=60)  # noqa: B023
            assert len(asked) <= number + 2
    assert seen == [f"item {number}" for number in range(5)]


def test_an_error_reaches_the_consumer_after_the_items_before_it() -> None:
    """The thread in between neither swallows nor changes it."""

    def items() -> Iterator[str]:
        yield "first"
        raise ClusterUnreachable("store 4 is away")

    seen: list[str] = []
    with pytest.raises(ClusterUnreachable, match="store 4"):
        seen.extend(Prefetcher(items()))
    assert seen == ["first"]


def test_a_consumer_that_stops_leaves_no_thread() -> None:
    """After an early end the thread is gone: nothing reads on behind the back of a failed task."""
    ahead = iter(Prefetcher(iter(range(100))))
    assert next(ahead) == 0
    ahead.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_stopped_between_two_items() -> None:
    """The one under way is the last; no further one is begun."""
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            asked.append(number)
            yield number

    ahead = Prefetcher(items())
    seen = []
    for item in ahead:
        seen.append(item)
        if item == 2:
            ahead.stop()
    assert (seen, asked) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert ahead.seconds_waiting >= 0
