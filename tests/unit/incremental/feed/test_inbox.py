"""A full inbox holds those back who fill it."""

from __future__ import annotations

import threading

import pytest

from tikv_br.incremental.feed.stream import Inbox, InboxClosed

PATIENCE = 60.0


def test_waiting_items_are_bounded_and_in_order() -> None:
    """A producer waits while there is no room; items without a size pass."""
    inbox: Inbox[int] = Inbox(10)
    reached = []

    def produce() -> None:
        for number in range(20):
            inbox.put(number, 4)
            reached.append(number)

    producer = threading.Thread(target=produce)
    producer.start()
    taken = []
    for _ in range(20):
        assert inbox.bytes <= 10
        taken += inbox.get(PATIENCE, most=1)
        assert len(reached) <= len(taken) + 3  # two in the inbox, and one about to be counted
    producer.join(PATIENCE)
    assert taken == list(range(20))
    inbox.put_now(7)
    assert inbox.bytes == 0
    assert inbox.get(0, most=1) == [7]
    assert inbox.get(0, most=1) == []


def test_items_are_taken_together_up_to_a_bound() -> None:
    """The first item always; those after it while they fit."""
    inbox: Inbox[int] = Inbox(100)
    for number in range(5):
        inbox.put(number, 4)
    inbox.put_now(5)
    assert inbox.get(0, most=9) == [0, 1]
    assert inbox.bytes == 12
    assert inbox.get(0, most=1) == [2]
    assert inbox.get(0, most=100) == [3, 4, 5]
    assert inbox.bytes == 0


def test_one_item_may_be_larger_than_the_inbox() -> None:
    """It passes alone."""
    inbox: Inbox[int] = Inbox(10)
    inbox.put(1, 1000)
    assert inbox.get(0, most=1) == [1]


def test_closing_lets_everyone_go() -> None:
    """A producer that waits for room gets an error, a consumer nothing, and later items are dropped."""
    inbox: Inbox[int] = Inbox(10)
    inbox.put(1, 10)
    met = []

    def produce() -> None:
        with pytest.raises(InboxClosed):
            inbox.put(2, 10)
        met.append(True)

    producer = threading.Thread(target=produce)
    producer.start()
    inbox.close()
    producer.join(PATIENCE)
    assert met == [True]
    inbox.put_now(3)
    assert inbox.get(0, most=1) == []
