"""Options of a restore."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Struct

from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.restore.inspect import FileCheck
from tikv_br.resume_options import MayChange, compared_as
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


class RestoreOptions(Struct, frozen=True):
    """Options of one restore. Keys are user keys."""

    cluster: Annotated[ClusterConfig, compared_as("id")]
    storage: Annotated[StorageLocation, compared_as("id")]
    span: MayChange[KeyRange] = EVERY_KEY
    """Range to restore."""
    keyspace: MayChange[int | str | None] = None
    """Keyspace of the backup to restore, by id or name (API V2); None = all."""
    via: MayChange[Via] = Via.AUTO
    to_keyspace: Annotated[str, compared_as("id")] = ""
    """Id or name of the target keyspace (API V2); ``""`` = the one with the same name as in the backup."""
    by_name: MayChange[bool] = True
    """Find keyspaces of the target by the recorded names; False = by id, in a target that was made for the rows."""
    rewrite_prefix: Annotated[tuple[bytes, bytes], compared_as("id")] = (b"", b"")
    """Old and new prefix of user keys: only keys with the old prefix are restored, with the new one instead."""
    mode: MayChange[Mode] = Mode.INGEST
    region_bytes: MayChange[int] = REGION_BYTES
    """Maximum size of a region that the target is split into, in bytes of keys and values."""
    restamp: Restamp = Restamp.AUTO
    concurrency: MayChange[int] = DEFAULT_CONCURRENCY
    """Number of files restored in parallel."""
    file_check: MayChange[FileCheck] = FileCheck.AUTO
    checksum: MayChange[bool] = True
    """Compare the cluster's checksums with the backup's afterwards."""
    allow_overwrite: MayChange[bool] = False
    allow_empty: MayChange[bool] = False
    """Accept that the backup has no row in an explicit range, keyspace or prefix."""
    allow_followers: MayChange[bool] = False
    """Ingest although followers of the cluster, such as TiKV-CDC, do not notice it."""
    command: MayChange[str] = "restore raw"
    """Command to name in the announcement of the ingest."""
    import_mode: MayChange[bool] = False
    """Switch stores to import mode and pause PD's balancing during the ingest; not for `Mode.PUT`."""
    rate_limit: MayChange[int] = 0
    """Maximum download rate per store, in bytes per second; 0 = unlimited."""
    send_credentials: MayChange[bool] = True
    """Send this process's storage credentials to the stores; otherwise they use their own."""
    resume: MayChange[bool] = True
    """Resume an unfinished restore of the same backup into the same cluster."""
    state: MayChange[StorageLocation | None] = None
    """Location of the state for resuming; None = next to the backup."""
    lock_wait: MayChange[float] = 0.0
    """Seconds to wait for another restore of the same backup into the same cluster."""
    dry_run: MayChange[bool] = False
    key_mode: MayChange[KeyMode] = KeyMode.RAW
    """Mode of the data. Transactional data are always ingested."""
    executor: MayChange[ExecutorOptions] = msgspec.field(default_factory=lambda: ExecutorOptions(executor="driver"))
