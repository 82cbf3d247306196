"""Programs that do GC themselves, beside which no other one may."""

from __future__ import annotations

import pytest

from tests.unit.gc.fakes import FakeEtcd
from tikv_br.cluster.etcd_values import KeyValue
from tikv_br.cluster.pd_http import GcStatus
from tikv_br.cluster.timestamps import compose, minus_seconds
from tikv_br.errors import ClusterUnfit, ClusterUnreachable, EtcdUnreachable
from tikv_br.gc.worker import check_no_other_gc, check_no_tidb

NOW = compose(1_800_000_000_000)
HOUR = 3600


@pytest.mark.parametrize("server", ["/tidb/server/info/5c4a", "/keyspaces/tidb/7/tidb/server/info/5c4a"])
def test_tidb_is_seen(server: str) -> None:
    """By the servers that it has registered, with and without a keyspace."""
    etcd = FakeEtcd()
    etcd.items[server] = KeyValue(server, b"{}", 1, 1, 1)
    with pytest.raises(ClusterUnfit, match=f"TiDB uses the cluster: it registered {server} in PD's etcd"):
        check_no_tidb(etcd)


def test_what_is_not_tidb() -> None:
    """PD itself writes the safe points of transactions below TiDB's names, here and for each keyspace."""
    etcd = FakeEtcd()
    for key in ("/tidb/store/gcworker/saved_safe_point", "/keyspaces/tidb/7/tidb/store/gcworker/saved_safe_point"):
        etcd.items[key] = KeyValue(key, b"1", 1, 1, 0)
    check_no_tidb(etcd)


def test_an_etcd_that_is_silent() -> None:
    """Is a failure of PD, after which the round is tried again, and not one of the election."""
    etcd = FakeEtcd()
    etcd.failure = EtcdUnreachable("no member answers")
    with pytest.raises(ClusterUnreachable, match="PD's etcd: no member answers"):
        check_no_tidb(etcd)


@pytest.mark.parametrize(
    ("safe_point", "worker", "refused"),
    [
        (0, 0, False),
        (3 * HOUR, 3 * HOUR, False),
        (4 * HOUR, 3 * HOUR, False),
        (3 * HOUR, 4 * HOUR, True),
        (3 * HOUR, 0, True),
        (25 * HOUR, 0, False),
    ],
)
def test_a_safe_point_that_another_program_moved(safe_point: int, worker: int, *, refused: bool) -> None:
    """It is ahead of gc_worker's, which a GC worker registers before; one of the day before is taken for the past. Ages; 0 = none."""
    values = [minus_seconds(NOW, age) if age else 0 for age in (safe_point, worker)]
    status = GcStatus(values[0], (), values[1])
    if refused:
        with pytest.raises(ClusterUnfit, match="another program does GC") as raised:
            check_no_other_gc(status, NOW)
        assert "gc-interval=0" in raised.value.hint
    else:
        check_no_other_gc(status, NOW)
