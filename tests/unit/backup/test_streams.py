"""Answers of several streams, as they come; and streams that do not end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest

from tikv_br.backup.store_responses import POLL_SECONDS, read_all
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.store import BackupStream
from tikv_br.errors import ClusterUnreachable


class Scripted:
    """A stream that gives its answers, then fails, or waits until it is cancelled."""

    waiting = False

    def __init__(self, *keys: bytes, failure: Exception | None = None, hangs: bool = False) -> None:
        self.cancelled = threading.Event()
        self._keys, self._failure, self._hangs = keys, failure, hangs

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
        for key in self._keys:
            yield brpb_pb2.BackupResponse(start_key=key)
        if self._hangs:
            self.cancelled.wait(120)
            raise ClusterUnreachable("cancelled")
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Let a waiting reader go."""
        self.cancelled.set()


def streams(*scripted: Scripted) -> list[BackupStream]:
    """Return them as what they stand for."""
    return [cast("BackupStream", each) for each in scripted]


def test_answers_and_errors_come_with_the_number_of_their_stream() -> None:
    """An error ends its own stream only."""
    failure = ClusterUnreachable("store 4 is away")
    events = list(read_all(streams(Scripted(b"a", b"b"), Scripted(b"c", failure=failure)), 60))
    said = [event for event in events if event is not None]
    assert [item.start_key for number, item in said if number == 0 and isinstance(item, brpb_pb2.BackupResponse)] == [
        b"a",
        b"b",
    ]
    assert said.index((1, failure)) > next(place for place, (number, _) in enumerate(said) if number == 1)
    assert len(said) == 4


def test_no_streams_are_done_at_once() -> None:
    """Without any store there is no stream."""
    assert list(read_all([], 60)) == []


def test_a_consumer_that_stops_cancels_all() -> None:
    """Also those that would never end, and it does not wait for them."""
    hanging = Scripted(b"a", hangs=True), Scripted(hangs=True)
    began = time.monotonic()
    with closing(read_all(streams(*hanging), 60)) as events:
        assert next(event for event in events if event is not None)[0] == 0
    assert all(stream.cancelled.is_set() for stream in hanging)
    assert time.monotonic() - began < 60


def test_streams_that_say_nothing_are_given_up() -> None:
    """The consumer gets the error of an unreachable store, whose message has the time without an answer, not who ended the call."""
    silent = Scripted(hangs=True)
    events = list(read_all(streams(silent), 5 * POLL_SECONDS))
    assert events[0] is None
    assert isinstance(events[-1], tuple)
    assert isinstance(events[-1][1], ClusterUnreachable)
    assert events[-1][1].message == "no answer for 1 s"


def test_an_error_that_is_none_of_a_store_is_not_swallowed() -> None:
    """A mistake in reading ends the task instead of leaving it waiting."""
    with pytest.raises(KeyError):
        list(read_all(streams(Scripted(failure=KeyError("mistake"))), 60))
