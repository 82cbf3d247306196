"""Targets of a drill: a playground of its own, or an empty cluster or keyspace that the drill owns while it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of, keyspace_codec
from tikv_br.backupset.rows import keyspaces_of
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster, first_rpc_key
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.marks import Mark, Marks, new_secret
from tikv_br.drill.ledger import Creation, EntryKind, OwnedRows
from tikv_br.errors import ClusterError, ClusterUnfit, DrillRemains, EtcdError, EtcdRefused, TargetNotEmpty, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import RAW_MODE_END, KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.plan import RestoreRange
from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Destination:
    """Cluster and ranges for the rows of a backup. Picklable."""

    cluster: ClusterConfig
    api_version: ApiVersion
    ranges: tuple[KeyRange, ...]
    """RPC keys that the drill owns; they were empty before."""
    keyspace: int | None = None
    """The keyspace that all rows go to; None = each row to its own."""

    def restore_ranges(self, backup: BackupSet) -> list[RestoreRange]:
        """The ranges of a backup, with the change of their keys on the way here."""
        if self.keyspace is None:
            return [RestoreRange(whole, UNCHANGED) for whole in backup.ranges]
        target = KeyCodec(backup.api_version, self.keyspace)
        return [
            RestoreRange(whole, Rewrite.of(codec_of(backup.api_version, whole), b"", target, b""))
            for whole in backup.ranges
        ]

    def restore_options(self, storage: StorageLocation, state: StorageLocation | None) -> RestoreOptions:
        keyspace = "" if self.keyspace is None else str(self.keyspace)
        return RestoreOptions(
            self.cluster, storage, to_keyspace=keyspace, state=state, by_name=False, command="drill run"
        )

    def delete(self, span: KeyRange) -> None:
        """Delete a range of user keys in each keyspace that the drill owns here.

        The first half of the rows is deleted one by one, which leaves tombstones in API V2, the rest by RawDeleteRange.
        """
        with Cluster.connect(self.cluster) as cluster:
            for owned in self.ranges:
                codec = codec_of(self.api_version, owned)
                part = intersection(owned, codec.rpc_range(span))
                if not part.is_empty:
                    delete_range(cluster, self.api_version, _delete_first_half(cluster, codec, part))

    def check_empty(self) -> None:
        """Raise `TargetNotEmpty` unless the keyspace, or else the whole cluster, holds no key."""
        name = "cluster" if self.keyspace is None else f"keyspace {self.keyspace}"
        ranges = self.ranges if self.keyspace is not None else (whole_cluster(self.api_version),)
        with Cluster.connect(self.cluster) as cluster:
            found = first_key(cluster, ranges)
        if found is not None:
            raise TargetNotEmpty(
                f"the drill's target is not empty: the first key of the {name} is {found.hex()}",
                hint="Use an empty cluster (--target-pd), an empty keyspace (--target-keyspace), or a playground.",
            )


class DrillTarget(Protocol):
    """A kind of place to restore to."""

    @property
    def name(self) -> str:
        """A description for messages and reports."""

    def plan(self, drill: str, backup: BackupSet, reporter: Reporter) -> Creation:
        """The ledger entry of what `make` will make; makes nothing. The reporter gets notices about versions. Raises a `TikvBrError` if it cannot be made."""

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Destination:
        """Make it."""


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """An empty cluster, or an empty keyspace of a cluster, that the drill owns for its time."""

    cluster: ClusterConfig
    keyspace: str = ""
    """Id or name; ``""`` = the whole cluster, where rows keep their keys."""

    @property
    def name(self) -> str:
        return f"{f'keyspace {self.keyspace} of ' if self.keyspace else ''}the cluster at {','.join(self.cluster.pd)}"

    def holds(self, rows: OwnedRows) -> bool:
        """Return whether this target is the cluster or keyspace of a drill's rows."""
        with Cluster.connect(self.cluster) as cluster:
            return (cluster.cluster_id, self._keyspace_id(cluster)) == (rows.cluster_id, rows.keyspace)

    def plan(self, drill: str, backup: BackupSet, reporter: Reporter = silent) -> Creation:  # noqa: ARG002 - the ledger has the drill's id
        """The ranges that the drill will own. Raises `TargetNotEmpty`, `ClusterUnfit`, `UsageError` for the source itself."""
        with Cluster.connect(self.cluster) as cluster:
            info = cluster.info(reporter)
            info.require_encoding(backup.api_version)
            cluster.require(versions.CHECKSUMS)
            if self.keyspace and not KeyCodec(backup.api_version).is_v2:
                raise ClusterUnfit(
                    f"--target-keyspace needs API V2, and the backup is of API {backup.api_version.label}",
                    hint="Use --target-pd with an empty cluster, or a playground.",
                )
            keyspace = self._keyspace_id(cluster)
        self._check_not_source(backup, info.cluster_id, keyspace)
        rows = OwnedRows(
            info.cluster_id, backup.api_version, keyspace, _owned_ranges(backup, keyspace), secret=new_secret()
        )
        destination_of(self.cluster, rows).check_empty()
        return Creation(EntryKind.ROWS, self.name, rows=rows)

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Destination:  # noqa: ARG002 - it exists already
        """The cluster exists already."""
        return destination_of(self.cluster, _rows_of(creation))

    def _keyspace_id(self, cluster: Cluster) -> int | None:
        """Return the keyspace's id in PD; None = the whole cluster."""
        return chosen_keyspace(cluster, self.keyspace) if self.keyspace else None

    def _check_not_source(self, backup: BackupSet, cluster_id: int, keyspace: int | None) -> None:
        if cluster_id != backup.cluster_id:
            return
        if keyspace is None:
            raise UsageError(
                "the target is the cluster that was backed up",
                hint="Pass --target-keyspace with an empty keyspace of it, or --target-pd with another cluster.",
            )
        if keyspace in keyspaces_of(backup):
            raise UsageError(
                f"--target-keyspace: keyspace {keyspace} is the one that was backed up", hint="Use another one."
            )


