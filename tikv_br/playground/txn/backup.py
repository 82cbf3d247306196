"""Backups of transactional data: what a reader at the end version sees, as TiKV's records of two column families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.mvcc import PUT
from tikv_br.playground.backup_files import RawBackup, RegionSpan
from tikv_br.playground.encoding import Row, memcomparable
from tikv_br.playground.engine import DEFAULT, WRITE
from tikv_br.playground.external_storage import ExternalStorage
from tikv_br.playground.node import StoreNode
from tikv_br.playground.txn.mvcc import MvccReader, Snapshot
from tikv_br.playground.txn.state import FutureTs, KeyFault, TxnState, locked


class TxnBackup(RawBackup):
    """One request for transactional data, region by region."""

    def __init__(
        self, node: StoreNode, request: brpb_pb2.BackupRequest, storage: ExternalStorage, state: TxnState
    ) -> None:
        super().__init__(node, request, storage)
        self._state = state
        self._reader = MvccReader(node.engine)
        self._snapshot = Snapshot.of(request.context, request.end_version)
        if not node.release.backs_up_over_locks:
            self._snapshot = replace(self._snapshot, ignored=frozenset())
        self._is_default = True  # the column family of the request does not count

    def run(self, span: RegionSpan) -> brpb_pb2.BackupResponse:
        """Back up one span. The answer to a region with a lock has nothing but that."""
        try:
            self._state.observe(self._request.end_version)
            return super().run(span)
        except KeyFault as fault:
            return brpb_pb2.BackupResponse(error=brpb_pb2.Error(kv_error=fault.error))
        except FutureTs as fault:
            fields = f"attempted_ts: TimeStamp({fault.ts}), limit: TimeStamp({fault.limit})"
            text = f"Txn(Error(InvalidMaxTsUpdate(InvalidMaxTsUpdate {{ {fields} }})))"
            return brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=text))

    def _files(self, span: RegionSpan) -> Iterator[brpb_pb2.File]:
        """Up to two files of the same name: long values, and commit records."""
        stem, request = self._stem(span), self._request
        covered = KeyRange(span.start, span.end)
        for family in (DEFAULT, WRITE):
            written = self._write(self._rows(span, family))
            if written is not None:
                versions = {"start_version": request.start_version, "end_version": request.end_version}
                plain, sums = written
                yield self._save(stem, family, plain, sums, covered, **versions)

    def _rows(self, span: RegionSpan, family: str) -> Iterator[tuple[Row, bytes | None]]:
        """Stored rows of a column family. A version counts in the file that holds its value, a delete in ``write``."""
        bounds = (memcomparable(span.start) if span.start else b"", memcomparable(span.end) if span.end else b"")
        for row in self._reader.scan(*bounds, self._snapshot):
            if row.lock is not None:
                raise locked(row.lock)
            is_put = row.record.kind == PUT
            if row.commit_ts <= self._request.start_version or not (is_put or self._request.start_version):
                continue
            is_long = is_put and row.record.value is None
            if family == WRITE:
                pair = None if is_long else row.key + (row.record.value or b"")
                yield (row.record_key, row.record.encode()), pair
            elif is_long:
                value = self._reader.value(row)
                yield (row.value_key, value), row.key + value
