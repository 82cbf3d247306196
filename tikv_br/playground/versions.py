"""Differences between versions of stores and PDs that are in use, according to their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tikv_br.errors import UsageError

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
