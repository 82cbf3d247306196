"""Timestamps from a scripted PD."""

from __future__ import annotations

import pytest

from tests.support.scripted_grpc import fail
from tests.unit.cluster.fakes import PD, FakeCluster
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.timestamps import LOGICAL_BITS, compose, minus_seconds, physical_ms
from tikv_br.errors import RequestRefused

TSO = PD + "Tso"


class Counter:
    """PD's side: hands out consecutive timestamps, the last of each batch in the answer."""

    def __init__(self) -> None:
        self.last = compose(1_795_257_267_674)

    def __call__(self, data: bytes) -> pdpb_pb2.TsoResponse:
        """Answer one request."""
        count = pdpb_pb2.TsoRequest.FromString(data).count
        self.last += count
        stamp = pdpb_pb2.Timestamp(physical=physical_ms(self.last), logical=self.last % (1 << LOGICAL_BITS))
        return pdpb_pb2.TsoResponse(count=count, timestamp=stamp)


def test_timestamps_ascend(fake: FakeCluster) -> None:
    """Each request asks for one."""
    fake.pd.script(TSO, Counter())
    with PdClient(fake.config()) as pd:
        assert [pd.tso(), pd.tso()] == [compose(1_795_257_267_674, 1), compose(1_795_257_267_674, 2)]


def test_the_recorded_answer_is_read_right(fake: FakeCluster) -> None:
    """For the recorded answer to count 100, logical 106, the first is logical 7."""
    stamp = pdpb_pb2.Timestamp(physical=1795257267674, logical=106)
    fake.pd.script(TSO, pdpb_pb2.TsoResponse(count=100, timestamp=stamp))
    with PdClient(fake.config()) as pd:
        assert pd.tso() == (1795257267674 << 18) + 7


def test_a_stream_that_breaks_is_tried_again(fake: FakeCluster) -> None:
    """An unavailable stream, and one that ends without an answer, are opened again."""
    fake.pd.script(TSO, fail("UNAVAILABLE", "not leader"), [], Counter())
    with PdClient(fake.config(retry_budget=10.0)) as pd:
        assert pd.tso() == compose(1_795_257_267_674, 1)


def test_a_refusal_is_raised(fake: FakeCluster) -> None:
    """It is not retried."""
    fake.pd.script(TSO, fail("UNKNOWN", "generate timestamp failed"))
    with PdClient(fake.config()) as pd, pytest.raises(RequestRefused, match="generate timestamp failed"):
        pd.tso()


def test_timestamps_are_milliseconds_and_a_counter() -> None:
    """Arithmetic on the physical part leaves milliseconds exact and never goes below zero."""
    ts = compose(1_000_000, 77)
    assert physical_ms(ts) == 1_000_000
    assert minus_seconds(ts, 1.5) == compose(998_500)
    assert minus_seconds(ts, 1e9) == 0
