"""The flags that name an etcd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.option_groups import ClusterFlags, OptionGroup
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.config import EtcdConfig
    from tikv_br.cluster.tls import TlsFiles

EtcdOption = Annotated[
    str,
    typer.Option(
        "--etcd",
        envvar="TIKV_BR_ETCD",
        metavar="ADDRESS",
        show_default="PD's own, at --pd",
        help="Addresses of an etcd: host:port,… as --pd, or http://host:port,… where it has no TLS and PD has.",
    ),
]
EtcdCaOption = Annotated[
    str | None,
    typer.Option("--etcd-ca", envvar="TIKV_BR_ETCD_CA", metavar="FILE", help="--ca for --etcd, if another."),
]
EtcdCertOption = Annotated[
    str | None,
    typer.Option("--etcd-cert", envvar="TIKV_BR_ETCD_CERT", metavar="FILE", help="--cert for --etcd, if another."),
]
EtcdKeyOption = Annotated[
    str | None,
    typer.Option("--etcd-key", envvar="TIKV_BR_ETCD_KEY", metavar="FILE", help="--key for --etcd, if another."),
]
EtcdUserOption = Annotated[
    str, typer.Option("--etcd-user", envvar="TIKV_BR_ETCD_USER", metavar="NAME", help="User of --etcd, if it has some.")
]
EtcdPasswordOption = Annotated[
    str,
    typer.Option(
        "--etcd-password",
        envvar="TIKV_BR_ETCD_PASSWORD",
        metavar="TEXT",
        help="The password; the variable keeps it from the shell's history.",
    ),
]


@dataclass(frozen=True, kw_only=True)  # without slots, so that a group may have it for a second base
class EtcdFlags(OptionGroup):
    """Where a group, or a sync, keeps its state."""

    etcd: EtcdOption = ""
    etcd_ca: EtcdCaOption = None
    etcd_cert: EtcdCertOption = None
    etcd_key: EtcdKeyOption = None
    etcd_user: EtcdUserOption = ""
    etcd_password: EtcdPasswordOption = ""

    def etcd_config(self, source: ClusterFlags) -> EtcdConfig:
        """The etcd that they name. Raises `UsageError`."""
        from tikv_br.cluster.config import EtcdConfig, parse_addresses

        if bool(self.etcd_user) != bool(self.etcd_password):
            raise UsageError("say both or none (--etcd-user, --etcd-password)")
        endpoints = parse_addresses(self.etcd) if self.etcd else source.config().pd
        return EtcdConfig(endpoints, self._etcd_tls(source), self.etcd_user, self.etcd_password)

    def _etcd_tls(self, source: ClusterFlags) -> TlsFiles:
        from tikv_br.cluster.tls import TlsFiles

        if "http://" in self.etcd:
            return TlsFiles()
        return TlsFiles(
            ca=self.etcd_ca or source.ca, cert=self.etcd_cert or source.cert, key=self.etcd_key or source.key
        )
