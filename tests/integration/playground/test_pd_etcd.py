"""The etcd of the playground's PD beside a real one: the same calls have the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.etcd import real_etcd
from tests.support.live_cluster import live_cluster
from tests.support.waiting import eventually
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    absent,
    created_at,
    modified_at,
    none_with,
)
from tikv_br.errors import EtcdLeaseExpired
from tikv_br.formats.api_version import ApiVersion


def relative(item: KeyValue, base: int) -> tuple[object, ...]:
    """A key with its revisions counted from a base, which depends on the server."""
    return item.key, item.value, item.create_revision - base, item.mod_revision - base


def outcomes(etcd: Etcd) -> list[object]:
    """Results of keys, transactions and leases."""
    base = etcd.put("/a/1", b"one")
    seen: list[object] = [etcd.put("/a/2", b"two") - base, etcd.put("/a/1", b"\xff") - base, etcd.delete("/none")]
    conditions: list[list[Compare]] = [
        [absent("/a/1")],
        [none_with("/a/")],
        [none_with("/b/"), created_at("/a/1", base)],
        [modified_at("/a/1", base)],
        [modified_at("/none", 0)],
        [],
    ]
    for number, compares in enumerate(conditions):
        then: list[Operation] = [Put(f"/t/{number}", b"x"), Get("/t/", prefix=True), Delete("/a/2")]
        done = etcd.transact(compares, then, [Get("/a/", prefix=True)])
        listings = [[relative(item, base) for item in listing.items] for listing in done.listings]
        seen.append((done.succeeded, done.revision - base, listings))
    lease = etcd.grant(60)
    etcd.put("/l/1", b"", lease)
    seen += [etcd.keep_alive(lease), [item.key for item in etcd.range("/l/").items]]
    etcd.revoke(lease)
    seen += [etcd.get("/l/1"), etcd.delete("/a/", prefix=True), etcd.range("/").revision - base]
    with pytest.raises(EtcdLeaseExpired):
        etcd.put("/l/2", b"", lease)
    with pytest.raises(EtcdLeaseExpired):
        etcd.keep_alive(lease)
    short = etcd.grant(1)
    etcd.put("/l/3", b"", short)
    eventually(lambda: etcd.get("/l/3") is None)
    return seen


def test_pd_answers_as_a_real_etcd(tmp_path: Path) -> None:
    """Revisions, conditions of keys and prefixes, deletions and leases are those of etcd."""
    with (
        live_cluster(tmp_path / "pd", ApiVersion.V2, stores=1) as live,
        real_etcd(tmp_path / "etcd") as server,
        Etcd.connect([live.pd]) as ours,
        Etcd.connect([server.address]) as real,
    ):
        assert outcomes(ours) == outcomes(real)
