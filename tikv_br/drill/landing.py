"""Where in a cluster a drill's rows come to lie, and which keys there are the drill's for its time."""

from __future__ import annotations

from dataclasses import dataclass

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from formats.keys import KeyCodec, successor
from formats.mce import GROUP
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange, intersection
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.first_key import first_rpc_key
from tikv_br.cluster.shared import shared_cluster
from tikv_br.errors import UsageError
from tikv_br.proof.lookup import keyspaces_of
from tikv_br.proof.ranges import codec_of, user_range
from tikv_br.proof.rewrite import UNCHANGED, Rewrite
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.plan import Wanted
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True, slots=True)
class Landing:
    """A place for the rows of a backup. It pickles."""

    cluster: ClusterConfig
    api_version: ApiVersion
    claims: tuple[KeyRange, ...]
    """RPC keys that are the drill's while it runs: nothing was there before."""
    keyspace: int | None = None
    """That all rows go to; None = each to its own."""
    prefix: bytes = b""
    """Put before each user key."""

    @property
    def renames(self) -> bool:
        """Whether rows have other keys there than in the backup."""
        return self.keyspace is not None or bool(self.prefix)

    def wanted(self, backup: BackupSet) -> list[Wanted]:
        """The ranges of a backup, and what they are called here."""
        if not self.renames:
            return [Wanted(whole, UNCHANGED) for whole in backup.ranges]
        found = []
        for whole in backup.ranges:
            source = codec_of(backup.api_version, whole)
            target = source if self.keyspace is None else KeyCodec(backup.api_version, self.keyspace)
            found.append(Wanted(whole, Rewrite.of(source, b"", target, self.prefix)))
        return found

    def restore(self, storage: StorageLocation, state: StorageLocation | None) -> RestoreOptions:
        """A restore to here."""
        # Where a prefix moves what comes after it within the groups of API V2, stores cannot rename keys themselves.
        shifted = self.api_version is ApiVersion.V2 and len(self.prefix) % GROUP
        return RestoreOptions(
            self.cluster,
            storage,
            to_keyspace="" if self.keyspace is None else str(self.keyspace),
            rewrite_prefix=(b"", self.prefix),
            via=Via.UPLOAD if shifted else Via.AUTO,
            state=state,
        )

    def delete(self, start: bytes, end: bytes) -> None:
        """Delete a range of the backup's user keys, as they are called here, and nothing beyond the claims."""
        last = self.prefix + end if end else successor(self.prefix)
        for claim in self.claims:
            codec = codec_of(self.api_version, claim)
            here = intersection(claim, KeyRange(*codec.rpc_range(self.prefix + start, last)))
            if not here.is_empty:
                delete_all(self.cluster, self.api_version, here)


def claims_of(backup: BackupSet, keyspace: int | None, prefix: bytes) -> tuple[KeyRange, ...]:
    """The RPC keys that a backup's rows may have: its own ranges or, renamed, all of the scratch keyspace or prefix.

    Raises `UsageError` for a keyspace that cannot be, and where several keyspaces would become one.
    """
    if keyspace is None and not prefix:
        return tuple(sorted(backup.ranges))
    ids = keyspaces_of(backup) or (0,)
    if keyspace is not None and len(ids) > 1:
        raise UsageError(
            f"the backup has keyspaces {', '.join(map(str, ids))}, which cannot all go to one",
            hint="Take a target by --target-pd or --target-prefix, or a backup of one keyspace.",
        )
    try:
        codecs = [KeyCodec(backup.api_version, each) for each in (ids if keyspace is None else (keyspace,))]
    except UnsupportedFormat as error:
        raise UsageError(f"--target-keyspace: {error}") from None
    return tuple(KeyRange(*codec.rpc_range(prefix, successor(prefix))) for codec in codecs)


def first_key(cluster: ClusterConfig, api_version: ApiVersion, claims: tuple[KeyRange, ...]) -> bytes | None:
    """The first RPC key in any of them; None when all are empty."""
    for claim in claims:
        keyspace = codec_of(api_version, claim).keyspace_id
        found = first_rpc_key(shared_cluster(cluster), keyspace, claim.start, claim.end)
        if found is not None:
            return found
    return None


def delete_all(cluster: ClusterConfig, api_version: ApiVersion, span: KeyRange) -> None:
    """Delete a range of RPC keys of one keyspace, with all versions."""
    codec = codec_of(api_version, span)
    shared_cluster(cluster).raw(codec.keyspace_id).delete_range(*user_range(codec, span))
