"""The settings of a playground: chosen at its first start, saved in its directory, and used at every later start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground.versions import ServerVersion

SETTINGS_FILE: Final = "playground.json"
_REPLICAS: Final = 3


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files of the servers; ``mutual`` also demands a certificate of ``ca`` from every client."""

    ca: str
    cert: str
    key: str
    mutual: bool = False

    @classmethod
    def from_flags(cls, ca: str | None, cert: str | None, key: str | None, *, mutual: bool) -> TlsSettings | None:
        """The files of ``--ca``, ``--cert`` and ``--key``; None for none of them. Raises `UsageError`."""
        files = [file for file in (ca, cert, key) if file is not None]
        if not files:
            return None
        if ca is None or cert is None or key is None:
            raise UsageError("--ca, --cert and --key must be passed together", hint="Pass all three, or none.")
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            raise UsageError(f"no such file: {missing[0]}")
        ca, cert, key = (str(Path(file).absolute()) for file in (ca, cert, key))
        return cls(ca, cert, key, mutual)


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are in seconds, sizes in bytes."""

    directory: str
    api_version: int = ApiVersion.V1.value
    tikv_version: str = ""
    """Version of TiKV and PD to play, as `ServerVersion.parse` takes it."""
    stores: int = 3
    replicas: int = 0
    """Replicas per region; 0 = up to 3, as stores allow."""
    regions: int = 1
    """Number of regions to pre-split by first byte, and to keep splitting until so many contain data."""
    pd_port: int = 0
    """0 = any free port; the next start uses the same one again if it is free."""
    pd_members: int = 1
    """Members of PD, of which one leads; they share all state."""
    region_split_size: int = 256 << 20
    keyspace_split_delay: float = 3.0
    """Delay after bootstrap before PD splits a new cluster at the bounds of keyspace 0."""
    keyspaces: tuple[str, ...] = ()
    """Names of keyspaces to create at a start, unless they exist; ``NAME=ID`` also has an id, as a recording needs it."""
    election_timeout: float = 10.0
    """Delay before the regions of a dead store get new leaders."""
    disconnect_delay: float = 20.0
    """Delay before PD reports a dead store as ``Disconnected`` instead of ``Up``."""
    ts_ahead: float = 3.0
    """Maximum age of the timestamps that a store caches."""
    clock_ahead: float = 0.0
    """Seconds by which PD's clock, and so every timestamp, is ahead of this machine's."""
    resolved_ts_interval: float = 1.0
    """Interval at which stores send resolved-ts to change feeds."""
    feed_quota: int = 512 << 20
    """Maximum size of queued events per change feed; beyond it, its regions fail as congested."""
    ts_sync_delay: float = 0.02
    """Seconds for which a new leader refuses V2 writes (max_timestamp_not_synced)."""
    gc_barriers: bool = False
    """Support GC barriers also in versions of PD before 9.0."""
    balance: bool = True
    """Balance leaders and replicas over the stores."""
    store_speed: int = 0
    """Maximum rate per store of backups and downloads together, in bytes per second; 0 = unlimited."""
    data_weight: int = 1
    """Factor by which each byte counts for `store_speed` and in the region sizes that PD reports."""
    etcd: bool = False
    """Run a real etcd."""
    cluster_id: int = 0
    """0 = random at the first start."""
    tls: TlsSettings | None = None

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def voters(self) -> int:
        """Replicas per region."""
        return self.replicas or min(_REPLICAS, self.stores)

    @property
    def version(self) -> ApiVersion:
        return ApiVersion(self.api_version)

    @property
    def release(self) -> ServerVersion:
        """The version of all servers. Raises `UsageError`."""
        return ServerVersion.parse(self.tikv_version)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of `to_json`; unknown settings are ignored."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in json.loads(text).items() if name in known}
        tls = values.pop("tls", None)
        return cls(**values, tls=TlsSettings(**tls) if tls else None)
