"""Options of a restore."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tikv_br.cluster.config import ClusterConfig
from tikv_br.restore.inspect import FileCheck
from tikv_br.restore.plan import REGION_BYTES
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

DEFAULT_CONCURRENCY = 16


class Mode(enum.StrEnum):
    """How rows are written into the cluster."""

    INGEST = "ingest"
    """Stores ingest SST files; rows keep their timestamps or get a new one (`Restamp`)."""
    PUT = "put"
    """tikv-br reads the rows and writes them as any client does; they get new timestamps."""


class Via(enum.StrEnum):
    """How ingested files get to the stores."""

    STORES = "stores"
    """Each store downloads them from the storage."""
    UPLOAD = "upload"
    """tikv-br reads them and sends them to the stores, which need no access to the storage."""
    AUTO = "auto"
    """`STORES`, but `UPLOAD` for a file that stores cannot find or read, or that spans many regions."""


class Restamp(enum.StrEnum):
    """When ingested rows get a new timestamp from the target's TSO (API V2)."""

    AUTO = "auto"
    """If the backup comes from the target cluster, if a row is newer than the target's TSO, or if newer deletes hide rows."""
    ALWAYS = "always"
    NEVER = "never"
    """A restore fails if its rows are newer than the target's TSO, or hidden by newer deletes."""


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of one restore. Keys are user keys; an empty end means unbounded."""

    cluster: ClusterConfig
    storage: StorageLocation
    start: bytes = b""
    end: bytes = b""
    keyspace: int | None = None
    """Keyspace of the backup to restore (API V2); None = all."""
    via: Via = Via.AUTO
    to_keyspace: str = ""
    """Id or name of the target keyspace (API V2); ``""`` = the same as in the backup."""
    rewrite_prefix: tuple[bytes, bytes] = (b"", b"")
    """Old and new prefix of user keys: only keys with the old prefix are restored, with the new one instead."""
    mode: Mode = Mode.INGEST
    region_bytes: int = REGION_BYTES
    """Maximum size of a region that the target is split into, in bytes of keys and values."""
    restamp: Restamp = Restamp.AUTO
    concurrency: int = DEFAULT_CONCURRENCY
    """Number of files restored in parallel."""
    file_check: FileCheck = FileCheck.AUTO
    checksum: bool = True
    """Whether to compare the cluster's checksums with the backup's afterwards."""
    allow_overwrite: bool = False
    allow_empty: bool = False
    """Whether the backup may have no row in an explicit range, keyspace or prefix."""
    allow_followers: bool = False
    """Whether to ingest although followers of the cluster do not learn of it, such as TiKV-CDC."""
    command: str = "restore raw"
    """What the announcement of the ingest names."""
    import_mode: bool = False
    """Whether to switch stores to import mode and pause PD's balancing during the ingest; not for `Mode.PUT`."""
    rate_limit: int = 0
    """Maximum download rate per store, in bytes per second; 0 = unlimited."""
    send_credentials: bool = True
    """Whether to send this process's storage credentials to the stores; otherwise they use their own."""
    resume: bool = True
    """Whether to resume an unfinished restore of the same backup into the same cluster."""
    state: StorageLocation | None = None
    """Where to save the state for resuming; None = next to the backup."""
    lock_wait: float = 0.0
    """Seconds to wait for another restore of the same backup into the same cluster."""
    dry_run: bool = False
    executor: ExecutorOptions = field(default_factory=lambda: ExecutorOptions("driver"))