@dataclass(frozen=True, slots=True)
class OwnedRowsRemover:
    """Deletes the rows of drills from the cluster or keyspace that they own."""

    drill: str
    """The id of the drill that removes."""
    target: DrillTarget
    """Rows of an earlier drill are only deleted from the target of this one: the user has named it as a drill's again."""
    source: ClusterConfig | None

    def remove(self, creation: Creation, drill: str) -> None:
        """Delete the ranges that a drill owns. Raises `DrillRemains` if they may have another owner by now."""
        rows = _rows_of(creation)
        with Cluster.connect(self._check_is_target(creation, rows, drill)) as cluster:
            marks = marks_of(cluster)
            if first_key(cluster, rows.ranges) is not None:
                if drill != self.drill:
                    self._check_is_marked(cluster, marks, rows, drill)
                    if rows.keyspace is None:
                        self._check_source_is_alive(drill)
                for owned in rows.ranges:
                    delete_range(cluster, rows.api_version, owned)
            elif not rows.secret:
                return
            try:
                marks.remove(drill)
            except EtcdError as error:  # without the ledger it does nothing
                log.warning("cannot remove the mark of drill %s from etcd: %s", drill, error.message)

    def _check_is_target(self, creation: Creation, rows: OwnedRows, drill: str) -> ClusterConfig:
        target = self.target
        if isinstance(target, ClusterTarget) and target.holds(rows):
            return target.cluster
        place = "" if rows.keyspace is None else f"keyspace {rows.keyspace} of "
        raise DrillRemains(
            f"rows of drill {drill} remain in {place}cluster {rows.cluster_id} ({creation.place}), which is not the target "
            "of this drill",
            hint=f"Run a drill with that target, or delete the rows and then ledger/{drill}.json below --reports.",
        )

    def _check_is_marked(self, cluster: Cluster, marks: Marks, rows: OwnedRows, drill: str) -> None:
        """Check that the cluster itself has the earlier drill's mark with the ranges of the ledger, which alone proves nothing.

        Raises `DrillRemains`, `EtcdUnreachable`.
        """
        try:
            mark = marks.read(drill)
        except EtcdRefused as error:
            log.warning("cannot read the mark of drill %s: %s", drill, error.message)
            mark = None
        whole = whole_cluster(rows.api_version)
        if rows.keyspace is not None:
            whole = KeyCodec(rows.api_version, rows.keyspace).rpc_range()
        is_marked = mark is not None and mark.matches(rows.secret) and mark.ranges == rows.ranges
        if (
            not is_marked
            or rows.api_version is not cluster.api_version
            or any(intersection(owned, whole) != owned for owned in rows.ranges)
        ):
            raise DrillRemains(
                f"the target has rows that drill {drill} owns by its ledger, but the cluster does not have that drill's mark: "
                "anybody may have written the ledger, and no row is deleted",
                hint=f"If the rows are not needed, delete them and then ledger/{drill}.json below --reports.",
            )

    def _check_source_is_alive(self, drill: str) -> None:
        """Rows with the keys of the source may be its recovery if the source is lost."""
        try:
            alive = self.source is not None and _holds_rows(self.source)
        except ClusterError as error:
            log.warning("the source does not answer: %s", error.message)
            alive = False
        if not alive:
            raise DrillRemains(
                f"the rows of drill {drill}, which was killed, may be a recovery by now: the source does not answer or is empty",
                hint=f"If they are not needed, delete them and then ledger/{drill}.json below --reports.",
            )


