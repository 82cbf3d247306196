"""The sink to a cluster, at playgrounds of each API version and under faults."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.incremental.conftest import Clusters
from tests.support.live_cluster import LiveCluster, contents
from tests.unit.incremental.changes import Change, batch
from tests.unit.incremental.sink_suite import FUTURE, PAST, SinkSuite, State
from tikv_br.cluster.puts import ColumnWriter
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.rawkv import RawClient
from tikv_br.errors import ApiVersionMismatch, ConversionUnsupported, RetryBudgetExhausted, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import Flags
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.open import Origin, SinkOptions, open_sink
from tikv_br.incremental.sinks.tikv import TikvSink
from tikv_br.incremental.sinks.url import TikvTarget, parse

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
PLACES = [(V1, 0), (V1TTL, 0), (V2, 0), (V2, 4242)]
ELSEWHERE = Origin(cluster_id=1, keyspace_id=0)


@pytest.fixture
def v2(clusters: Clusters) -> Iterator[LiveCluster]:
    """An empty V2 cluster, healed afterwards."""
    live = clusters(V2)
    live.raw().delete_range(EVERY_KEY)
    yield live
    live.heal()


class TestTikvSink(SinkSuite):
    """A keyspace of each kind of cluster."""

    @pytest.fixture(params=PLACES, ids=lambda place: f"{place[0].label}-{place[1]}")
    def place(self, clusters: Clusters, request: pytest.FixtureRequest) -> tuple[LiveCluster, int]:
        """An empty keyspace."""
        version, keyspace_id = request.param
        live = clusters(version)
        live.raw(keyspace_id).delete_range(EVERY_KEY)
        return live, keyspace_id

    @pytest.fixture
    def sink(self, place: tuple[LiveCluster, int]) -> Iterator[Sink]:
        """See `SinkSuite.sink`."""
        live, keyspace_id = place
        target = parse(f"tikv://{live.pd}?keyspace={keyspace_id}")
        with open_sink(target, ELSEWHERE) as sink:
            yield sink

    @pytest.fixture
    def state(self, place: tuple[LiveCluster, int]) -> State:
        """See `SinkSuite.state`."""
        return lambda: contents(*place)


@pytest.mark.parametrize("version", [V1TTL, V2])
def test_remaining_ttls_are_kept(clusters: Clusters, version: ApiVersion) -> None:
    """TTLs at the target end at the absolute expiry, and rows without one never expire."""
    live = clusters(version)
    raw = live.raw()
    with open_sink(TikvTarget((live.pd,)), ELSEWHERE) as sink:
        sink.write(batch([Change(1, b"short", b"v", FUTURE), Change(2, b"never", b"v")]))
    check_expiry(raw, b"short")
    assert raw.get_ttl(b"never") == 0


def test_rows_that_only_a_forged_message_has(v2: LiveCluster) -> None:
    """Times beyond every calendar are written; a key that no store takes is refused in a sentence, and nothing else is."""
    last = (1 << 64) - 1
    with open_sink(TikvTarget((v2.pd,)), ELSEWHERE) as sink:
        sink.write(batch([Change(last, b"late", b"v", last), Change(5, b"", b"", 1 << 63)]))
        with pytest.raises(UsageError, match="max key size exceeded"):
            sink.write(batch([Change(6, b"k" * 70_000, b"v")]))
    assert contents(v2) == {b"late": b"v", b"": b""}


def test_waiting_for_a_busy_store_lengthens_no_life(v2: LiveCluster) -> None:
    """A row that waits for seconds at a busy store expires when it should."""
    busy = {"region_error": {"server_is_busy": {"backoff_ms": 8000}}}
    with v2.failing("RawBatchPut", busy), open_sink(TikvTarget((v2.pd,)), ELSEWHERE) as sink:
        sink.write(batch([Change(1, b"k", b"v", FUTURE)]))
    check_expiry(v2.raw(), b"k")


def check_expiry(raw: RawClient, key: bytes) -> None:
    """The key expires at `FUTURE`, give or take what a busy machine adds to one request."""
    before = time.time()
    ttl = raw.get_ttl(key)
    assert ttl is not None
    assert before + ttl - FUTURE < 6
    assert time.time() + ttl - FUTURE > -2


def test_a_put_that_expires_before_it_is_sent_deletes(v2: LiveCluster) -> None:
    """A busy store delays the row until it has expired: the older row of the key goes, as it has at the source."""
    v2.raw().put(b"k", b"old")
    v2.fail("RawBatchPut", {"region_error": {"server_is_busy": {"backoff_ms": "3000"}}})
    sink = TikvSink(v2.raw())
    sink.write(batch([Change(1, b"k", b"new", int(time.time()) + 2), Change(2, b"lasting", b"v")]))
    sink.close()
    assert contents(v2) == {b"lasting": b"v"}


def test_a_target_without_ttls_takes_expiring_rows_with_leave_only(clusters: Clusters) -> None:
    """A V1 target refuses a row that expires before anything of the batch is written; with leave it keeps it."""
    live = clusters(V1)
    live.raw().delete_range(EVERY_KEY)
    rows = batch([Change(1, b"a", b"1"), Change(2, b"b", b"2", FUTURE)])
    with open_sink(TikvTarget((live.pd,)), ELSEWHERE) as sink:
        with pytest.raises(ConversionUnsupported, match="1 of the changes have a TTL"):
            sink.write(rows)
        assert contents(live) == {}
        sink.write(batch([Change(3, b"c", b"3", PAST)]))
    with open_sink(TikvTarget((live.pd,)), ELSEWHERE, SinkOptions(drop_ttls=True)) as sink:
        sink.write(rows)
        assert isinstance(sink, TikvSink)
        assert sink.dropped_ttls == 1
    assert contents(live) == {b"a": b"1", b"b": b"2"}


FAULTS = {
    "busy": {"region_error": {"server_is_busy": {"reason": "test", "backoff_ms": 100}}},
    "lost": {"drop": {}},
    "slow": {"delay": {"seconds": 0.3}},
    "leader": {"region_error": {"not_leader": {}}},
    "large": {"region_error": {"raft_entry_too_large": {"entry_size": 1}}},
    "max ts": {"region_error": {"max_timestamp_not_synced": {}}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_lose_no_row(v2: LiveCluster, fault: str) -> None:
    """Each fault, several times for puts and for deletes: all rows end as they should."""
    rows = {b"%c%04d" % (at % 250, at): b"v%d" % at for at in range(2000)}
    with (
        v2.failing("RawBatchPut", FAULTS[fault], count=2, skip=1),
        v2.failing("RawBatchDelete", FAULTS[fault], count=1),
        open_sink(TikvTarget((v2.pd,)), ELSEWHERE) as sink,
    ):
        sink.write(batch([Change(ts, key, value) for ts, (key, value) in enumerate(rows.items(), 1)]))
        gone = sorted(rows)[::3]
        sink.write(batch([Change(10_000 + ts, key, deleted=True) for ts, key in enumerate(gone)]))
    assert contents(v2) == {key: value for key, value in rows.items() if key not in set(gone)}


def test_regions_that_move_while_it_writes(v2: LiveCluster) -> None:
    """With splits and leaders moving all the while, each batch arrives whole, and the last value of each key stays."""
    stop = threading.Event()

    def move() -> None:
        bounds = itertools.cycle(range(1, 250))
        while not stop.wait(0.05):
            codec = v2.raw().codec
            v2.split(codec.bound(codec.rpc_key(bytes([next(bounds)]))))

    mover = threading.Thread(target=move)
    mover.start()
    try:
        with open_sink(TikvTarget((v2.pd,)), ELSEWHERE) as sink:
            for turn in range(8):
                keys = [b"%c%03d" % (at % 250, at) for at in range(1000)]
                sink.write(batch([Change(turn * 1000 + at + 1, key, b"%d" % turn) for at, key in enumerate(keys)]))
    finally:
        stop.set()
        mover.join()
    assert contents(v2) == dict.fromkeys(keys, b"7")


def test_a_target_that_stays_away_is_said_and_the_batch_can_come_again(v2: LiveCluster) -> None:
    """Once the budget is spent the sink raises; the same batch goes through later."""
    rows = batch([Change(1, b"a", b"1"), Change(2, b"b", deleted=True)])
    sink = TikvSink(v2.raw())
    v2.fail("RawBatchPut", {"region_error": {"region_not_found": {"region_id": 1}}}, count=-1)
    with pytest.raises(RetryBudgetExhausted, match="RawBatchPut"):
        sink.write(rows)
    v2.disarm()
    sink.write(rows)
    sink.close()
    assert contents(v2) == {b"a": b"1"}


def test_the_target_must_be_what_it_is_said_to_be(v2: LiveCluster) -> None:
    """Another API version than said, a keyspace that cannot be, and the source itself are refused."""
    with pytest.raises(ApiVersionMismatch), open_sink(TikvTarget((v2.pd,), "", V1), ELSEWHERE):
        pass
    with pytest.raises(UsageError), open_sink(TikvTarget((v2.pd,), "99999999"), ELSEWHERE):
        pass
    source = Origin(v2.cluster.cluster_id, 0)
    with pytest.raises(UsageError, match="same keyspace"), open_sink(TikvTarget((v2.pd,)), source):
        pass
    v2.create_keyspace("ks7")
    with open_sink(TikvTarget((v2.pd,), "ks7"), source):
        pass


def test_closing_waits_for_no_write() -> None:
    """A second signal breaks a write off whose store says nothing: its calls end with the cluster's connections, later."""
    begun, enough = threading.Event(), threading.Event()

    class SilentWriter(ColumnWriter):
        def __init__(self) -> None:
            """Connects to nothing."""

        def put(self, *_columns: object) -> Flags:
            begun.set()
            enough.wait(20)
            return np.zeros(1, np.bool_)

    class Silent(RawClient):
        def __init__(self) -> None:
            self.codec, self.cluster_id, self.now = KeyCodec(V2), 1, lambda: 0

        def column_writer(self, batch_rows: int = 1, rate_limit: RateLimit | None = None) -> ColumnWriter:
            del batch_rows, rate_limit
            return SilentWriter()

    sink = TikvSink(Silent())
    writer = threading.Thread(target=sink.write, args=(batch([Change(1, b"k", b"v")]),))
    writer.start()
    assert begun.wait(60)
    began = time.monotonic()
    sink.close()
    assert time.monotonic() - began < 10
    enough.set()
    writer.join(60)
    assert not writer.is_alive()
