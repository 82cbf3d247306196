"""What clusters guarantee to tests, be they playgrounds or real servers: each verb of `ClusterContract`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs
import pytest

from tests.support.certificates import Authority
from tests.support.cluster_contract import ClusterContract
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import ClusterError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.settings import TlsSettings

ROWS = {b"row%02d" % number: b"value" for number in range(40)}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster of two stores, whose regions have a voter on each."""
    with live_cluster(tmp_path_factory.mktemp("two"), ApiVersion.V2, stores=2, election_timeout=1.0) as running:
        running.raw().batch_put(ROWS)
        yield running


def region_of(live: LiveCluster, key: bytes) -> dict[str, Any]:
    """Return the region that has a user key."""
    codec = live.raw().codec
    bound = codec.bound(codec.rpc_key(key)).hex()
    return next(
        dict(each) for each in live.regions() if each["start"] <= bound and (not each["end"] or bound < each["end"])
    )


def test_both_providers_have_all_verbs(live: LiveCluster) -> None:
    """A type checker compares their signatures."""
    contract: ClusterContract = live
    assert len(contract.store_ids) == 2
    assert len({region["leader_store"] for region in contract.regions()} - set(contract.store_ids)) == 0


def test_regions_split_merge_and_have_leaders_where_they_are_told(live: LiveCluster) -> None:
    """After each verb PD shows what was asked for, and no row is lost."""
    codec = live.raw().codec
    bound = codec.bound(codec.rpc_key(b"row20"))
    live.split(bound)
    left, right = region_of(live, b"row19"), region_of(live, b"row20")
    assert left["end"] == right["start"] == bound.hex()
    for store_id in live.store_ids:
        live.transfer_leader(region_id=right["id"], store_id=store_id)
        assert region_of(live, b"row20")["leader_store"] == store_id
    assert contents(live) == ROWS
    live.merge(source=left["id"], target=right["id"])
    assert region_of(live, b"row19")["id"] == right["id"] == region_of(live, b"row20")["id"]
    assert contents(live) == ROWS


def test_safe_points_and_keyspaces_are_pd_s(live: LiveCluster) -> None:
    """They are seen by PD's HTTP API."""
    live.cluster.pd.update_service_safe_point("contract", 60, live.cluster.pd.tso())
    assert "contract" in live.safe_points()
    live.cluster.pd.update_service_safe_point("contract", 0, 0)
    assert "contract" not in live.safe_points()
    created = live.create_keyspace("contract")
    assert created == live.create_keyspace("contract") != 0


@pytest.mark.slow
def test_stores_die_freeze_and_return(tmp_path: Path) -> None:
    """A dead store refuses, a frozen one is silent, and both have their rows afterwards."""
    with live_cluster(tmp_path, ApiVersion.V1, stores=1) as live:
        live.raw().batch_put(ROWS)
        store = live.store_ids[0]
        hurried = msgspec.structs.replace(live.config, retry_budget=0.5, request_timeout=1.0)
        with Cluster.connect(hurried) as impatient:
            live.kill_store(store)
            with pytest.raises(ClusterError):
                impatient.raw().get(b"row00")
            live.restart_store(store)
            eventually(lambda: contents(live) == ROWS)
            with live.frozen_store(store), pytest.raises(ClusterError):
                impatient.raw().get(b"row00")
        eventually(lambda: contents(live) == ROWS)


@pytest.mark.slow
def test_members_of_pd_lead_die_and_return(tmp_path: Path) -> None:
    """Timestamps go on after each change of the leader."""
    with live_cluster(tmp_path, ApiVersion.V2, stores=1, pd_members=3) as live:
        last = live.cluster.pd.tso()
        for kill in (False, True):
            assert live.change_pd_leader(kill=kill, seconds=2)
            live.await_pd()
            assert live.cluster.pd.tso() > last
            last = live.cluster.pd.tso()
        live.kill_pd(seconds=1)
        live.await_pd()
        assert live.cluster.pd.tso() > last


def test_servers_use_tls(tmp_path: Path) -> None:
    """Clients of the contract are given the certificates."""
    authority = Authority(tmp_path, "authority")
    pair = authority.issue("server")
    tls = TlsSettings(str(authority.ca), str(pair.cert), str(pair.key))
    with live_cluster(tmp_path / "cluster", ApiVersion.V2, stores=1, tls=tls) as live:
        live.raw().batch_put(ROWS)
        assert contents(live) == ROWS
        assert live.safe_points() == {}