def marks_of(cluster: Cluster) -> Marks:
    """The marks of drills that have written to a cluster."""
    return Marks(cluster.pd_etcd, cluster.cluster_id, "drill")


def mark_rows(target: ClusterConfig, drill: str, creation: Creation) -> None:
    """Leave the drill's mark in the cluster whose rows it is about to own. Raises `EtcdError`."""
    rows = _rows_of(creation)
    with Cluster.connect(target) as cluster:
        marks_of(cluster).save(drill, Mark(rows.secret, rows.ranges))


def _holds_rows(source: ClusterConfig) -> bool:
    with Cluster.connect(source) as cluster:
        return first_key(cluster, (whole_cluster(cluster.api_version),)) is not None


def destination_of(cluster: ClusterConfig, rows: OwnedRows) -> Destination:
    return Destination(cluster, rows.api_version, rows.ranges, rows.keyspace)


def whole_cluster(api_version: ApiVersion) -> KeyRange:
    """The RPC keys of all rows of RawKV, in all keyspaces."""
    if api_version is not ApiVersion.V2:
        return KeyRange(b"", b"")
    return KeyRange(KeyCodec(api_version).prefix, RAW_MODE_END)


def first_key(cluster: Cluster, ranges: Sequence[KeyRange]) -> bytes | None:
    """The first RPC key in any of the ranges; None if all are empty."""
    for span in ranges:
        found = first_rpc_key(cluster, 0, span)  # RPC keys name their keyspace
        if found is not None:
            return found
    return None


def delete_range(cluster: Cluster, api_version: ApiVersion, span: KeyRange) -> None:
    """Delete a range of RPC keys of one keyspace, with all versions, by RawDeleteRange."""
    if span.is_empty:
        return
    codec = codec_of(api_version, span)
    keys = codec.user_range(span)
    cluster.raw(codec.keyspace_id).delete_range(keys)


def _delete_first_half(cluster: Cluster, codec: KeyCodec, span: KeyRange) -> KeyRange:
    """Delete the first half of the rows of a range one by one; returns the range of the others."""
    raw = cluster.raw(codec.keyspace_id)
    keys = codec.user_range(span)
    left = (raw.checksum(keys).total_kvs + 1) // 2
    start = span.start
    for page in raw.scan_pages(span, key_only=True):
        if not left:
            break
        deleted = [codec.user_key(key) for key in page.keys[:left].to_pylist()]
        raw.batch_delete(deleted)
        left -= len(deleted)
        start = codec.rpc_key(deleted[-1] + b"\0")
    return KeyRange(start, span.end)


def _owned_ranges(backup: BackupSet, keyspace: int | None) -> tuple[KeyRange, ...]:
    """The backup's ranges, or all of the keyspace. Raises `UsageError` for a keyspace that cannot be used."""
    if keyspace is None:
        return tuple(sorted(backup.ranges))
    ids = keyspaces_of(backup)
    if len(ids) > 1:
        raise UsageError(
            f"--target-keyspace: the backup has keyspaces {', '.join(map(str, ids))}, which cannot all go to one",
            hint="Use --target-pd with an empty cluster, or a backup of one keyspace.",
        )
    codec = keyspace_codec(backup.api_version, keyspace, "--target-keyspace")
    return (codec.rpc_range(),)


def _rows_of(creation: Creation) -> OwnedRows:
    if creation.rows is None:
        raise DrillRemains(f"the ledger has no ranges of {creation.place} that belong to the drill")
    return creation.rows
