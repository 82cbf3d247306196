"""The client and a cluster that wants certificates on all of its ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.certificates import Authority
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[..., TlsFiles]]]:
    """A V2 cluster that wants certificates on all ports: its PD, and TLS files of ours by what is in them."""
    folder = tmp_path_factory.mktemp("secured")
    authority, stranger = Authority(folder, "authority"), Authority(folder, "stranger")
    servers, ours, theirs = authority.issue("servers"), authority.issue("ours"), stranger.issue("theirs")
    tls = TlsSettings(str(authority.ca), str(servers.cert), str(servers.key), mutual=True)
    settings = {"api_version": ApiVersion.V2.value, "stores": 2, "tls": tls}
    started = launcher.start(folder / "data", settings, detached=False)

    def files(ca: str = "authority", pair: str = "ours") -> TlsFiles:
        chosen = {"ours": ours, "theirs": theirs, "none": None}[pair]
        path = str({"authority": authority, "stranger": stranger}[ca].ca)
        return TlsFiles(path, str(chosen.cert), str(chosen.key)) if chosen else TlsFiles(path)

    try:
        yield started.state["pd"], files
    finally:
        started.process.terminate()
        started.process.wait(60)


@pytest.mark.core("tls")
def test_mutual_tls_works_on_every_port(secured: tuple[str, Callable[..., TlsFiles]]) -> None:
    """PD's gRPC and HTTP, the stores' gRPC and status ports all take our certificate."""
    pd, files = secured
    with Cluster.connect(ClusterConfig(pd=(pd,), tls=files())) as cluster:
        assert cluster.info().api_version is ApiVersion.V2
        cluster.raw().put(b"k", b"v")
        assert cluster.raw().get(b"k") == b"v"
        cluster.flush_timestamps()
