"""Timestamps from a scripted PD."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scripted_grpc import fail
from tests.unit.cluster.fakes import PD, FakeCluster
from tests.waiting import eventually
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamp import MAX_LOGICAL, compose, minus_seconds, physical_ms
from tikv_br.errors import RequestRefused, UsageError

TSO = PD + "Tso"


class Counter:
    """PD's side: hands out consecutive timestamps, the last of each batch in the answer."""

    def __init__(self, delay: float = 0.0) -> None:
        self.last = compose(1_795_257_267_674)
        self.delay = delay
        self.counts: list[int] = []

    def __call__(self, data: bytes) -> pdpb_pb2.TsoResponse:
        """Answer one request."""
        count = pdpb_pb2.TsoRequest.FromString(data).count
        time.sleep(self.delay)
        self.counts.append(count)
        self.last += count
        stamp = pdpb_pb2.Timestamp(physical=physical_ms(self.last), logical=self.last & MAX_LOGICAL)
        return pdpb_pb2.TsoResponse(count=count, timestamp=stamp)


def test_the_first_of_a_batch_is_returned(fake: FakeCluster) -> None:
    """PD's answer is the last of the batch; a caller who asked for 5 owns it and the 4 before it."""
    counter = Counter()
    fake.pd.script(TSO, counter)
    with PdClient(fake.config()) as pd:
        first = pd.tso(5)
        assert pd.tso() == first + 5
    assert first == compose(1_795_257_267_674, 1)


def test_the_recorded_answer_is_read_right(fake: FakeCluster) -> None:
    """For the recorded answer to count 100, logical 106, the first is logical 7."""
    stamp = pdpb_pb2.Timestamp(physical=1795257267674, logical=106)
    fake.pd.script(TSO, pdpb_pb2.TsoResponse(count=100, timestamp=stamp))
    with PdClient(fake.config()) as pd:
        assert pd.tso(100) == (1795257267674 << 18) + 7


def test_callers_share_requests_and_no_timestamp(fake: FakeCluster) -> None:
    """Threads that ask while a request is under way get disjoint ranges by one more."""
    counter = Counter()
    wanted = [at % 7 + 1 for at in range(32)]

    def answer(data: bytes) -> pdpb_pb2.TsoResponse:
        asked = pdpb_pb2.TsoRequest.FromString(data).count
        if not counter.counts:  # all others are to wait for this one
            eventually(lambda: asked + sum(order.count for order in pd._tso._queue) == sum(wanted))
        return counter(data)

    fake.pd.script(TSO, answer)
    with PdClient(fake.config()) as pd, ThreadPoolExecutor(32) as pool:
        ranges = sorted(pool.map(lambda count: (pd.tso(count), count), wanted))
    assert all(left + count <= right for (left, count), (right, _) in itertools.pairwise(ranges))
    assert sum(counter.counts) == sum(wanted)
    assert len(counter.counts) <= 2


def test_large_orders_do_not_share_one_request(fake: FakeCluster) -> None:
    """Orders that together exceed what one answer can hold go in several requests."""
    counter = Counter(delay=0.02)
    fake.pd.script(TSO, counter)
    together = threading.Barrier(4)

    def ask(_: int) -> int:
        together.wait()
        return pd.tso(MAX_LOGICAL - 5)

    with PdClient(fake.config()) as pd, ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 4
    assert counter.counts == [MAX_LOGICAL - 5] * 4


@pytest.mark.parametrize("count", [0, -1, MAX_LOGICAL + 1])
def test_impossible_counts_are_not_sent(fake: FakeCluster, count: int) -> None:
    """A count that PD would refuse is a usage error."""
    with PdClient(fake.config()) as pd, pytest.raises(UsageError):
        pd.tso(count)


def test_a_stream_that_breaks_is_tried_again(fake: FakeCluster) -> None:
    """An unavailable stream, and one that ends without an answer, are opened anew."""
    fake.pd.script(TSO, fail("UNAVAILABLE", "not leader"), [], Counter())
    with PdClient(fake.config(retry_budget=10.0)) as pd:
        assert pd.tso() == compose(1_795_257_267_674, 1)


def test_a_refusal_reaches_all_who_wait(fake: FakeCluster) -> None:
    """When PD refuses for good, every caller of the batch gets the error; nobody hangs."""
    fake.pd.script(TSO, fail("UNKNOWN", "generate timestamp failed"))

    def ask(_: int) -> bool:
        try:
            pd.tso()
        except RequestRefused:
            return True
        return False

    with PdClient(fake.config()) as pd, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_timestamps_are_milliseconds_and_a_counter() -> None:
    """Arithmetic on the physical part leaves milliseconds exact and never goes below zero."""
    ts = compose(1_000_000, 77)
    assert physical_ms(ts) == 1_000_000
    assert minus_seconds(ts, 1.5) == compose(998_500)
    assert minus_seconds(ts, 1e9) == 0
