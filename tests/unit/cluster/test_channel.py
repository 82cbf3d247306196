"""Classes of gRPC failures; TLS problems differ from silence."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.ports import reserved_ports
from tests.support.scripted_grpc import ScriptedServer, fail
from tests.unit.cluster.fakes import PD, members
from tikv_br.cluster.channel import STATUS_ERRORS, open_channel, to_cluster_error
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pb.pdpb_pb2_grpc import PDStub
from tikv_br.cluster.pd import PdClient
from tikv_br.errors import ClusterError, ClusterTlsError, ClusterUnreachable, UsageError

PATIENCE = 60.0
"""Seconds that a server may take to answer."""
AT_ONCE = PATIENCE / 2
"""Seconds within which even a busy machine reports what must not wait for `PATIENCE`."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that signs the servers of a test."""
    return Authority(tmp_path, "authority")


def serve(
    authority: Authority, name: str = "server", *, mutual: bool = False, expired: bool = False, elsewhere: bool = False
) -> ScriptedServer:
    """A PD with TLS that knows its members."""
    pair = authority.issue(name, expired=expired, elsewhere=elsewhere)
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        root_certificates=authority.ca.read_bytes() if mutual else None,
        require_client_auth=mutual,
    )
    server = ScriptedServer(credentials)
    server.script(PD + "GetMembers", members(server.address))
    return server


def connect(server: ScriptedServer, tls: TlsFiles) -> int:
    """Connect and return the cluster's id."""
    config = ClusterConfig(pd=(server.address,), tls=tls, connect_timeout=PATIENCE)
    with PdClient(config) as pd:
        return pd.cluster_id


def test_every_status_has_an_error_class() -> None:
    """No gRPC status is left without a class of ours."""
    assert set(STATUS_ERRORS) == set(grpc.StatusCode)
    assert all(issubclass(error, ClusterError) for error in STATUS_ERRORS.values())


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_each_status_arrives_as_its_class(code: grpc.StatusCode) -> None:
    """A server that fails with a status makes the error of the table, with who, what and the server's words."""
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", fail(code.name, "the server's words"))
        with open_channel(server.address, TlsFiles()) as channel, pytest.raises(grpc.RpcError) as caught:
            PDStub(channel).GetMembers(pdpb_pb2.GetMembersRequest(), timeout=PATIENCE)
    error = to_cluster_error(caught.value, "PD x:1", TlsFiles())
    assert type(error) is STATUS_ERRORS[code]
    assert error.message == f"PD x:1: {code.name}: the server's words"


def test_messages_of_any_size_arrive() -> None:
    """An answer far beyond gRPC's default limit of 4 MiB is received."""
    big = pdpb_pb2.GetMembersResponse()
    big.leader.name = "x" * (20 << 20)
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", big)
        with open_channel(server.address, TlsFiles()) as channel:
            answer = PDStub(channel).GetMembers(pdpb_pb2.GetMembersRequest(), timeout=PATIENCE)
    assert len(answer.leader.name) == 20 << 20


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """An http_proxy setting must not take cluster traffic to a proxy."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ScriptedServer() as server:
        server.script(PD + "GetMembers", members(server.address))
        assert connect(server, TlsFiles()) == 7


@pytest.fixture
def trouble(
    request: pytest.FixtureRequest, authority: Authority, tmp_path: Path
) -> Iterator[tuple[ScriptedServer, TlsFiles]]:
    """A server and TLS files that do not fit, by name."""
    other = Authority(tmp_path, "other")
    stranger = other.issue("stranger")
    kind = request.param
    if kind == "plain server":
        server = ScriptedServer()
        server.script(PD + "GetMembers", members(server.address))
    else:
        mutual = kind in {"no certificate", "foreign certificate"}
        server = serve(authority, mutual=mutual, expired=kind == "expired", elsewhere=kind == "wrong name")
    tls = {
        "wrong authority": TlsFiles(ca=str(other.ca)),
        "no authority": TlsFiles(),
        "foreign certificate": TlsFiles(str(authority.ca), str(stranger.cert), str(stranger.key)),
    }.get(kind, TlsFiles(ca=str(authority.ca)))
    with server:
        yield server, tls


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("wrong authority", "not trusted"),
        ("expired", "not trusted: certificate has expired"),
        ("wrong name", "not trusted: IP address mismatch"),
        ("no authority", "uses TLS, but --ca was not passed"),
        ("no certificate", "requires a client certificate"),
        ("foreign certificate", "refuses our certificate"),
        ("plain server", "does not use TLS"),
    ],
    indirect=["trouble"],
)
def test_certificate_trouble_is_told_at_once(trouble: tuple[ScriptedServer, TlsFiles], words: str) -> None:
    """Each way in which certificates do not fit ends at once with its own words and exit code."""
    server, tls = trouble
    began = time.monotonic()
    with pytest.raises(ClusterTlsError) as caught:
        connect(server, tls)
    assert words in caught.value.message
    assert server.address in caught.value.message
    assert time.monotonic() - began < AT_ONCE


def test_messages_never_name_the_key(authority: Authority, tmp_path: Path) -> None:
    """Neither the path of the key nor its text is in the message about a key that does not fit."""
    ours, other = authority.issue("ours"), authority.issue("another")
    with pytest.raises(ClusterTlsError) as caught:
        TlsFiles(str(authority.ca), str(ours.cert), str(other.key)).ssl_context()
    assert "another" not in caught.value.message
    with pytest.raises(UsageError) as missing:
        TlsFiles(str(authority.ca), str(ours.cert), str(tmp_path / "secret-place.key")).ssl_context()
    assert missing.value.message == "--key: cannot read the file: No such file or directory"


def test_an_authority_that_is_no_certificate_is_told(tmp_path: Path) -> None:
    """A file that holds no PEM is said to be of no use, before anything is dialled."""
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    with pytest.raises(ClusterTlsError, match="--ca contains no usable certificate"):
        TlsFiles(ca=str(path)).ssl_context()


def test_nobody_there_is_unreachable() -> None:
    """A closed port is no TLS problem, and is reported at once with its address."""
    with reserved_ports(1) as [port]:
        address = f"127.0.0.1:{port}"
        began = time.monotonic()
        with pytest.raises(ClusterUnreachable) as caught:
            PdClient(ClusterConfig(pd=(address,), connect_timeout=PATIENCE, retry_budget=PATIENCE))
    assert caught.value.message == f"no PD answers at {address}: Connection refused"
    assert time.monotonic() - began < AT_ONCE


def test_a_silent_server_is_unreachable_within_the_timeout() -> None:
    """A server that accepts and says nothing is given up after the connect timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterUnreachable):
            PdClient(ClusterConfig(pd=(address,), connect_timeout=1.0, retry_budget=PATIENCE))
        assert time.monotonic() - began < AT_ONCE
