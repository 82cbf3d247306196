"""Compares parts of a transactional backup with a cluster, by checksums that the stores compute of what a reader of now sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.checksum import PrefixRule, txn_checksum
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.compare.files import Comparison, FilePart, differing_sums
from tikv_br.errors import ChecksumMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore

SHOWN_PARTS = 3
BATCH_BYTES = 4 << 20
"""Bytes of values that are read by one request."""


class TxnComparison(Comparison):
    """Compares parts with a cluster. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        store: ObjectStore,
        api_version: ApiVersion,
        others: dict[tuple[str, KeyRange], int] | None = None,
    ) -> None:
        """``store`` holds the files, written in ``api_version``.

        With ``others``, keys that the backup does not have are no difference: their numbers are stored there, by part.
        """
        super().__init__(cluster)
        self._store, self._api_version, self._others = store, api_version, others
        self._codec = KeyCodec(cluster.api_version, mode=KeyMode.TXN)

    def require_all_equal(self, parts: Sequence[FilePart], threads: int, *, exact: bool = False) -> Checksum:
        """The merged checksum of all parts. Raises `ChecksumMismatch` that counts the parts that differ, and names the first."""
        found = run_on_threads(lambda part: self.compare(part, exact=exact), parts, threads, "compare")
        differences = [difference for _, difference in found if difference]
        if differences:
            count = f"{len(differences)} of {len(parts)} parts of the backup differ: " if len(parts) > 1 else ""
            raise ChecksumMismatch(count + "; ".join(differences[:SHOWN_PARTS]))
        return sum((sums for sums, _ in found), start=Checksum())

    def compare(self, part: FilePart, *, exact: bool = False) -> tuple[Checksum, str]:
        """The checksum of a part in the cluster and no text, or an empty one and what differs.

        Reads the files of a part that is not whole, and with `others` if the checksums differ. ``exact`` changes nothing.
        """
        del exact
        locks = SnapshotLocks(self._cluster, self._cluster.pd.tso())
        is_whole = part.span == part.file.key_range
        expected = Checksum(*part.totals[:3]) if is_whole else self._sums(part)
        rule = PrefixRule(part.rewrite.old, part.rewrite.new) if is_whole and part.rewrite.changes else None
        found = txn_checksum(self._cluster, part.target, locks, rule)
        if found == expected:
            return found, ""
        if self._others is None:
            return Checksum(), differing_sums(part, found, expected)
        if different := self._different_rows(part, locks):
            return Checksum(), f"{part.target} of the cluster differs from {part} in {different} rows of the backup"
        self._others[part.file.name, part.span] = found.total_kvs - expected.total_kvs
        return expected, ""

    def count_rows(self, span: KeyRange) -> int:
        """The number of rows that the cluster has in a range."""
        return txn_checksum(self._cluster, span, SnapshotLocks(self._cluster, self._cluster.pd.tso())).total_kvs

    def _sums(self, part: FilePart) -> Checksum:
        """The checksum of the rows of a part, by their keys in the cluster."""
        rows, span = part.rows(self._store, self._api_version, self._codec)
        prefix = rows.target.prefix
        return sum((checksum(page["key"], page["value"], prefix) for page in rows.pages(span)), start=Checksum())

    def _different_rows(self, part: FilePart, locks: SnapshotLocks) -> int:
        """The number of rows of a part that the cluster has not, or with another value."""
        calls = TxnCalls(self._cluster)
        return sum(
            len(wanted.items() - calls.batch_get(sorted(wanted), locks.ts, sorted(locks.resolved)).items())
            for wanted in self._batches(part)
        )

    def _batches(self, part: FilePart) -> Iterator[dict[bytes, bytes]]:
        """The rows of a part by RPC key, about `BATCH_BYTES` at a time."""
        rows, span = part.rows(self._store, self._api_version, self._codec)
        batch, size = dict[bytes, bytes](), 0
        for page in rows.pages(span):
            for key, value in zip(page["key"].to_pylist(), page["value"].to_pylist(), strict=True):
                batch[rows.target.rpc_key(key)] = value
                size += len(value)
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = {}, 0
        yield batch
