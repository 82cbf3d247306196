"""TLS on PD's one port (gRPC and HTTP), on the stores and on their status servers."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from tests.integration.playground.clients import running
from tests.support.certificates import Authority, KeyPair
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings


def settings(authority: Authority, *, mutual: bool) -> TlsSettings:
    """The servers' side."""
    server = authority.issue("server")
    return TlsSettings(str(authority.ca), str(server.cert), str(server.key), mutual)


def credentials(ca: Path, client: KeyPair | None = None) -> grpc.ChannelCredentials:
    """The client's side."""
    return grpc.ssl_channel_credentials(
        ca.read_bytes(),
        client.key.read_bytes() if client else None,
        client.cert.read_bytes() if client else None,
    )


def https(address: str, path: str, ca: Path, client: KeyPair | None = None) -> int:
    """The status of a GET over TLS."""
    context = ssl.create_default_context(cafile=str(ca))
    if client:
        context.load_cert_chain(client.cert, client.key)
    with urllib.request.urlopen(f"https://{address}{path}", context=context, timeout=60) as answer:
        return int(answer.status)


def test_tls_without_client_certificates(tmp_path: Path) -> None:
    """Clients that trust the authority are accepted everywhere; PD's members have https URLs."""
    authority = Authority(tmp_path, "authority")
    tls = settings(authority, mutual=False)
    with running(tmp_path / "data", tls=tls, stores=1, client=credentials(authority.ca)) as client:
        client.put(b"k", b"v")
        assert client.get(b"k") == b"v"
        [url] = client.pd.GetMembers(pdpb_pb2.GetMembersRequest()).leader.client_urls
        assert url == f"https://{client.playground.state.address}"
        assert https(client.playground.state.address, "/pd/api/v1/health", authority.ca) == 200
        assert https(client.playground.nodes[1].status_address, "/config", authority.ca) == 200


def test_a_wrong_authority_is_not_trusted(tmp_path: Path) -> None:
    """A client with another authority refuses all three kinds of server, and the servers live on."""
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    tls = settings(authority, mutual=False)
    with running(tmp_path / "data", tls=tls, stores=1, client=credentials(other.ca)) as client:
        for call in (lambda: client.pd.GetMembers(pdpb_pb2.GetMembersRequest(), timeout=60), lambda: client.get(b"k")):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for address in (client.playground.state.address, client.playground.nodes[1].status_address):
            with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
                https(address, "/", other.ca)
        assert https(client.playground.state.address, "/pd/api/v1/health", authority.ca) == 200


def test_mutual_tls_demands_a_certificate(tmp_path: Path) -> None:
    """With --mutual-tls only clients with a certificate of the authority get in, by gRPC and by HTTP."""
    authority = Authority(tmp_path, "authority")
    known = authority.issue("client")
    tls = settings(authority, mutual=True)
    with running(tmp_path / "data", tls=tls, stores=1, client=credentials(authority.ca, known)) as client:
        client.put(b"k", b"v")
        assert client.get(b"k") == b"v"
        assert client.pd.GetMembers(pdpb_pb2.GetMembersRequest()).leader.name == "pd1"
        pd = client.playground.state.address
        assert https(pd, "/pd/api/v1/health", authority.ca, known) == 200
        client.close()
        client.credentials = credentials(authority.ca)
        client._channels.clear()
        with pytest.raises(grpc.RpcError):
            client.pd.GetMembers(pdpb_pb2.GetMembersRequest(), timeout=60)
        with pytest.raises(grpc.RpcError):
            client.get(b"k")
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            https(pd, "/pd/api/v1/health", authority.ca)


def test_plain_text_on_a_tls_port_is_dropped(tmp_path: Path) -> None:
    """A client that speaks no TLS loses its connection; others are served."""
    authority = Authority(tmp_path, "authority")
    tls = settings(authority, mutual=False)
    with running(tmp_path / "data", tls=tls, stores=1, client=credentials(authority.ca)) as client:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://{client.playground.state.address}/pd/api/v1/health", timeout=60)
        assert client.pd.GetMembers(pdpb_pb2.GetMembersRequest()).leader.name == "pd1"


def test_the_process_starts_with_tls(tmp_path: Path) -> None:
    """The launcher, too, finds a TLS playground answering, mutual or not."""
    authority = Authority(tmp_path, "authority")
    state = launcher.start(tmp_path / "data", {"stores": 1, "tls": settings(authority, mutual=True)}).state
    try:
        assert state["tls"] is True
        assert launcher.status(tmp_path / "data")["answers"] is True
    finally:
        launcher.stop(tmp_path / "data")
