"""Drills in a cluster that is not theirs: a recovery cluster, or a scratch keyspace or prefix of any.

Nothing may lie where a drill puts its rows, and of what lies there afterwards only that is removed which the drill has
put there: rows as the backup has them, and keys that its tail has written down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from formats.keys import KeyCodec
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange, subtract
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.tls import TlsFiles
from tikv_br.drill.journal import Journal, digest
from tikv_br.drill.landing import Landing, claims_of, first_key
from tikv_br.drill.ledger import Creation, Kind, Scratch
from tikv_br.drill.proven import remove_proven
from tikv_br.errors import (
    BackupSetError,
    ClusterError,
    ClusterUnfit,
    DrillRemains,
    StorageError,
    TargetNotEmpty,
    UsageError,
)
from tikv_br.proof.fit import check_gives_checksums, check_same_encoding
from tikv_br.proof.lookup import keyspaces_of
from tikv_br.proof.ranges import codec_of
from tikv_br.proof.stored_rows import records
from tikv_br.restore.plan import FilePart, choose_parts
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Flags
    from formats.rawscan import ScanPage

log = logging.getLogger(__name__)

PAGE_ROWS = 4096
"""Rows that are looked at before those of them that are the drill's are deleted: others may be written between."""


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """A cluster that somebody else keeps; what the drill puts there, it removes."""

    cluster: ClusterConfig
    keyspace: str = ""
    """Id or name of a keyspace for all rows; ``""`` = each goes to its own."""
    prefix: bytes = b""
    """Put before each user key."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        parts = [f"keyspace {self.keyspace}"] if self.keyspace else []
        parts += [f"the prefix {self.prefix.hex()}"] if self.prefix else []
        return f"{' with '.join(parts)}{' of ' if parts else ''}the cluster at {','.join(self.cluster.pd)}"

    def plan(self, drill: str, backup: BackupSet) -> Creation:  # noqa: ARG002 - the ledger says whose it is
        """The keys that the drill claims. Raises `TargetNotEmpty`, `UsageError` for the source itself, `ClusterUnfit`."""
        cluster = shared_cluster(self.cluster)
        info = cluster.info()
        check_same_encoding(backup.api_version, info)
        check_gives_checksums(info, hint="Clusters from 6.1.1 on can.")
        if self.keyspace and not KeyCodec(backup.api_version).is_v2:
            raise ClusterUnfit(
                f"--target-keyspace: API {backup.api_version.label} has no keyspaces", hint="Say --target-prefix."
            )
        keyspace = cluster.pd.keyspace_id(self.keyspace) if self.keyspace else None
        self._check_not_source(backup, info.cluster_id, keyspace)
        claims = claims_of(backup, keyspace, self.prefix)
        found = first_key(self.cluster, backup.api_version, claims)
        if found is not None:
            raise TargetNotEmpty(
                f"the drill's target holds data that no drill has made: its first key is {found.hex()}",
                hint="Name a cluster, a keyspace or a prefix that is empty.",
            )
        scratch = Scratch(
            cluster_id=info.cluster_id,
            pd=self.cluster.pd,
            tls=_paths(self.cluster.tls),
            api_version=backup.api_version,
            claims=claims,
            keyspace=keyspace,
            prefix=self.prefix,
            backup=backup.store.location.redacted(),
            proven=None,
        )
        return Creation(Kind.KEYS, self.name, scratch=scratch)

    def make(self, creation: Creation, drill: str, backup: BackupSet) -> Landing:  # noqa: ARG002 - it is there
        """Nothing is to be made: the restore brings the rows."""
        return replace(landing_of(_scratch(creation)), cluster=self.cluster)

    def _check_not_source(self, backup: BackupSet, cluster_id: int, keyspace: int | None) -> None:
        if cluster_id != backup.cluster_id or self.prefix:
            return
        if keyspace is None:
            raise UsageError(
                "the target is the cluster that was backed up",
                hint="Name a place of its own there, by --target-keyspace or --target-prefix, or another cluster.",
            )
        if keyspace in keyspaces_of(backup):
            raise UsageError(
                f"keyspace {keyspace} of this cluster is the one that was backed up", hint="Name another one."
            )


def landing_of(scratch: Scratch) -> Landing:
    """Where the rows lie, as the ledger says."""
    tls = TlsFiles(*(path or None for path in scratch.tls)) if scratch.tls else TlsFiles()
    config = ClusterConfig(pd=scratch.pd, tls=tls)
    return Landing(config, scratch.api_version, scratch.claims, scratch.keyspace, scratch.prefix)


@dataclass(frozen=True, slots=True)
class ScratchRemover:
    """Removes a drill's rows, and leaves whatever else is there."""

    drill: str
    """Who removes."""
    source: ClusterConfig | None
    """The cluster that is backed up."""
    home: ObjectStore
    locate: Callable[[str], StorageLocation]
    """From a URL of the ledger to the place, with the credentials and the key of this run."""

    def remove(self, creation: Creation, drill: str) -> None:
        """Remove what the drill has put there, however far it came. Raises `DrillRemains` when other keys are there."""
        scratch = _scratch(creation)
        landing = landing_of(scratch)
        cluster = shared_cluster(landing.cluster)
        if cluster.cluster_id != scratch.cluster_id:
            raise DrillRemains(
                f"at {','.join(scratch.pd)} is cluster {cluster.cluster_id}, and the drill's rows are in "
                f"{scratch.cluster_id}",
                hint=f"If that one is no more, delete ledger/{drill}.json below --reports.",
            )
        if first_key(landing.cluster, landing.api_version, landing.claims) is None:
            return
        if drill != self.drill and not landing.renames:
            self._check_source_lives(landing)
        if scratch.proven is not None:
            remove_proven(landing, scratch.proven)
            if first_key(landing.cluster, landing.api_version, landing.claims) is None:
                return
        self._remove_known(scratch, landing, drill)

    def _check_source_lives(self, landing: Landing) -> None:
        """See that rows under the names of the source may go: where it is lost, they may be a recovery from the same backup."""
        try:
            lives = self.source is not None and _holds_rows(self.source, landing)
        except ClusterError as error:
            log.warning("the source does not answer: %s", error.message)
            lives = False
        if not lives:
            raise DrillRemains(
                "rows of a drill that was killed stay: the cluster that was backed up does not answer or is empty, so they may "
                "be its recovery",
                hint="Look; if they are of no use, empty the place by hand and delete the drill's page in ledger/.",
            )

    def _remove_known(self, scratch: Scratch, landing: Landing, drill: str) -> None:
        """Delete the rows that are the backup's or the tail's."""
        try:
            backup = BackupSet.open_any(open_store(self.locate(scratch.backup)))
        except (BackupSetError, StorageError) as error:
            raise DrillRemains(
                f"what lies in {landing_name(scratch)} cannot be told from the drill's rows without the backup at "
                f"{scratch.backup}: {error.message}",
                hint=f"Empty it by hand, then delete ledger/{drill}.json below --reports.",
            ) from None
        tailed = Journal(self.home, drill).read()
        parts = choose_parts(backup.files, landing.wanted(backup))
        foreign = [key for part in parts for key in _sweep(landing, backup, part, part.target, tailed)]
        holes = subtract(landing.claims, [part.target for part in parts])
        foreign += [key for hole in holes for key in _sweep(landing, backup, None, hole, tailed)]
        if foreign:
            raise DrillRemains(
                f"{len(foreign)} keys in {landing_name(scratch)} were written by no drill, {min(foreign).hex()} the first"
            )


