"""Behaviour of every sink: subclass `SinkSuite`, give it `sink` and `state`, and all of it runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.unit.incremental.changes import Change, batch
from tikv_br.incremental.sinks.base import Sink

FUTURE = int(time.time()) + 100_000
PAST = 1_000_000_000
State = Callable[[], dict[bytes, bytes]]
"""Live rows of a follower of the sink."""


class SinkSuite:
    """Conformance tests, each on an empty sink."""

    @pytest.fixture
    def sink(self) -> Iterator[Sink]:
        """An empty sink."""
        raise NotImplementedError

    @pytest.fixture
    def state(self) -> State:
        """State of the sink after the writes."""
        raise NotImplementedError

    def test_the_last_row_of_a_key_stays(self, sink: Sink, state: State) -> None:
        """Puts, overwrites and deletes over several batches, and within one, leave what the last said."""
        sink.write(batch([Change(1, b"a", b"1"), Change(1, b"b", b"1"), Change(2, b"c", b"1")]))
        sink.write(batch([Change(3, b"a", b"2"), Change(4, b"b", deleted=True), Change(5, b"c", deleted=True)]))
        sink.write(batch([Change(6, b"c", b"3"), Change(7, b"d", b"0"), Change(8, b"d", b"1"), Change(9, b"d", b"2")]))
        sink.write(batch([Change(10, b"e", b"0"), Change(11, b"e", deleted=True), Change(12, b"c", b"4")]))
        assert state() == {b"a": b"2", b"c": b"4", b"d": b"2"}

    def test_repeated_batches_change_nothing(self, sink: Sink, state: State) -> None:
        """After repeated batches, as after a restart, the state is the same."""
        batches = [
            batch([Change(1, b"a", b"1"), Change(2, b"b", b"1")]),
            batch([Change(3, b"a", deleted=True), Change(4, b"b", b"2")]),
        ]
        for rows in [*batches, *batches]:
            sink.write(rows)
        assert state() == {b"b": b"2"}

    def test_odd_keys_and_values(self, sink: Sink, state: State) -> None:
        """Bytes of all kinds, keys that are prefixes of one another, a large value, and an empty batch."""
        rows = {bytes([at]) * (at % 5 + 1): bytes([255 - at]) * (at * 7) for at in range(1, 256)}
        rows |= {b"\xff" * 12: b"x", b"\0": b"nul", b"large": bytes(1 << 20), b"new\nline": b'\n\r"\\'}
        sink.write(batch([]))
        sink.write(batch([Change(ts, key, value) for ts, (key, value) in enumerate(rows.items(), 1)]))
        assert state() == rows

    def test_a_row_whose_time_is_over_goes(self, sink: Sink, state: State) -> None:
        """A put that has expired takes away what the key had."""
        sink.write(batch([Change(1, b"a", b"1"), Change(2, b"b", b"1")]))
        sink.write(batch([Change(3, b"a", b"2", expire_ts=PAST)]))
        assert state() == {b"b": b"1"}

    def test_follows_a_long_history(self, sink: Sink, state: State) -> None:
        """Thousands of changes to few keys in batches of any size end as in a dict."""
        chance = random.Random(7)
        model: dict[bytes, bytes] = {}
        ts = 0
        while ts < 4000:
            rows = []
            for _ in range(chance.choice([1, 40, 1500])):
                ts += 1
                key = b"k%03d" % chance.randrange(700)
                rows.append(Change(ts, key, b"%d" % ts, deleted=chance.random() < 0.3))
                if rows[-1].deleted:
                    model.pop(key, None)
                else:
                    model[key] = rows[-1].value
            sink.write(batch(rows))
        assert state() == model

    def test_may_be_closed_twice(self, sink: Sink, state: State) -> None:
        """Closing keeps what was written."""
        sink.write(batch([Change(1, b"a", b"1")]))
        sink.close()
        sink.close()
        assert state() == {b"a": b"1"}
