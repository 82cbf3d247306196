"""Cluster configuration from flags."""

from __future__ import annotations

import pickle

import pytest

from tikv_br.cluster.config import ClusterConfig, parse_addresses, split_address
from tikv_br.errors import UsageError


def test_addresses_lose_scheme_and_doubles() -> None:
    """PD addresses may have a scheme, spaces and repetitions; the result is host:port."""
    assert parse_addresses("http://a:1, b:2,https://a:1/") == ("a:1", "b:2")


@pytest.mark.parametrize("text", ["", " , ", "nohost", ":2379", "a:", "a:0", "a:65536", "a:b", "a:-1"])
def test_invalid_addresses_are_usage_errors(text: str) -> None:
    """The error comes before any connection attempt."""
    with pytest.raises(UsageError):
        parse_addresses(text)


def test_ipv6_addresses_lose_their_brackets() -> None:
    """Sockets want an IPv6 host without brackets."""
    assert split_address("[::1]:2379") == ("::1", 2379)


def test_config_travels_to_tasks() -> None:
    """A config pickles to an equal one."""
    config = ClusterConfig.from_flags("a:1", ca="/ca", cert="/cert", key="/key")
    assert pickle.loads(pickle.dumps(config)) == config


def test_config_never_shows_the_key() -> None:
    """The path of the private key is in no repr."""
    config = ClusterConfig.from_flags("a:1", ca="/ca", cert="/cert", key="/very/secret")
    assert "secret" not in repr(config)


@pytest.mark.parametrize(("cert", "key", "ca"), [("c", None, "a"), (None, "k", "a"), ("c", "k", None)])
def test_half_a_client_certificate_is_refused(cert: str | None, key: str | None, ca: str | None) -> None:
    """A certificate without its key, a key without its certificate, or both without an authority make no sense."""
    with pytest.raises(UsageError):
        ClusterConfig.from_flags("a:1", ca=ca, cert=cert, key=key)


def test_ipv6_addresses_need_brackets() -> None:
    """Else the port could be a part of the host."""
    with pytest.raises(UsageError) as refused:
        parse_addresses("::1:2379")
    assert refused.value.hint == "Write an IPv6 address in brackets: [::1]:2379."


@pytest.mark.parametrize("text", ["https://a:1", "a:1,https://b:2"])
def test_tls_that_an_address_asks_for_needs_a_ca(text: str) -> None:
    """It is refused, and not spoken without TLS."""
    with pytest.raises(UsageError, match=r"--pd https://.* asks for TLS, but --ca was not passed"):
        ClusterConfig.from_flags(text)
    assert ClusterConfig.from_flags(text, ca="file").tls.enabled
    assert not ClusterConfig.from_flags("http://a:1").tls.enabled
