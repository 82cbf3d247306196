"""Prove that the cluster holds what the backup holds: the stores' own checksums against the recorded ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from formats.checksum import Checksum, checksum
from formats.errors import FormatError
from formats.keys import KeyCodec
from formats.rows import LiveFilter, from_storage
from formats.sst import SstReader
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import BackupDamaged, ChecksumMismatch
from tikv_br.restore.inspect import Inspected, StoredSst
from tikv_br.restore.plan import FilePart
from tikv_br.restore.ranges import codec_of, user_range


class Prover:
    """Compares part by part. A file of which only a part was wanted, or whose rows may expire, is read where need be."""

    def __init__(self, cluster: Cluster, backup: BackupSet, facts: Mapping[str, Inspected]) -> None:
        self._cluster = cluster
        self._backup = backup
        self._facts = facts

    def prove(
        self, parts: Sequence[FilePart], threads: int, on_done: Callable[[FilePart], None] = lambda _part: None
    ) -> Checksum:
        """The checksum of all parts as the cluster has them. Raises `ChecksumMismatch` naming range and file."""

        def one(part: FilePart) -> Checksum:
            found = self._prove_part(part)
            on_done(part)
            return found

        with ThreadPoolExecutor(threads, thread_name_prefix="prove") as pool:
            try:
                return reduce(Checksum.merge, pool.map(one, parts), Checksum())
            finally:
                pool.shutdown(cancel_futures=True)

    def _prove_part(self, part: FilePart) -> Checksum:
        codec = codec_of(self._backup.api_version, part.span)
        start, end = user_range(codec, part.span)
        began = int(time.time())
        found = self._cluster.raw(codec.keyspace_id).checksum(start, end)
        ended = int(time.time()) + 1
        expected = Checksum(part.file.crc64xor, part.file.total_kvs, part.file.total_bytes)
        if part.span == part.file.key_range and found == expected:
            return found
        if part.span != part.file.key_range or self._facts[part.file.name].may_expire:
            # Rows expire by each store's clock, which may differ from ours by a little, and while it counts.
            expected = self._expected(part, codec, began)
            for now in (began, *range(began - 2, began), *range(began + 1, ended + 2)):
                if found == self._expected(part, codec, now):
                    return found
        raise ChecksumMismatch(
            f"{part.span} of the cluster is not {part.file.name}: {found.total_kvs} rows, {found.total_bytes} bytes, "
            f"crc64xor {found.crc64xor:016x}, instead of {expected.total_kvs} rows, {expected.total_bytes} bytes, "
            f"crc64xor {expected.crc64xor:016x}"
        )

    def _expected(self, part: FilePart, codec: KeyCodec, now: int) -> Checksum:
        """What the part's rows come to, less those that have expired at ``now`` (seconds since the epoch)."""
        start, end = user_range(codec, part.span)
        alive = LiveFilter(now)
        total = Checksum()
        try:
            for rows in SstReader(StoredSst(self._backup.store, part.file)).batches():
                records = _within(alive.apply(from_storage(rows, codec)), start, end)
                total += checksum(records["key"], records["value"], codec.prefix)
        except FormatError as error:
            raise BackupDamaged(f"{part.file.name} is not sound: {error}") from None
        return total


def _within(records: pa.RecordBatch, start: bytes, end: bytes) -> pa.RecordBatch:
    """The records whose user key lies in [start, end), where an empty end is no end."""
    keep = pc.greater_equal(records["key"], pa.scalar(start, pa.large_binary()))
    if end:
        keep = pc.and_(keep, pc.less(records["key"], pa.scalar(end, pa.large_binary())))
    return records.filter(keep)
