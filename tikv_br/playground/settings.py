"""How a playground is set up: chosen at its first start, kept in its folder, the same at every later start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from formats.api_version import ApiVersion

SETTINGS_FILE: Final = "playground.json"
TIKV_VERSION: Final = "9.0.0-beta.2"
PD_VERSION: Final = "v8.5.2"
_REPLICAS: Final = 3


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files of the servers; ``mutual`` also demands a certificate of ``ca`` from every client."""

    ca: str
    cert: str
    key: str
    mutual: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes up a playground. Times in seconds, sizes in bytes."""

    directory: str
    api_version: int = ApiVersion.V1.value
    stores: int = 3
    replicas: int = 0
    """Voters of a region; 0: three, or as many as there are stores."""
    regions: int = 1
    """Pre-split into so many by first byte, and keep splitting until so many hold data."""
    pd_port: int = 0
    """0: any free port, the same again at the next start if it is still free."""
    region_split_size: int = 256 << 20
    keyspace_split_delay: float = 3.0
    """PD splits a new cluster at the bounds of keyspace 0 so long after bootstrap."""
    election_timeout: float = 10.0
    """A dead store's regions get new leaders so long after its death."""
    ts_ahead: float = 3.0
    """A store's cached causal timestamps may be so much behind PD's."""
    clock_ahead: float = 0.0
    """PD's clock, and so every timestamp, is so much ahead of this machine's."""
    resolved_ts_interval: float = 1.0
    """Stores tell their change feeds a resolved-ts so often."""
    feed_quota: int = 512 << 20
    """Events that wait for a slow client may take so much of each feed; then its regions are congested."""
    ts_sync_delay: float = 0.02
    """A new leader refuses V2 writes (max_timestamp_not_synced) for so long."""
    gc_barriers: bool = False
    """Whether PD knows GC barriers; PD 8.5.2 does not."""
    balance: bool = True
    """Whether PD spreads leaders and replicas over the stores by itself."""
    store_speed: int = 0
    """Bytes a second that each store backs up and downloads, all its calls together; 0: as many as it can."""
    data_weight: int = 1
    """Each byte of data counts as so many for `store_speed` and in the sizes that PD tells of regions."""
    etcd: bool = False
    """Whether a real etcd runs beside it, as PD has one built in."""
    cluster_id: int = 0
    """0: drawn at the first start."""
    tls: TlsSettings | None = None

    @property
    def path(self) -> Path:
        """The playground's folder."""
        return Path(self.directory)

    @property
    def voters(self) -> int:
        """Voters of each region."""
        return self.replicas or min(_REPLICAS, self.stores)

    @property
    def version(self) -> ApiVersion:
        """The API version of all stores."""
        return ApiVersion(self.api_version)

    def to_json(self) -> str:
        """As kept in the playground's folder."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of `to_json`; settings that this version does not know are left out."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in json.loads(text).items() if name in known}
        tls = values.pop("tls", None)
        return cls(**values, tls=TlsSettings(**tls) if tls else None)
