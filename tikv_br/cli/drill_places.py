"""The options that say what a drill rehearses with, and where."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tikv_br.cli import backup_options, options
from tikv_br.cli.keys import read_key
from tikv_br.cli.option_groups import ClusterFlags, OptionGroup
from tikv_br.cli.options import KeyForm
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.backup.options import BackupOptions
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.drill.cleaning import Remover
    from tikv_br.drill.ledger import Kind
    from tikv_br.drill.target import Target
    from tikv_br.storage.url import StorageLocation

BackupOption = Annotated[
    str,
    typer.Option(
        "--backup", metavar="new|newest|URL", help="Make a backup of --pd first, take the newest of --storage, or this."
    ),
]
TargetOption = Annotated[
    Literal["playground", "cluster"] | None,
    typer.Option(
        "--target",
        help="A playground made for the drill, or a place in a cluster that is there.",
        show_default="playground, unless the flags below name a place",
    ),
]
TargetPdOption = Annotated[
    str,
    typer.Option("--target-pd", metavar="HOST:PORT[,…]", help="PD of a recovery cluster; without, that of --pd."),
]
TargetCaOption = Annotated[
    str | None,
    typer.Option("--target-ca", metavar="FILE", help="--ca for the target, if another; empty: no TLS there."),
]
TargetCertOption = Annotated[
    str | None, typer.Option("--target-cert", metavar="FILE", help="--cert for the target, if another.")
]
TargetKeyOption = Annotated[
    str | None, typer.Option("--target-key", metavar="FILE", help="--key for the target, if another.")
]
TargetKeyspaceOption = Annotated[
    str, typer.Option("--target-keyspace", metavar="ID|NAME", help="An empty keyspace of API V2 that all rows go to.")
]
TargetPrefixOption = Annotated[
    str,
    typer.Option("--target-prefix", metavar="KEY", help="A prefix that no key has yet; it is put before each key."),
]
StoresOption = Annotated[int, typer.Option("--target-stores", min=1, help="Stores of the playground restored into.")]
WorkDirOption = Annotated[
    str,
    typer.Option("--work-dir", metavar="DIR", help="Where the playground gets a folder.", show_default="the system's"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupFlags(OptionGroup):
    """What is rehearsed with."""

    backup: BackupOption = "new"
    keyspace: backup_options.KeyspacesOption = None
    dst_api_version: backup_options.DstApiVersionOption = None
    safe_interval: backup_options.SafeIntervalOption = 60.0
    executor: options.ExecutorOption = "auto"
    spark_master: options.SparkMasterOption = "local[*]"

    def new(self, cluster: ClusterConfig, place: StorageLocation) -> BackupOptions | None:
        """How to make a backup; None = one that is there is taken. Raises `UsageError` for what would not count then."""
        if self.backup != "new":
            if self.keyspace or self.dst_api_version:
                raise UsageError("--keyspace and --dst-api-version say how a backup is made, and --backup names one")
            return None
        from formats.api_version import ApiVersion
        from tikv_br.backup.options import BackupOptions

        return BackupOptions(
            cluster=cluster,
            storage=place,
            keyspaces=tuple(self.keyspace or ()),
            dst_api_version=ApiVersion.from_label(self.dst_api_version) if self.dst_api_version else None,
            safe_interval=self.safe_interval,
            executor=self.executor,
            spark_master=self.spark_master,
        )

    @property
    def named(self) -> str:
        """The URL of a backup; ``""`` = none was named."""
        return "" if self.backup in {"new", "newest"} else self.backup


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags(OptionGroup):
    """Where it is restored to."""

    target: TargetOption = None
    target_pd: TargetPdOption = ""
    target_ca: TargetCaOption = None
    target_cert: TargetCertOption = None
    target_key: TargetKeyOption = None
    target_keyspace: TargetKeyspaceOption = ""
    target_prefix: TargetPrefixOption = ""
    target_stores: StoresOption = 3
    work_dir: WorkDirOption = ""

    def choose(self, source: ClusterFlags, form: KeyForm) -> tuple[Target, dict[Kind, Remover]]:
        """The target, and how playgrounds of earlier drills are removed. Raises `UsageError`."""
        from tikv_br.cli.drill_playground import Host
        from tikv_br.drill.ledger import Kind
        from tikv_br.drill.scratch import ClusterTarget
        from tikv_br.drill.target import PlaygroundTarget

        parent = Path(self.work_dir) if self.work_dir else Path(tempfile.gettempdir()) / f"tikv-br-drills-{os.getuid()}"
        playground = PlaygroundTarget(Host(), parent, self.target_stores)
        removers: dict[Kind, Remover] = {Kind.PLAYGROUND: playground}
        if not self._names_a_cluster():
            return playground, removers
        prefix = read_key(self.target_prefix, form, "--target-prefix")
        return ClusterTarget(self._cluster(source), self.target_keyspace, prefix), removers

    def _names_a_cluster(self) -> bool:
        place = bool(self.target_pd or self.target_keyspace or self.target_prefix)
        if self.target == "playground" and place:
            raise UsageError("--target playground takes no --target-pd, --target-keyspace and --target-prefix")
        if self.target == "cluster" and not place:
            raise UsageError("--target cluster: which?", hint="Say --target-pd, --target-keyspace or --target-prefix.")
        tls = (self.target_ca, self.target_cert, self.target_key)
        if any(each is not None for each in tls) and not self.target_pd:
            raise UsageError("--target-ca, --target-cert and --target-key are those of --target-pd")
        return place

    def _cluster(self, source: ClusterFlags) -> ClusterConfig:
        from tikv_br.cluster.config import ClusterConfig

        if not self.target_pd:
            return source.config()
        if self.target_ca == "":
            return ClusterConfig.from_flags(self.target_pd)
        return ClusterConfig.from_flags(
            self.target_pd,
            ca=self.target_ca or source.ca,
            cert=self.target_cert or source.cert,
            key=self.target_key or source.key,
        )
