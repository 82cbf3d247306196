"""The loader: everything once, in order for equal keys, and what has expired left out."""

from __future__ import annotations

import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from tikv_br.cluster.clock import seconds_now
from tikv_br.cluster.puts import ColumnWriter
from tikv_br.errors import RequestRefused, UsageError
from tikv_br.formats import columns
from tikv_br.load.loader import RowSource, load_pairs, made_pairs
from tikv_br.progress_events import Event, TasksProgress


class FakeClient(ColumnWriter):
    """Keeps what is put, as a cluster would, and how many puts ran at once."""

    def __init__(self, at_once: int = 1) -> None:
        """No put ends before so many were under way."""
        self.pairs: dict[bytes, tuple[bytes, int]] = {}
        self.most = 0
        self._at_once = at_once
        self._overlap = threading.Event()
        self._running = 0
        self._lock = threading.Lock()

    now = staticmethod(lambda: seconds_now(0))

    def put(
        self,
        keys: pa.LargeBinaryArray,
        values: pa.LargeBinaryArray,
        expire_ts: columns.Numbers | None = None,
        ttl: int = 0,
    ) -> columns.Flags:
        """Take pairs, whose keys must ascend. None expires on the way."""
        assert expire_ts is not None
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
            if self.most >= self._at_once:
                self._overlap.set()
        assert self._overlap.wait(60)
        names, now = keys.to_pylist(), int(time.time())
        assert names == sorted(set(names))
        ttls = [int(each) - now if each else ttl for each in expire_ts]
        with self._lock:
            self.pairs.update(zip(names, zip(values.to_pylist(), ttls, strict=True), strict=True))
            self._running -= 1
        return np.zeros(len(names), np.bool_)


def source(*batches: list[tuple[bytes, bytes, int]]) -> RowSource:
    """Return a source of (key, value, expire_ts) rows."""
    return RowSource(
        [
            columns.records(
                columns.from_list([row[0] for row in rows]),
                columns.from_list([row[1] for row in rows]),
                expire_ts=np.array([row[2] for row in rows], np.uint64),
            )
            for rows in batches
        ]
    )


def test_everything_is_put_in_parallel_parts() -> None:
    """All pairs arrive, with several concurrent requests but no more than allowed, and the sums are right."""
    client = FakeClient(at_once=2)
    events: list[Event] = []
    loaded = load_pairs(client, made_pairs(40_000, 10, 1), concurrency=4, reporter=events.append)
    assert len(client.pairs) == loaded.total_kvs == 40_000
    assert loaded.total_bytes == 40_000 * (len("key-") + 12 + 10)
    assert 1 < client.most <= 4
    last = events[-1]
    assert isinstance(last, TasksProgress)
    assert (last.keys_done, last.fraction) == (40_000, 1.0)


def test_last_of_equal_keys_wins() -> None:
    """A key that comes again, in the same batch or a later one, ends with its last value."""
    client = FakeClient()
    rows = [(b"a", b"1", 0), (b"b", b"1", 0), (b"a", b"2", 0)]
    load_pairs(client, source(rows, [(b"b", b"3", 0)]), concurrency=4)
    assert client.pairs == {b"a": (b"2", 0), b"b": (b"3", 0)}


def test_expiry_becomes_a_ttl() -> None:
    """An absolute expiry is put as the seconds left, none as the default, and what has expired is counted, not put."""
    client = FakeClient()
    now = int(time.time())
    loaded = load_pairs(
        client, source([(b"soon", b"", now + 1000), (b"never", b"", 0), (b"gone", b"", now - 1)]), ttl=7
    )
    assert client.pairs[b"never"] == (b"", 7)
    assert 900 < client.pairs[b"soon"][1] <= 1000
    assert b"gone" not in client.pairs
    assert (loaded.total_kvs, loaded.expired_kvs) == (2, 1)


def test_rows_that_expire_before_they_are_sent_are_counted_as_expired() -> None:
    """Omitted pairs count as expired, neither as pairs nor in the bytes."""

    class Late(FakeClient):
        def put(
            self,
            keys: pa.LargeBinaryArray,
            values: pa.LargeBinaryArray,
            expire_ts: columns.Numbers | None = None,
            ttl: int = 0,
        ) -> columns.Flags:
            assert expire_ts is not None
            super().put(keys, values, expire_ts, ttl)
            return expire_ts > 0

    rows = [(b"a", b"1", 0), (b"bb", b"22", int(time.time()) + 1000), (b"c", b"3", 0)]
    loaded = load_pairs(Late(), source(rows), concurrency=2)
    assert (loaded.total_kvs, loaded.total_bytes, loaded.expired_kvs) == (2, 4, 1)


def test_duplicates_are_not_counted_as_expired() -> None:
    """Only what has expired is counted as expired."""
    loaded = load_pairs(FakeClient(), source([(b"a", b"1", 0), (b"a", b"2", 0)]))
    assert (loaded.total_kvs, loaded.expired_kvs) == (1, 0)


def test_error_of_the_cluster_is_raised() -> None:
    """The error of one request ends the load."""

    class Refusing(FakeClient):
        def put(self, *rows: object) -> columns.Flags:
            raise RequestRefused("no")

    with pytest.raises(RequestRefused):
        load_pairs(Refusing(), made_pairs(10, 10, 1))


def test_tombstones_are_refused() -> None:
    """A deleted record cannot be put, and is not silently made a pair."""
    batch = columns.records(columns.from_list([b"a"]), columns.from_list([b""]), deleted=np.array([True], np.bool_))
    with pytest.raises(UsageError, match="tombstone"):
        load_pairs(FakeClient(), RowSource([batch]))
