"""Flags of the commands that run syncs: sink, start, state and status."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.command import Flags, flag
from tikv_br.cli.output import KeyForm
from tikv_br.cluster.timestamps import MAX_TS, parse_ts
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.config import ClusterConfig, EtcdConfig, TlsFiles
    from tikv_br.incremental.handover import Start
    from tikv_br.incremental.sinks.open import SinkOptions
    from tikv_br.incremental.sinks.url import Target
    from tikv_br.storage.url import StorageLocation

MAX_BATCH_ROWS = 65_536
SYNC_ID = "sync"
"""Default name of a sync."""
LOG_ID = "default"
"""Default name of a log archive; earlier versions had it for syncs and changefeeds as well."""
SCRATCH_DIR = partial(
    flag,
    "",
    "Directory for changes that do not fit into memory; its spill files are deleted at the end.",
    metavar="DIR",
    show_default="the system's",
)
SORTER_MEMORY = partial(
    flag,
    "256MiB",
    "Maximum memory for buffered changes, per sync or sub-span; the rest spills to the scratch directory.",
    kind=kinds.SIZE,
)


class SyncRangeFlags(key_flags.RangeFlags):
    """The range of a sync, with the spellings of TiKV-CDC."""

    start: str = flag("", "Start of the range (inclusive; empty: no bound).", "--start", "--start-key", metavar="KEY")
    end: str = flag("", "End of the range (exclusive; empty: no bound).", "--end", "--end-key", metavar="KEY")
    key_format: KeyForm | None = key_flags.KEY_FORMAT()


class SinkTlsFlags(Flags):
    sink_ca: str | None = flag(
        None, "CA certificate for a tikv:// sink (PEM; default: --ca; empty: no TLS).", metavar="FILE"
    )
    sink_cert: str | None = flag(None, "Client certificate for a tikv:// sink (PEM; default: --cert).", metavar="FILE")
    sink_key: str | None = flag(None, "Private key of --sink-cert (PEM; default: --key).", metavar="FILE")

    def tls(self, source: shared.ClusterFlags) -> TlsFiles:
        """The TLS files of the sink."""
        return source.tls(self.sink_ca, self.sink_cert, self.sink_key)


SINK_RATE = partial(
    flag,
    "0",
    "Maximum rate of writes to the sink in bytes of keys and values per second, as 10MiB; a plain number is MiB (0 = unlimited).",
    kind=kinds.RATE,
)


class SinkFlags(Flags):
    sink: str = flag(
        "",
        "Sink (required): tikv://PD[,PD][?keyspace=ID&api-version=v2], s3://BUCKET/PREFIX, gcs://, azure:// or local:///DIR (a log archive), "
        "kafka://HOST:PORT[,HOST:PORT]/TOPIC[?protocol=open-protocol|json&…], file:///PATH, - (stdout), blackhole:// (discard).",
        metavar="URL",
    )
    sink_tls: SinkTlsFlags
    sink_concurrency: int = flag(
        4, "Maximum number of concurrent requests to a tikv:// sink.", limits=(1, kinds.MAX_CONCURRENCY)
    )
    sink_batch_size: int = flag(
        512,
        "Maximum rows per request to a tikv:// sink. Requests are also limited to 256 KiB.",
        limits=(1, MAX_BATCH_ROWS),
    )
    sink_ratelimit: int = SINK_RATE()
    sink_backoff: float = flag("5s", "Maximum wait between retries of writes to the sink.", kind=kinds.TIME)
    sink_patience: float = flag(
        "10m", "How long to retry an unavailable sink, including at startup, before the sync fails.", kind=kinds.TIME
    )
    allow_loss: str = flag(
        "",
        "Data that the sink may drop: ttl writes rows with a TTL to a V1 target, where they never expire (default: refuse).",
        metavar="ttl",
    )

    def target(self, storage: backup_flags.StorageFlags | None = None) -> Target:
        """Return the target of changes; `storage` has the flags for a log archive. Raises `UsageError`."""
        if not self.sink:
            raise UsageError("--sink is missing", hint="Pass a URL, for example --sink tikv://PD.")
        if self.allow_loss not in {"", "ttl"}:
            raise UsageError(f"--allow-loss {self.allow_loss!r} is not valid: a sink takes ttl only")
        from tikv_br.incremental.kafka.url import KafkaUrl
        from tikv_br.incremental.sinks.url import parse

        target = parse(self.sink, (storage or backup_flags.StorageFlags()).locate)
        if isinstance(target, KafkaUrl):
            self._check_kafka()
        return target

    def _check_kafka(self) -> None:
        """Refuse flags that would have no effect on a kafka:// sink. Raises `UsageError`."""
        plain = SinkFlags(sink_tls=SinkTlsFlags())
        if self.sink_tls != plain.sink_tls:
            raise UsageError(
                "--sink-ca, --sink-cert and --sink-key are for a tikv:// sink",
                hint="Append ca=FILE, and if needed cert=FILE&key=FILE, to the kafka:// address.",
            )
        if self.sink_batch_size != plain.sink_batch_size:
            raise UsageError(
                "--sink-batch-size is for a tikv:// sink", hint="Append max-batch-size=N to the kafka:// address."
            )
        if self.sink_concurrency != plain.sink_concurrency:
            raise UsageError(
                "--sink-concurrency is for a tikv:// sink: a Kafka producer decides itself", hint="Leave it out."
            )
        if self.allow_loss:
            raise UsageError("--allow-loss is for a tikv:// sink: a kafka:// sink keeps TTLs", hint="Leave it out.")

    def options(self, source: shared.ClusterFlags) -> SinkOptions:
        """Return the options of the sink."""
        from tikv_br.incremental.sinks.open import SinkOptions

        return SinkOptions(
            tls=self.sink_tls.tls(source),
            skip_version_check=source.skip_version_check,
            drop_ttls=bool(self.allow_loss),
            concurrency=self.sink_concurrency,
            batch_rows=self.sink_batch_size,
        )