def _holds_rows(source: ClusterConfig, landing: Landing) -> bool:
    api_version = shared_cluster(source).info().api_version
    whole = KeyCodec(api_version).rpc_range(b"", b"")
    claims = landing.claims if api_version is landing.api_version else (KeyRange(*whole),)
    return first_key(source, api_version, claims) is not None


def landing_name(scratch: Scratch) -> str:
    """The claimed keys, for people."""
    return f"{', '.join(map(str, scratch.claims))} of cluster {scratch.cluster_id}"


def _sweep(
    landing: Landing, backup: BackupSet, part: FilePart | None, span: KeyRange, tailed: Collection[bytes]
) -> Iterator[bytes]:
    """Delete the drill's rows of a range page by page, and give the RPC keys of the others."""
    codec = codec_of(landing.api_version, span)
    raw = shared_cluster(landing.cluster).raw(codec.keyspace_id)
    known: pa.Table | None = None
    for page in raw.scan_pages(span.start, span.end, PAGE_ROWS):
        if known is None:
            known = _known_rows(backup, part, codec)
        ours = _ours(page, known, tailed)
        for first, last in _runs(ours):
            raw.delete_range(codec.user_key(page.keys[first].as_py()), codec.user_key(page.keys[last].as_py()) + b"\0")
        yield from (page.keys[int(place)].as_py() for place in np.flatnonzero(~ours))


def _known_rows(backup: BackupSet, part: FilePart | None, target: KeyCodec) -> pa.Table:
    """The rows of a file, as ``key`` (RPC key in the cluster) and ``value``; of a key the newest version comes first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns: list[list[pa.Array]] = [[], []]
    if part is not None:
        source = codec_of(backup.api_version, part.span)
        for batch in records(backup.store, part.file, source, part.span):
            renamed = part.rewrite.apply(batch, source, target)
            columns[0].append(pc.binary_replace_slice(renamed["key"], 0, 0, target.prefix))
            columns[1].append(renamed["value"])
    keys, values = (pa.chunked_array(column, pa.large_binary()) for column in columns)
    return pa.table({"key": keys, "value": values})


def _ours(page: ScanPage, known: pa.Table, tailed: Collection[bytes]) -> Flags:
    """Which rows are a drill's: as the backup has them, key and value, or with a key that the tail has written down."""
    import pyarrow as pa
    import pyarrow.compute as pc

    places = pc.index_in(page.keys, value_set=known["key"])
    same = (
        pc.equal(known["value"].take(places.fill_null(0)), page.values) if known.num_rows else pa.nulls(len(page.keys))
    )
    found = pc.fill_null(pc.and_kleene(places.is_valid(), same.cast(pa.bool_())), fill_value=False)
    ours = np.array(found.to_numpy(zero_copy_only=False) if isinstance(found, pa.Array) else found.to_numpy(), np.bool_)
    if tailed:
        for place in np.flatnonzero(~ours):
            ours[place] = digest(page.keys[int(place)].as_py()) in tailed
    return ours


def _runs(ours: Flags) -> Iterator[tuple[int, int]]:
    """First and last place of each run of rows that are ours."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], ours, [False])).astype(np.int8)))
    yield from ((int(first), int(end) - 1) for first, end in edges.reshape(-1, 2))


def _scratch(creation: Creation) -> Scratch:
    if creation.scratch is None:
        raise DrillRemains(f"the ledger does not say which keys of {creation.place} are a drill's")
    return creation.scratch


def _paths(tls: TlsFiles) -> tuple[str, ...]:
    return (tls.ca or "", tls.cert or "", tls.key or "") if tls.enabled else ()
