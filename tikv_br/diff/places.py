"""A and B as values that travel to tasks, found from what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from formats.keys import KeyCodec
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.diff.options import BackupChoice, ClusterChoice
from tikv_br.diff.sides import ClusterSide
from tikv_br.diff.values import Meter, Span
from tikv_br.errors import UsageError
from tikv_br.proof.fit import check_gives_checksums
from tikv_br.proof.lookup import keyspaces_of
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """A keyspace of a cluster. Pickles."""

    config: ClusterConfig
    api_version: ApiVersion
    keyspace_id: int
    below: bytes = b""

    @property
    def codec(self) -> KeyCodec:
        """Of its keys."""
        return KeyCodec(self.api_version, self.keyspace_id, self.below)

    def side(self, meter: Meter) -> ClusterSide:
        """To be asked, by this process's connection."""
        return ClusterSide(shared_cluster(self.config).raw(self.keyspace_id, below=self.below), meter)

    def __str__(self) -> str:
        return f"cluster {','.join(self.config.pd)} (API {_label(self.codec)})"


@dataclass(frozen=True, slots=True)
class BackupPlace:
    """A keyspace of a backup. Pickles."""

    store: ObjectStore
    api_version: ApiVersion
    keyspace_id: int

    @property
    def codec(self) -> KeyCodec:
        """Of its keys."""
        return KeyCodec(self.api_version, self.keyspace_id)

    def __str__(self) -> str:
        return f"backup {self.store.location} (API {_label(self.codec)})"


Place = TypeVar("Place", ClusterPlace, BackupPlace)


class Unit(NamedTuple):
    """A range to compare: a region's of cluster A, or a file's of backup A. Pickles."""

    span: Span
    file: FileEntry | None = None
    """Of a backup: the file with all its rows there; None = there are none."""
    whole: bool = False
    """Whether the range is all of the file's, so that its recorded sums count."""

    def __str__(self) -> str:
        return f"[{self.span.start.hex() or 'start'}, {self.span.end.hex() or 'end'})"


def find_cluster(choice: ClusterChoice, flag: str) -> ClusterPlace:
    """The place of a cluster. Raises `ClusterError`, `ClusterUnfit` where it cannot compute checksums, `UsageError`."""
    cluster = shared_cluster(choice.config)
    info = cluster.info()
    check_gives_checksums(info, hint="Clusters from 6.1.1 on can.")
    keyspace_id = cluster.pd.keyspace_id(choice.keyspace)
    return _checked(ClusterPlace(choice.config, info.api_version, keyspace_id, choice.below), flag)


def find_backup(choice: BackupChoice) -> tuple[BackupPlace, BackupSet]:
    """The place of a backup, and the backup. Raises `BackupSetError`, `StorageError`, `UsageError`."""
    backup = BackupSet.open(open_store(choice.storage))
    ids = keyspaces_of(backup) or (0,)
    if choice.keyspace and not choice.keyspace.isdigit():
        raise UsageError("--keyspace: a backup knows its keyspaces by their ids only", hint="Say the id.")
    if not choice.keyspace and len(ids) > 1:
        raise UsageError(f"the backup has keyspaces {', '.join(map(str, ids))}", hint="Say --keyspace.")
    keyspace_id = int(choice.keyspace) if choice.keyspace else ids[0]
    return _checked(BackupPlace(backup.store, backup.api_version, keyspace_id), "--keyspace"), backup


def _checked(place: Place, flag: str) -> Place:
    try:
        _ = place.codec
    except UnsupportedFormat as error:
        raise UsageError(f"{flag}: {error}") from None
    return place


def _label(codec: KeyCodec) -> str:
    keyspace = f", keyspace {codec.keyspace_id}" if codec.keyspace_id else ""
    below = f", below {codec.below.hex()}" if codec.below else ""
    return f"{codec.api_version.label}{keyspace}{below}"