class StartFlags(Flags):
    """The start of a sync that has no checkpoint yet."""

    from_backup: str = flag(
        "", "Start after the backup-ts of this backup, whose data a tikv:// sink must already contain.", metavar="URL"
    )
    from_backup_ts: int | None = flag(
        None, "Start after this PD timestamp (TSO), usually a backup-ts.", limits=(1, MAX_TS), metavar="TS"
    )
    start_ts: str = flag("", "Start after this time: now, a PD timestamp, a time or an age.", metavar="TS|TIME|now")

    def start(self, storage: backup_flags.StorageFlags, source: ClusterConfig) -> Start | None:
        """The start; None = not given. Raises `UsageError` for more than one."""
        if sum(map(bool, (self.from_backup, self.from_backup_ts, self.start_ts))) > 1:
            raise UsageError(
                "--from-backup, --from-backup-ts and --start-ts cannot be combined", hint="Pass one of them."
            )
        if self == StartFlags():
            return None
        from tikv_br.incremental.handover import FromBackup, FromNow, FromTs

        if self.from_backup:
            return FromBackup(storage.locate(self.from_backup))
        if self.from_backup_ts:
            return FromTs(self.from_backup_ts)
        if self.start_ts == "now":
            return FromNow()
        return FromTs(parse_ts(self.start_ts, "--start-ts", partial(shared.pd_time, source)))

    def required(self, storage: backup_flags.StorageFlags, source: ClusterConfig) -> Start:
        """The start. Raises `UsageError` for none, and for more than one."""
        start = self.start(storage, source)
        if start is None:
            raise UsageError("the start is missing", hint="Pass --from-backup, --from-backup-ts or --start-ts now.")
        return start


class FeedFlags(Flags):
    gc_ttl: float = flag(
        "24h",
        "TTL of the service safe point: how long GC waits for a stopped sync (at least 1m).",
        "--gc-ttl",
        "--gcttl",
        kind=kinds.TIME,
    )
    hold_back: float | None = flag(
        None,
        "Delay changes by this long, to wait for late ones after a leader transfer. Adds to the lag. Less than the stores need is "
        "refused, but 0 turns it off and can lose changes (default: what the stores need, at least 3s).",
        kind=kinds.TIME,
    )


class StateFlags(Flags):
    """State of a sync: its name, checkpoint and scratch space."""

    name: str = flag(
        "",
        "Name, unique per source cluster; checkpoint and service safe point are named after it.",
        "--id",
        metavar="NAME",
        show_default=f"{SYNC_ID}; {LOG_ID} for a log archive",
    )
    state_dir: str = flag(
        "",
        "Directory or URL for the checkpoint (required, except with --mode diff or for a log archive, where it is state/ in the archive): a path, "
        "s3://…, gcs://…, azure://…, or etcd:// (see --etcd).",
        metavar="DIR|URL",
    )
    checkpoint_every: float = flag(
        "1s", "Interval between saves of the checkpoint. Each save costs a LIST and a PUT on S3.", kind=kinds.TIME
    )
    scratch_dir: str = SCRATCH_DIR()
    sorter_memory: int = SORTER_MEMORY()

    def id_for(self, target: Target) -> str:
        """The name, or the default one of a sync to this sink."""
        from tikv_br.incremental.sinks.url import LogTarget

        return self.name or (LOG_ID if isinstance(target, LogTarget) else SYNC_ID)

    def state(
        self, cluster: shared.ClusterFlags, storage: backup_flags.StorageFlags, etcd: shared.EtcdFlags, target: Target
    ) -> StorageLocation | EtcdConfig:
        """Return the location of the checkpoint: for a log archive beside it. It is never encrypted.

        Raises `UsageError`.
        """
        from tikv_br.incremental.sinks.url import LogTarget

        if not self.state_dir and isinstance(target, LogTarget):
            from tikv_br.archive.records import state_location

            return state_location(target.location, target.id_for(self.id_for(target)))
        if not self.state_dir:
            raise UsageError(
                "--state-dir is missing: a sync resumes from the checkpoint in it", hint="Pass --state-dir DIR."
            )
        if self.state_dir == "etcd://":
            return etcd.etcd_config(cluster)
        if self.state_dir.startswith("etcd:"):
            raise UsageError("--state-dir etcd:// takes no address", hint="Pass the address with --etcd.")
        try:
            return storage.s3.locate(self.state_dir)
        except UsageError as error:
            raise UsageError(f"--state-dir: {error.message}", hint=error.hint) from None


def scratch_folder(named: str) -> Path:
    """The directory of the sorter. Raises `UsageError` if it cannot be written to."""
    path = Path(named or tempfile.gettempdir())
    if not path.is_dir():
        raise UsageError(f"--scratch-dir {path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(
            f"--scratch-dir {path} is not writable", hint="Choose a directory that this user can write to."
        )
    return path
