"""What a drill needs of whatever keeps its target behind the source: that lies above this package, and is given to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.config import ClusterConfig
from tikv_br.diff.options import ClusterChoice
from tikv_br.drill.ledger import Creation
from tikv_br.storage.url import StorageLocation

MOST_LANES = 16
"""Each is followed on its own."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One range of the backup, followed from the source to the target. Keys are user keys; an empty end is no end."""

    span: KeyRange
    """RPC keys, as the backup has them."""
    keyspace: int
    """At the source."""
    start: bytes
    end: bytes
    target: KeyCodec
    """Of its keys at the target."""

    def there(self, cluster: ClusterConfig) -> ClusterChoice:
        """The target's side of a comparison."""
        return ClusterChoice(cluster, str(self.target.keyspace_id), self.target.below)


class Steward(Protocol):
    """Answers for what a tail does at a target that is not the drill's."""

    def told(self, lane: Lane, keys: Sequence[bytes]) -> None:
        """Is told user keys before they are written."""

    def spare(self, lane: Lane, keys: Sequence[bytes]) -> Collection[bytes]:
        """Which of some ascending user keys of the target the drill has not put there."""


@dataclass(frozen=True, slots=True)
class Course:
    """What is followed, and whither."""

    backup: StorageLocation
    lanes: tuple[Lane, ...]
    cluster: ClusterConfig
    """The target."""
    state: StorageLocation
    """A folder of the drill's own."""
    steward: Steward | None
    """None = the target is the drill's own."""
    fence: Callable[[], None]
    """Raises `LeaseLost` once the drill is another's: from then on the tail writes nothing, wherever it is."""


class Following(Protocol):
    """A tail that runs."""

    def checkpoint_ts(self) -> int:
        """Up to which all is at the target; 0 = it has not begun. Raises what has ended the tail."""

    def written(self) -> int:
        """Rows that the target has taken."""

    def make_sure(self) -> None:
        """Let a checkpoint from a later moment on say nothing that only checksums have shown."""


class Tail(Protocol):
    """Keeps a target behind the source."""

    def check_source(self, source: ApiVersion, written: ApiVersion) -> None:
        """See whether the source can be followed, from backups whose files are ``written``. Raises a `TikvBrError`."""

    def check_backup(self, backup: BackupSet) -> None:
        """See whether it can be followed from there on. Raises `UsageError`."""

    def plan(self, drill: str, lanes: Sequence[Lane]) -> list[Creation]:
        """What it leaves at the source, which a remover of the same kind removes."""

    def follow(self, drill: str, course: Course) -> AbstractContextManager[Following]:
        """Follow the source from a backup on, until the end of the block."""

    @property
    def compares(self) -> bool:
        """Whether it compares, where the source has no feed: then the end is proven by rows, not by checksums."""


@dataclass(frozen=True, slots=True)
class TailOptions:
    """How the tail is rehearsed. Times in seconds."""

    tail: Tail
    seconds: float
    """How long it runs before the cut-over."""
    lag: float = 10.0
    """How near it has to come before the cut-over."""
    patience: float = 300.0
    """How long to wait for that, and for each state that is to be reached in the cut-over."""
    canary: bytes = b""
    """A user key of the source that the drill writes, and finds again at the target; ``b""`` = none."""
