"""What all tasks of an ingest share."""

from __future__ import annotations

from dataclasses import dataclass

from formats.api_version import ApiVersion
from tikv_br.cluster.config import ClusterConfig
from tikv_br.restore.options import Via
from tikv_br.restore.record import RestoreRecord
from tikv_br.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class IngestJob:
    """What all tasks of a restore share. Pickles; `backend` and `cipher_info` may hold secrets and are never shown."""

    cluster: ClusterConfig
    api_version: ApiVersion
    store: ObjectStore
    """Where the files are, for this process."""
    via: Via
    backend: bytes
    """A serialized ``StorageBackend``: where they are for the stores."""
    cipher_info: bytes
    """A serialized ``CipherInfo``."""
    upload_limit: int = 0
    """Bytes a second that this process may send to each store; 0 = no limit. Downloads are limited at the stores."""
    slow_seconds: float = 0.0
    """How much longer a download or an upload may take, because of a limit."""
    new_timestamp: int = 0
    """Which all rows get; 0 = they keep their own."""
    record: RestoreRecord | None = None
    """Where each part is written down when it is in."""

    def __repr__(self) -> str:
        return f"IngestJob({self.api_version.label})"
