"""Compares files of a transactional backup with a cluster, by the checksums of its stores."""

from __future__ import annotations

from collections.abc import Sequence

from tikv_br.cancellation import run_on_threads
from tikv_br.cluster.checksum import PrefixRule, txn_checksum
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.compare.files import FilePart, differing_sums
from tikv_br.errors import ChecksumMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore


class TxnComparison:
    """Compares parts of files with what a reader finds in a cluster when the part is compared. Thread-safe.

    Resolves locks in the way. All methods raise as `txn_checksum`.
    """

    def __init__(self, cluster: Cluster, store: ObjectStore, api_version: ApiVersion) -> None:
        """``store`` holds the files, written in ``api_version``."""
        self._cluster = cluster
        self._store = store
        self._api_version = api_version

    def require_all_equal(self, parts: Sequence[FilePart], threads: int) -> Checksum:
        """Compare all ``parts``; returns their merged checksum. Raises `ChecksumMismatch`, besides what `compare` raises."""
        return sum(run_on_threads(self._require_equal, parts, threads, "compare"), start=Checksum())

    def compare(self, part: FilePart) -> tuple[Checksum, str]:
        """The checksum of a part and no text, or an empty one and what differs.

        Files are read only for parts of them. Raises `BackupDamaged`, too.
        """
        if part.span == part.file.key_range:
            rewrite, sums = part.rewrite, part.totals
            expected = Checksum(sums.crc64xor, sums.total_kvs, sums.total_bytes)
            found = self._sums(part.target, PrefixRule(rewrite.old, rewrite.new) if rewrite.changes else None)
        else:
            expected, found = self._row_sums(part), self._sums(part.target)
        return (found, "") if found == expected else (Checksum(), differing_sums(part, found, expected))

    def compare_empty(self, span: KeyRange) -> str:
        """Return the difference if the cluster has rows in a range where the backup has none; else empty."""
        rows = self._sums(span).total_kvs
        return f"the cluster holds {rows} rows in {span}, the backup none" if rows else ""

    def _require_equal(self, part: FilePart) -> Checksum:
        equal, difference = self.compare(part)
        if difference:
            raise ChecksumMismatch(difference)
        return equal

    def _sums(self, span: KeyRange, rule: PrefixRule | None = None) -> Checksum:
        """The checksum of a range now."""
        return txn_checksum(self._cluster, span, SnapshotLocks(self._cluster, self._cluster.pd.tso()), rule)

    def _row_sums(self, part: FilePart) -> Checksum:
        """The checksum of the rows of a part, with the keys that they have in the cluster."""
        rows, span = part.rows(self._store, self._api_version, KeyCodec(self._cluster.api_version, mode=KeyMode.TXN))
        pages = (checksum(page["key"], page["value"], rows.target.prefix) for page in rows.pages(span))
        return sum(pages, start=Checksum())
