"""Requests to a store one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import cast

import pytest

from tikv_br.backup.store_responses import GatedStream, read_all
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.store import BackupStream
from tikv_br.errors import ClusterUnreachable

PATIENCE = 60.0


class Store:
    """Answers once for each request, and notes how many were under way at the same time."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most = 0
        self.sent = 0
        self.ends = threading.Event()
        self.ends.set()

    def send(self) -> BackupStream:
        """Begin a request."""
        self.sent += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return cast("BackupStream", _Answers(self))


class _Answers:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
        yield brpb_pb2.BackupResponse()
        self._store.ends.wait(PATIENCE)
        self._store.under_way -= 1

    def cancel(self) -> None:
        self._store.ends.set()


def test_one_request_at_a_time_and_all_are_answered() -> None:
    """Ten requests, ten answers, and never two of them under way."""
    gate, store = threading.Lock(), Store()
    streams = [GatedStream(gate, store.send) for _ in range(10)]
    answers = [event for event in read_all(streams, PATIENCE) if event is not None]
    assert sorted(number for number, _said in answers) == list(range(10))
    assert (store.most, store.sent) == (1, 10)
    assert not gate.locked()


def test_waiting_for_ones_turn_is_no_silence() -> None:
    """While another task's request is at the store, patience does not run out."""
    gate, store = threading.Lock(), Store()
    gate.acquire()
    seen = []
    for event in read_all([GatedStream(gate, store.send)], patience=0.0):
        seen.append(event)
        if len(seen) == 3:
            assert seen == [None, None, None]
            gate.release()
    assert store.sent == 1
    assert isinstance(seen[-1], tuple)


def test_a_silent_request_is_given_up_while_its_sibling_waits_for_the_gate() -> None:
    """Both are of one task and for one store, as after regions have moved: the one that waits does not stop the clock of the other."""
    gate, store = threading.Lock(), Store()
    store.ends.clear()
    answered, polls = set(), 0
    with closing(read_all([GatedStream(gate, store.send) for _ in range(2)], patience=0.0)) as events:
        for event in events:
            if event is not None:
                answered.add(event[0])
            else:
                polls += 1
            if polls == 100:
                break
    assert answered == {0, 1}
    assert store.most == 1


@pytest.mark.parametrize("is_free", [False, True])
def test_a_cancelled_waiter_sends_nothing(is_free: bool) -> None:
    """Also through a gate that the cancellation of the request before has just opened; the next one finds it open."""
    gate, store = threading.Lock(), Store()
    with nullcontext() if is_free else gate:
        stream = GatedStream(gate, store.send)
        stream.cancel()
        with pytest.raises(ClusterUnreachable):
            next(iter(stream))
    assert store.sent == 0
    assert not gate.locked()


def test_those_that_wait_are_cancelled_first() -> None:
    """Else the end of the one that was sent lets them send after all."""
    cancelled = []

    class Stream:
        def __init__(self, number: int) -> None:
            self._number = number
            self.waiting = number != 0

        def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
            return iter(())

        def cancel(self) -> None:
            """Note the order."""
            cancelled.append(self._number)

    list(read_all([Stream(number) for number in range(3)], PATIENCE))
    assert cancelled == [1, 2, 0]


def test_a_request_that_fails_opens_the_gate() -> None:
    """An error while sending is the stream's error, and the next request has its turn."""
    gate = threading.Lock()

    def fail() -> BackupStream:
        raise ClusterUnreachable("gone")

    with pytest.raises(ClusterUnreachable):
        list(GatedStream(gate, fail))
    assert not gate.locked()
