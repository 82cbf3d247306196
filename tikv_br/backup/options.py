"""What a backup is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from formats.api_version import ApiVersion
from formats.sst.compression import Compression
from tikv_br.backup.conversion import Loss
from tikv_br.backupset.files import FileKind
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import UsageError
from tikv_br.spark.session import check_master, is_local
from tikv_br.storage.url import StorageLocation

DEFAULT_FILE_BYTES = 96 << 20
EngineKind: TypeAlias = Literal["auto", "store", "scan"]
ExecutorChoice: TypeAlias = Literal["auto", "driver", "spark"]


@dataclass(frozen=True, slots=True)
class BackupOptions:
    """One backup. Keys are user keys; an empty end is no end. Times are in seconds."""

    cluster: ClusterConfig
    storage: StorageLocation
    dst_api_version: ApiVersion | None = None
    """In which the files are written; None = the cluster's own."""
    ranges: tuple[tuple[bytes, bytes], ...] = ()
    """Start and end of each, without overlap; none = everything."""
    keyspaces: tuple[str, ...] = ()
    """Ids, names or ``all`` that hold data, of an API V2 cluster only; none = keyspace 0. Each has all of the ranges."""
    compression: Compression = Compression.ZSTD
    compression_level: int = 0
    """0 = the compression's default."""
    file_kind: FileKind = FileKind.SST
    allow_loss: frozenset[Loss] = frozenset()
    """What the conversion may lose; nothing else is lost."""
    file_bytes: int = DEFAULT_FILE_BYTES
    """Of files written from here: keys and values of a file, before encoding and compression; it ends with the page that
    reaches it. Stores write a file a region."""
    concurrency: int | None = None
    """Tasks at the same time; None = as many as the executor has room for."""
    safe_interval: float = 60.0
    """How far backup-ts lies behind PD's clock."""
    gc_ttl: int = 300
    """How long the safe point at backup-ts outlives the backup."""
    checksum: bool = False
    """Whether each interval is compared with the cluster's own checksum afterwards."""
    assume_no_ttl: bool = False
    """Whether to take it that no key of a cluster with TTL expires, instead of finding out."""
    rate_limit: int = 0
    """Bytes a second that each store may be asked to read or write; 0 = no limit."""
    send_credentials: bool = True
    """Whether stores that write files get this process's storage credentials, or use their own."""
    engine: EngineKind = "auto"
    executor: ExecutorChoice = "auto"
    spark_master: str = "local[*]"
    lock_wait: float = 0.0
    """How long to wait for a path that another run holds."""
    no_resume: bool = False
    """Whether to remove what an unfinished run has left at the path, instead of going on with it."""
    dry_run: bool = False

    def check(self) -> None:
        """Raise `UsageError` for what is wrong whatever the cluster is."""
        self._check_ranges()
        if self.compression_level and self.compression_level not in self.compression.levels:
            raise UsageError(f"--compression-level: {self.compression.label} has no level {self.compression_level}")
        if self.file_bytes <= 0:
            raise UsageError("--file-size must be positive")
        if self.gc_ttl < 0 or self.safe_interval < 0:
            raise UsageError("--gcttl and --safe-interval cannot be negative")
        if self.executor != "driver":
            check_master(self.spark_master)
        somewhere_else = self.executor != "driver" and not is_local(self.spark_master)
        if self.rate_limit and somewhere_else and self.concurrency is None:
            raise UsageError(
                "--ratelimit on a Spark cluster needs --concurrency",
                hint="The limit of a store is divided among the tasks that run at the same time.",
            )

    def _check_ranges(self) -> None:
        ordered = sorted(self.ranges)
        for start, end in ordered:
            if end and start >= end:
                raise UsageError(
                    f"--start must lie before --end, as in each --range: {start.hex()} does not before {end.hex()}"
                )
        for (start, end), (next_start, _) in pairwise(ordered):
            if not end or end > next_start:
                raise UsageError(f"--range {start.hex()}:{end.hex()} overlaps the one from {next_start.hex()} on")
