"""Options of a restore."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.restore.inspect import FileCheck
from tikv_br.resume_options import MAY_CHANGE, compared_as
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

DEFAULT_CONCURRENCY = 16
REGION_BYTES = 96 << 20
"""Target size of a region after the restore: TiKV's default split size."""


class Mode(enum.StrEnum):
    """Way of writing rows into the cluster."""

    INGEST = "ingest"
    """Stores ingest SST files; rows keep their timestamps or get a new one (`Restamp`)."""
    PUT = "put"
    """tikv-br reads the rows and writes them as any client does; they get new timestamps."""


class Via(enum.StrEnum):
    """Way of getting ingested files to the stores."""

    STORES = "stores"
    """Each store downloads them from the storage."""
    UPLOAD = "upload"
    """tikv-br reads them and sends them to the stores, which need no access to the storage."""
    AUTO = "auto"
    """`STORES`, but `UPLOAD` for a file that stores cannot find or read, or that spans many regions."""


class Restamp(enum.StrEnum):
    """Condition for a new timestamp of ingested rows from the target's TSO (API V2)."""

    AUTO = "auto"
    """If the backup comes from the target cluster, if a row is newer than the target's TSO, or if newer deletes hide rows."""
    ALWAYS = "always"
    NEVER = "never"
    """A restore fails if its rows are newer than the target's TSO, or hidden by newer deletes."""


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of one restore. Keys are user keys."""

    cluster: ClusterConfig = field(metadata=compared_as("id"))
    storage: StorageLocation = field(metadata=compared_as("id"))
    span: KeyRange = field(default=EVERY_KEY, metadata=MAY_CHANGE)
    """Range to restore."""
    keyspace: int | str | None = field(default=None, metadata=MAY_CHANGE)
    """Keyspace of the backup to restore, by id or name (API V2); None = all."""
    via: Via = field(default=Via.AUTO, metadata=MAY_CHANGE)
    to_keyspace: str = field(default="", metadata=compared_as("id"))
    """Id or name of the target keyspace (API V2); ``""`` = the one with the same name as in the backup."""
    by_name: bool = field(default=True, metadata=MAY_CHANGE)
    """Find keyspaces of the target by the recorded names; False = by id, in a target that was made for the rows."""
    rewrite_prefix: tuple[bytes, bytes] = field(default=(b"", b""), metadata=compared_as("id"))
    """Old and new prefix of user keys: only keys with the old prefix are restored, with the new one instead."""
    mode: Mode = field(default=Mode.INGEST, metadata=MAY_CHANGE)
    region_bytes: int = field(default=REGION_BYTES, metadata=MAY_CHANGE)
    """Maximum size of a region that the target is split into, in bytes of keys and values."""
    restamp: Restamp = Restamp.AUTO
    concurrency: int = field(default=DEFAULT_CONCURRENCY, metadata=MAY_CHANGE)
    """Number of files restored in parallel."""
    file_check: FileCheck = field(default=FileCheck.AUTO, metadata=MAY_CHANGE)
    checksum: bool = field(default=True, metadata=MAY_CHANGE)
    """Compare the cluster's checksums with the backup's afterwards."""
    allow_overwrite: bool = field(default=False, metadata=MAY_CHANGE)
    allow_empty: bool = field(default=False, metadata=MAY_CHANGE)
    """Accept that the backup has no row in an explicit range, keyspace or prefix."""
    allow_followers: bool = field(default=False, metadata=MAY_CHANGE)
    """Ingest although followers of the cluster, such as TiKV-CDC, do not notice it."""
    command: str = field(default="restore raw", metadata=MAY_CHANGE)
    """Command to name in the announcement of the ingest."""
    import_mode: bool = field(default=False, metadata=MAY_CHANGE)
    """Switch stores to import mode and pause PD's balancing during the ingest; not for `Mode.PUT`."""
    rate_limit: int = field(default=0, metadata=MAY_CHANGE)
    """Maximum download rate per store, in bytes per second; 0 = unlimited."""
    send_credentials: bool = field(default=True, metadata=MAY_CHANGE)
    """Send this process's storage credentials to the stores; otherwise they use their own."""
    resume: bool = field(default=True, metadata=MAY_CHANGE)
    """Resume an unfinished restore of the same backup into the same cluster."""
    state: StorageLocation | None = field(default=None, metadata=MAY_CHANGE)
    """Location of the state for resuming; None = next to the backup."""
    lock_wait: float = field(default=0.0, metadata=MAY_CHANGE)
    """Seconds to wait for another restore of the same backup into the same cluster."""
    dry_run: bool = field(default=False, metadata=MAY_CHANGE)
    key_mode: KeyMode = field(default=KeyMode.RAW, metadata=MAY_CHANGE)
    """Mode of the data. Transactional data are always ingested."""
    executor: ExecutorOptions = field(default_factory=lambda: ExecutorOptions(executor="driver"), metadata=MAY_CHANGE)
