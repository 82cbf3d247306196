"""The etcd that the flags select."""

from __future__ import annotations

import pytest

from tikv_br.cli.shared import ClusterFlags, EtcdFlags
from tikv_br.errors import UsageError

SOURCE = ClusterFlags(pd=["pd1:2379,pd2:2379"], ca="ca", cert="cert", key="key")


def test_pd_has_one_of_its_own() -> None:
    """Unless another is said it is that, with PD's TLS files."""
    config = EtcdFlags().etcd_config(SOURCE)
    assert (config.endpoints, config.tls, config.user) == (("pd1:2379", "pd2:2379"), SOURCE.config().tls, "")


def test_another_has_files_of_its_own_or_none() -> None:
    """Missing flags take the source's values; http:// means no TLS."""
    config = EtcdFlags(etcd="https://a:1,b:2", etcd_ca="other").etcd_config(SOURCE)
    assert (config.endpoints, config.tls.ca, config.tls.cert) == (("a:1", "b:2"), "other", "cert")
    assert not EtcdFlags(etcd="http://a:1").etcd_config(SOURCE).tls.enabled


def test_passwords_are_not_shown() -> None:
    """User and password go together; the password shows nowhere."""
    config = EtcdFlags(etcd_user="root", etcd_password="very-secret").etcd_config(SOURCE)
    assert (config.user, config.password) == ("root", "very-secret")
    assert "very-secret" not in f"{config!r} {config}"
    with pytest.raises(UsageError, match=r"^pass both or none of \(--etcd-user, --etcd-password\)$"):
        EtcdFlags(etcd_user="root").etcd_config(SOURCE)
    with pytest.raises(UsageError):
        EtcdFlags(etcd="nonsense").etcd_config(SOURCE)


@pytest.mark.parametrize("etcd", ["http://a:1,b:2", "http://a:1,https://b:2"])
def test_one_address_without_tls_does_not_turn_it_off_for_all(etcd: str) -> None:
    """Nor do the others turn it on for that one."""
    with pytest.raises(UsageError, match="with http://, without TLS, and others with TLS"):
        EtcdFlags(etcd=etcd).etcd_config(SOURCE)


def test_etcd_with_tls_needs_a_ca() -> None:
    """Its own or the cluster's."""
    with pytest.raises(UsageError, match=r"--etcd https://a:1 asks for TLS, but --etcd-ca was not passed"):
        EtcdFlags(etcd="https://a:1").etcd_config(ClusterFlags(pd=["a:1"]))
