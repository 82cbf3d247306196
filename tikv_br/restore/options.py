"""What a restore is asked to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tikv_br.cluster.config import ClusterConfig
from tikv_br.restore.inspect import FileCheck
from tikv_br.restore.plan import REGION_BYTES
from tikv_br.spark.executor import ExecutorOptions
from tikv_br.storage.url import StorageLocation

DEFAULT_CONCURRENCY = 16


class Mode(enum.StrEnum):
    """How rows come into the cluster."""

    INGEST = "ingest"
    """Stores take in whole files; rows keep their timestamps."""
    PUT = "put"
    """Rows are read here and written as by any client, with timestamps of their own."""


class Via(enum.StrEnum):
    """How files that are ingested get to the stores."""

    STORES = "stores"
    """Each store fetches them itself."""
    UPLOAD = "upload"
    """They are read here and sent: the stores need no access to the storage."""
    AUTO = "auto"
    """`STORES`, and `UPLOAD` for a file that stores cannot find, or may not read, or that many regions get a piece of."""


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """One restore. Keys are user keys; an empty end is no end."""

    cluster: ClusterConfig
    storage: StorageLocation
    start: bytes = b""
    end: bytes = b""
    keyspace: int | None = None
    """The one keyspace of the backup that is restored (API V2); None = all of them."""
    via: Via = Via.AUTO
    to_keyspace: str = ""
    """Id or name of the keyspace that the rows are to be in (API V2); ``""`` = where they were."""
    rewrite_prefix: tuple[bytes, bytes] = (b"", b"")
    """Of user keys: what begins with the first is restored, with the second in its place; the rest is not restored."""
    mode: Mode = Mode.INGEST
    region_bytes: int = REGION_BYTES
    """What a region of the target is to hold at most, in bytes of keys and values, where it is split before."""
    restamp: bool = False
    """Whether rows that are newer than the target's TSO get a timestamp of the target, all of them, instead of being refused."""
    concurrency: int = DEFAULT_CONCURRENCY
    """Files under way at once."""
    file_check: FileCheck = FileCheck.AUTO
    checksum: bool = True
    """Whether the cluster's own checksums are compared with the backup's afterwards."""
    allow_overwrite: bool = False
    import_mode: bool = False
    """Whether stores are put into import mode and PD's balancing is paused meanwhile; not for puts."""
    rate_limit: int = 0
    """Bytes a second that each store may download; 0 = no limit."""
    send_credentials: bool = True
    """Whether stores are sent the storage credentials of this process, or use their own."""
    resume: bool = True
    """Whether to go on with what an unfinished restore of the same backup into the same cluster has done."""
    state: StorageLocation | None = None
    """Where that is written down; None = beside the backup."""
    lock_wait: float = 0.0
    """Seconds to wait for another restore of the same backup into the same cluster to end."""
    dry_run: bool = False
    executor: ExecutorOptions = field(default_factory=lambda: ExecutorOptions("driver"))
