"""Options of a comparison, its sides A and B as values that pickle, and the ranges to compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import keyspace_codec, shown_keyspaces
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import chosen_codec
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace, keyspace_names
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.compare.report import Meter
from tikv_br.compare.sides import ClusterSide
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, gaps, intersection
from tikv_br.progress_events import Reporter
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A keyspace of a cluster."""

    config: ClusterConfig
    keyspace: str | int = ""
    """Id or name; ``""`` = for A the default keyspace, for B the keyspace with A's name. A number is not looked up in PD."""


@dataclass(frozen=True, slots=True)
class BackupChoice:
    """A keyspace of a backup."""

    storage: StorageLocation
    keyspace: str = ""
    """Id or name; ``""`` = the backup's only keyspace."""


class DiffOptions(ExecutorOptions, frozen=True):
    """Options of one comparison of A, the reference, with B."""

    a: ClusterChoice | BackupChoice
    b: ClusterChoice
    span: KeyRange = EVERY_KEY
    """Range of user keys."""
    keys: int = 20
    """Maximum number of different keys to list; all are counted."""
    allow_empty: bool = False
    """Accept that an explicit range or keyspace has no row on either side."""
    exact: bool = False
    """Compare all rows. Checksums miss identical changes in an even number of rows."""

    @property
    def has_choice(self) -> bool:
        """Return whether a range or a keyspace was requested."""
        return bool(self.span != EVERY_KEY or self.a.keyspace != "" or self.b.keyspace != "")

    @property
    def where(self) -> ExecutorOptions:
        """Return the executor: this machine unless Spark was requested, because the stores do most of the work."""
        return self.choose("spark" if self.executor == "spark" else "driver", self.threads)


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """A keyspace of a cluster. Picklable."""

    config: ClusterConfig
    codec: KeyCodec
    keyspace_name: str = ""

    def side(self, clusters: ClusterPool, meter: Meter) -> ClusterSide:
        """Connect to it; ``meter`` counts the requests."""
        return ClusterSide(clusters.get(self.config).raw(self.codec.keyspace_id), meter)

    def with_expiries(self, clusters: ClusterPool, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that still exist, ascending, with their expiries, which scans do not return: one request per row."""
        if not self.codec.api_version.has_ttl or not rows.num_rows:
            return rows
        import pyarrow as pa

        from tikv_br.formats import columns

        cluster = clusters.get(self.config)
        keys = columns.from_list([self.codec.rpc_key(key) for key in rows["key"].to_pylist()])
        expire_ts, there = TtlFetcher(cluster, cluster.raw(self.codec.keyspace_id)).fetch(keys)
        return columns.records(rows["key"], rows["value"], expire_ts=expire_ts).filter(pa.array(there))

    def __str__(self) -> str:
        return f"cluster {','.join(self.config.pd)} (API {_label(self.codec, self.keyspace_name)})"


@dataclass(frozen=True, slots=True)
class BackupPlace:
    """A keyspace of a backup. Picklable."""

    store: ObjectStore
    codec: KeyCodec
    keyspace_name: str = ""

    def __str__(self) -> str:
        return f"backup {self.store.location} (API {_label(self.codec, self.keyspace_name)})"


class Unit(NamedTuple):
    """A range of user keys to compare: a region's of cluster A, or a file's of backup A. Picklable."""

    span: KeyRange
    file: FileEntry | None = None
    """File of a backup with all its rows of the range; None = there are none."""

    def __str__(self) -> str:
        return str(self.span)


def find_cluster(clusters: ClusterPool, choice: ClusterChoice, flag: str, reporter: Reporter) -> ClusterPlace:
    """The place of a cluster; the reporter gets notices about its version. Raises `ClusterError`, `ClusterUnfit` where it cannot compute checksums, `UsageError`."""
    cluster = clusters.get(choice.config)
    info = cluster.info(reporter)
    cluster.require(versions.CHECKSUMS)
    keyspace_id = chosen_keyspace(cluster, choice.keyspace)
    codec = keyspace_codec(info.api_version, keyspace_id, flag)
    return ClusterPlace(choice.config, codec, keyspace_names(cluster, [keyspace_id]).get(keyspace_id, ""))


def find_backup(choice: BackupChoice) -> tuple[BackupPlace, BackupSet]:
    """The place of a backup, and the backup. Raises `BackupSetError`, `StorageError`, `UsageError`."""
    backup = BackupSet.open(open_store(choice.storage))
    backup.require_full()
    codec = chosen_codec(backup, choice.keyspace)
    names = {} if backup.manifest is None else backup.manifest.description.names
    return BackupPlace(backup.store, codec, names.get(codec.keyspace_id, "")), backup


def _label(codec: KeyCodec, name: str) -> str:
    keyspace = f", keyspace {shown_keyspaces([codec.keyspace_id], [name])}" if codec.keyspace_id else ""
    return f"{codec.api_version.label}{keyspace}"


MOST_TASKS = 512
"""Maximum number of tasks; neighbouring units are grouped."""


def region_units(wanted: KeyRange, ends: Iterable[bytes], codec: KeyCodec) -> list[Unit]:
    """Return one unit per region, given by where they end within the ``wanted`` range of RPC keys, in order."""
    units, start = [], wanted.start
    for end in ends:
        part = KeyRange(start, end)
        if not part.is_empty:
            units.append(Unit(codec.user_range(part)))
            start = end
    return units


def file_units(
    wanted: KeyRange, covered: Sequence[KeyRange], files: Sequence[FileEntry], codec: KeyCodec
) -> list[Unit]:
    """One unit per file of a backup and per covered range without a file, cut to the ``wanted`` range.

    Raises `UsageError` if the backup covers no part of it.
    """
    inside = [part for each in covered if not (part := intersection(each, wanted)).is_empty]
    if not inside:
        raise UsageError(
            f"the backup contains no part of the requested range: it covers {', '.join(map(str, covered))}"
        )
    units = list(_file_parts(inside, files, codec))
    spans = [file.key_range for file in files]
    units += [Unit(codec.user_range(gap)) for part in inside for gap in gaps(part, spans)]
    return sorted(units, key=lambda unit: unit.span)


def tasks(units: Sequence[Unit], most: int = MOST_TASKS) -> list[tuple[Unit, ...]]:
    """Neighbouring units put together."""
    size = max(1, -(-len(units) // most))
    return [tuple(units[first : first + size]) for first in range(0, len(units), size)]


def _file_parts(inside: Iterable[KeyRange], files: Sequence[FileEntry], codec: KeyCodec) -> Iterator[Unit]:
    for each in inside:
        for file in files:
            part = intersection(file.key_range, each)
            if not part.is_empty:
                yield Unit(codec.user_range(part), file)
