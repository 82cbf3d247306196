"""The options that only ``tikv-br sync`` has."""

from __future__ import annotations

import enum
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.etcd_flags import EtcdFlags
from tikv_br.cli.option_groups import ClusterFlags, OptionGroup
from tikv_br.cli.options import parse_duration, parse_size
from tikv_br.cli.storage_flags import S3Flags, StorageFlags
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.handover import Start
    from incremental.sinks.open import SinkOptions
    from incremental.sinks.url import Target
    from tikv_br.cluster.config import EtcdConfig
    from tikv_br.cluster.tls import TlsFiles
    from tikv_br.storage.url import StorageLocation


class StartTs(enum.StrEnum):
    """Where a sync without a backup starts."""

    NOW = "now"


class SyncMode(enum.StrEnum):
    """How changes are found."""

    FEED = "feed"
    DIFF = "diff"


StartKeyOption = Annotated[
    str, typer.Option("--start", "--start-key", metavar="KEY", help="First key of the range (inclusive).")
]
EndKeyOption = Annotated[
    str,
    typer.Option("--end", "--end-key", metavar="KEY", help="End of the range (exclusive); empty: no bound."),
]
ModeOption = Annotated[
    SyncMode,
    typer.Option("--mode", help="feed: by the change feed of API V2. diff: by comparing ranges, pass after pass."),
]
SinkOption = Annotated[
    str,
    typer.Option(
        "--sink",
        metavar="URL",
        help="tikv://PD[,PD][?keyspace=ID&api-version=v2], file:///PATH (JSON lines), - (stdout) or blackhole://.",
    ),
]
SinkCaOption = Annotated[
    str | None,
    typer.Option("--sink-ca", metavar="FILE", help="--ca for a tikv:// sink, if another; empty: no TLS there."),
]
SinkCertOption = Annotated[
    str | None, typer.Option("--sink-cert", metavar="FILE", help="--cert for a tikv:// sink, if another.")
]
SinkKeyOption = Annotated[
    str | None, typer.Option("--sink-key", metavar="FILE", help="--key for a tikv:// sink, if another.")
]
SinkConcurrencyOption = Annotated[
    int, typer.Option("--sink-concurrency", min=1, metavar="N", help="Requests under way at once to a tikv:// sink.")
]
SinkBatchSizeOption = Annotated[
    int,
    typer.Option(
        "--sink-batch-size", min=1, metavar="N", help="Rows in one request to a tikv:// sink, and 256 KiB, at most."
    ),
]
SinkBackoffOption = Annotated[
    float,
    typer.Option(
        "--sink-backoff",
        parser=parse_duration,
        metavar="TIME",
        show_default="5s",
        help="The longest wait between two tries at a sink that takes nothing; the first waits are shorter.",
    ),
]
SinkPatienceOption = Annotated[
    float,
    typer.Option(
        "--sink-patience",
        parser=parse_duration,
        metavar="TIME",
        show_default="10m",
        help="How long the sink may fail in a row before the sync ends.",
    ),
]
SyncLossOption = Annotated[
    str,
    typer.Option(
        "--allow-loss", metavar="ttl", help="What the sink may cost: a V1 target keeps rows that expire for ever."
    ),
]
FromBackupOption = Annotated[
    str,
    typer.Option("--from-backup", metavar="URL", help="Start after this backup, from which the sink was restored."),
]
FromBackupTsOption = Annotated[
    int | None, typer.Option("--from-backup-ts", min=1, metavar="TS", help="Start after this timestamp.")
]
StartTsOption = Annotated[
    StartTs | None,
    typer.Option("--start-ts", help="Start with what is written from now on; a timestamp is --from-backup-ts."),
]
IdOption = Annotated[
    str, typer.Option("--id", metavar="NAME", help="Name of the sync, of its state and of its safe point.")
]
StateDirOption = Annotated[
    str,
    typer.Option(
        "--state-dir",
        metavar="DIR|URL",
        help="Where the checkpoint is kept, for a restart: a directory, s3:// or etcd:// (the etcd of --etcd).",
    ),
]
CheckpointEveryOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-every",
        parser=parse_duration,
        metavar="TIME",
        show_default="1s",
        help="How often the checkpoint is saved: in S3, by a LIST and a PUT.",
    ),
]
ScratchDirOption = Annotated[
    str,
    typer.Option(
        "--scratch-dir",
        metavar="DIR",
        show_default="the system's",
        help="For changes that do not fit into memory; nothing stays there.",
    ),
]
SorterMemoryOption = Annotated[
    int,
    typer.Option(
        "--sorter-memory",
        parser=parse_size,
        metavar="SIZE",
        show_default="256MiB",
        help="Memory for changes that are not resolved yet.",
    ),
]
SyncGcTtlOption = Annotated[
    float,
    typer.Option(
        "--gc-ttl",
        parser=parse_duration,
        metavar="TIME",
        show_default="24h",
        help="How long GC waits for a sync that is down.",
    ),
]
HoldBackOption = Annotated[
    float,
    typer.Option(
        "--hold-back",
        parser=parse_duration,
        metavar="TIME",
        show_default="3s",
        help="How long changes wait for older ones that a leader's move may bring; with 0 some may be lost.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTlsFlags(OptionGroup):
    """How to reach a cluster that changes go to."""

    sink_ca: SinkCaOption = None
    sink_cert: SinkCertOption = None
    sink_key: SinkKeyOption = None

    def tls(self, source: ClusterFlags) -> TlsFiles:
        """The TLS files of that cluster: the source's where none are named; none for an empty ``--sink-ca``."""
        from tikv_br.cluster.tls import TlsFiles

        if self.sink_ca == "":
            return TlsFiles()
        return TlsFiles(
            ca=self.sink_ca or source.ca, cert=self.sink_cert or source.cert, key=self.sink_key or source.key
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFlags(SinkTlsFlags):
    """Whither, and how."""

    sink: SinkOption = ""
    sink_concurrency: SinkConcurrencyOption = 4
    sink_batch_size: SinkBatchSizeOption = 512
    sink_backoff: SinkBackoffOption = 5.0
    sink_patience: SinkPatienceOption = 600.0
    allow_loss: SyncLossOption = ""

    def target(self) -> Target:
        """Where changes go. Raises `UsageError`."""
        if not self.sink:
            raise UsageError("--sink is missing", hint="Say whither: --sink tikv://PD, for one.")
        if self.allow_loss not in {"", "ttl"}:
            raise UsageError(f"--allow-loss {self.allow_loss}: a sink can cost nothing but ttl")
        from incremental.sinks.url import parse

        return parse(self.sink)

    def options(self, source: ClusterFlags) -> SinkOptions:
        """How to write."""
        from incremental.sinks.open import SinkOptions

        return SinkOptions(
            tls=self.tls(source),
            drop_ttls=bool(self.allow_loss),
            concurrency=self.sink_concurrency,
            batch_rows=self.sink_batch_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFlags(OptionGroup):
    """From where, when there is no checkpoint yet."""

    from_backup: FromBackupOption = ""
    from_backup_ts: FromBackupTsOption = None
    start_ts: StartTsOption = None

    def start(self, storage: StorageFlags) -> Start | None:
        """What was asked for. Raises `UsageError` for more than one."""
        if sum(map(bool, (self.from_backup, self.from_backup_ts, self.start_ts))) > 1:
            raise UsageError("a sync has one start", hint="Say one of --from-backup, --from-backup-ts and --start-ts.")
        if self == StartFlags():
            return None
        from incremental.handover import FromBackup, FromNow, FromTs

        if self.from_backup:
            return FromBackup(storage.locate(self.from_backup))
        if self.from_backup_ts:
            return FromTs(self.from_backup_ts)
        return FromNow()

    def required(self, storage: StorageFlags) -> Start:
        """What was asked for. Raises `UsageError` for none, and for more than one."""
        start = self.start(storage)
        if start is None:
            raise UsageError("from where?", hint="Say --from-backup, --from-backup-ts or --start-ts now.")
        return start


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFlags(OptionGroup):
    """What a sync keeps, and where."""

    name: IdOption = "default"
    state_dir: StateDirOption = ""
    checkpoint_every: CheckpointEveryOption = 1.0
    scratch_dir: ScratchDirOption = ""
    sorter_memory: SorterMemoryOption = 256 << 20

    def state(self, cluster: ClusterFlags, storage: StorageFlags, etcd: EtcdFlags) -> StorageLocation | EtcdConfig:
        """Where the checkpoint lies; it is not encrypted, whatever the backup is. Raises `UsageError`."""
        if not self.state_dir:
            raise UsageError("--state-dir is missing: without it a restart cannot go on", hint="Say --state-dir DIR.")
        if self.state_dir == "etcd://":
            return etcd.etcd_config(cluster)
        if self.state_dir.startswith("etcd:"):
            raise UsageError("--state-dir etcd:// takes no address", hint="Say it by --etcd.")
        try:
            return S3Flags.locate(storage, self.state_dir)
        except UsageError as error:
            raise UsageError(f"--state-dir: {error.message}", hint=error.hint) from None

    def scratch(self) -> Path:
        """The directory of the sorter. Raises `UsageError`."""
        return scratch_folder(self.scratch_dir)


def scratch_folder(named: str) -> Path:
    """The directory for what does not fit into memory. Raises `UsageError` now, not when it is needed."""
    path = Path(named or tempfile.gettempdir())
    if not path.is_dir():
        raise UsageError(f"--scratch-dir {path} is no directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--scratch-dir {path} cannot be written", hint="Choose a directory that this user may write.")
    return path
