"""The settings of a playground: chosen at its first start, saved in its directory, and used at every later start.

Differences between versions of stores and PDs that are in use, according to their sources.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion

_DEFAULT: Final = "9.0.0-beta.2"
_DEFAULT_PD: Final = "8.5.2"
"""Version whose behaviour was recorded."""
_OLDEST: Final = (5, 4)
_NEWEST_PATCH: Final = {(5, 4): 3, (6, 1): 7, (6, 5): 12, (7, 1): 6, (7, 5): 7, (8, 1): 2, (8, 5): 7}
_PATTERN: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+)(?:-[0-9a-z.]+)?)?")


class _Since:
    """An attribute of `ServerVersion` that is true from a version on, and ``before`` another."""

    def __init__(self, *number: int, before: tuple[int, ...] = (1 << 32,)) -> None:
        self._number, self._before = number, before

    def __get__(self, release: ServerVersion, owner: object) -> bool:
        return self._number <= release.number < self._before


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """The version of all stores and of PD; newer patches of a release line have its fixes."""

    tikv: str = _DEFAULT
    pd: str = _DEFAULT_PD

    @classmethod
    def parse(cls, text: str) -> ServerVersion:
        """A version such as ``6.5`` (its newest patch) or ``6.5.3``; empty = the recorded one. Raises `UsageError`."""
        if not text:
            return cls()
        match = _PATTERN.fullmatch(text)
        if match is None or (line := (int(match[1]), int(match[2]))) < _OLDEST:
            raise UsageError(f"--version {text!r} is not a version of TiKV from 5.4 on, such as 6.5 or 7.1.1")
        if match[3] is None:
            text = _DEFAULT if _DEFAULT.startswith(f"{text}.") else f"{text}.{_NEWEST_PATCH.get(line, 0)}"
        return cls(text, text)

    @property
    def number(self) -> tuple[int, ...]:
        """The three numbers of the stores' version."""
        return tuple(map(int, self.tikv.partition("-")[0].split(".")))

    has_keyspaces = _Since(6, 3)
    """PD supports keyspaces."""
    encodes_v2 = _Since(6, 1)
    """API V2 encodes keys and adds timestamps; older versions store keys unchanged."""
    sums_v2 = _Since(6, 1, 1)
    """RawChecksum encodes the bounds of API V2."""
    drops_late_writes = _Since(6, 3)
    """Stores drop raw writes past their deadline."""
    checks_cluster = _Since(8)
    """Stores refuse requests for another cluster."""
    counts_backups = _Since(6, 1)
    """A backup counts its files, omits expired rows, and can convert."""
    flushes = _Since(6, 2)
    """A backup drops the store's cached timestamps."""
    collects_rows = _Since(6, 4)
    """Files of API V2 have properties about their rows."""
    knows_raw_feeds = _Since(6, 1)
    """``kv_api`` has an effect; in older versions every feed is one of transactions, without raw rows."""
    resolves_raw = _Since(6, 2)
    """Feeds of raw rows get resolved-ts."""
    backs_up_over_locks = _Since(8, 5, 7)
    """A backup ignores ``resolved_locks`` of its context; 8.5.0 does not, patches in between were not looked at."""
    refuses_future_ts = _Since(8, 5, 7, before=(9,))
    """Stores refuse a reader's timestamp above PD's."""
    ends_on_future_ts = _Since(9)
    """Stores end themselves at a reader's timestamp far above PD's."""
    rewrites_plain_keys = _Since(7, 1)
    """Downloads of type ``Keyspace``; older versions do not read the type."""
    multiplexes = _Since(7, 3)
    """There is EventFeedV2 and Deregister; in older versions a Deregister counts as a Register."""

    @property
    def has_barriers(self) -> bool:
        """Return whether PD keeps GC barriers instead of service safe points."""
        return int(self.pd.partition(".")[0]) >= 9

    @property
    def collects_expiry(self) -> bool:
        """Return whether these properties have the expiry, and V1TTL files do not have them."""
        number = self.number
        return self.collects_rows and (number >= (7, 3) or (6, 5, 4) <= number < (6, 6) or (7, 1, 2) <= number < (7, 2))

    def causal_config(self, ahead: float) -> dict[str, object]:
        """The section ``causal-ts`` of a store's configuration; empty = there is none."""
        config: dict[str, object] = {"renew-interval": "100ms", "renew-batch-min-size": 100}
        if not self.encodes_v2:
            return {}
        if self.number < (6, 3):
            return config
        buffer = "available-interval" if self.number < (6, 4) else "alloc-ahead-buffer"
        duration = f"{round(ahead)}s" if ahead == round(ahead) else f"{round(ahead * 1000)}ms"
        return {**config, "renew-batch-max-size": 8192, buffer: duration}

    def ts_ahead(self, ahead: float) -> float:
        """Maximum age of cached timestamps, in seconds: before 6.3 there is only the batch of one interval."""
        return ahead if self.number >= (6, 3) else min(ahead, 0.1)


RECORDED: Final = ServerVersion()
"""The servers whose sessions were recorded."""


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
    pd_advertises: str = ""
    """host:port that members of PD name as their client URLs, as in Kubernetes; empty = where they are."""
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
        keyspaces = tuple(values.pop("keyspaces", ()))
        return cls(**values, keyspaces=keyspaces, tls=TlsSettings(**tls) if tls else None)
