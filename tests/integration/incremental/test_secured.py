"""A sync of a part of a keyspace, from a cluster that wants certificates to one that has no TLS."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.incremental.conftest import Clusters
from tests.integration.incremental.forked_sync import Syncs
from tests.support.certificates import Authority
from tests.support.live_cluster import contents
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings

KEYSPACE = 4242
PATIENCE = 120.0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterConfig]:
    """A cluster of API V2 that wants certificates on all ports."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder, "authority")
    servers, ours = authority.issue("servers"), authority.issue("ours")
    tls = TlsSettings(str(authority.ca), str(servers.cert), str(servers.key), mutual=True)
    settings = {"api_version": ApiVersion.V2.value, "stores": 2, "regions": 4, "tls": tls}
    settings["keyspaces"] = (f"part={KEYSPACE}",)
    started = launcher.start(folder / "data", settings, detached=False)
    try:
        files = TlsFiles(str(authority.ca), str(ours.cert), str(ours.key))
        yield ClusterConfig(pd=(started.state["pd"],), tls=files)
    finally:
        started.process.terminate()
        started.process.wait(60)


def test_a_part_of_a_keyspace_over_tls(secured: ClusterConfig, targets: Clusters, tmp_path: Path) -> None:
    """Only rows of the range and the keyspace arrive, in another keyspace, and nobody is asked for certificates there."""
    target = targets(ApiVersion.V2)
    target.raw().delete_range(EVERY_KEY)
    files = secured.tls
    assert files.ca is not None
    assert files.cert is not None
    assert files.key is not None
    asked = ["--pd", secured.pd[0], "--ca", files.ca, "--cert", files.cert, "--key", files.key]
    asked += ["--keyspace", str(KEYSPACE), "--start", "b", "--end", "d", "--start-ts", "now", "--hold-back", "0s"]
    asked += ["--sink", f"tikv://{target.pd}?keyspace=0", "--sink-ca", "", "--state-dir", str(tmp_path)]
    with Cluster.connect(secured) as cluster, Syncs() as syncs:
        pid = syncs.begin(asked)
        raw, until = cluster.raw(KEYSPACE), time.monotonic() + PATIENCE
        while contents(target) != {b"b": b"2", b"c": b"3"}:
            assert time.monotonic() < until
            raw.batch_put({b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"})
            raw.delete(b"bb")
            cluster.raw().put(b"c", b"of another keyspace")
            time.sleep(0.5)
        syncs.end(pid)
