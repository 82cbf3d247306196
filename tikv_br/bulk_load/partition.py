"""Writes one partition of sorted rows as files of a backup, in a Spark worker.

A backup that is made of partitions of sorted rows: its encoding, and its commit.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import structs

from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.cluster import versions
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import CONVERTED_TS, Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.write import DataFiles
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum, checksum
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.tasks.task import TaskContext

if TYPE_CHECKING:
    import pyarrow as pa


EXAMPLES = 5
"""Keys that a partition returns as examples."""


@dataclass(frozen=True, slots=True)
class PartitionJob:
    """Parameters that all partitions of a run share. Picklable."""

    output: BackupOptions
    """Location and format of the files."""
    conversion: Conversion
    """Conversion from the target's API version to itself; all rows get its ts."""
    span: KeyRange
    """All keys of the keyspace, as RPC keys."""
    now: int
    """Seconds since the epoch from which TTLs count."""
    dry_run: bool = False
    """Only count rows."""


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """Result of a partition. Keys are user keys."""

    attempt: str
    files: tuple[FileEntry, ...]
    """Files with the ranges of the partition, not yet cut at its neighbours."""
    rows: Checksum
    """Checksum of the rows to load, as the target's stores compute it."""
    first_key: bytes
    """``b""`` if there are no rows to load."""
    last_key: bytes
    duplicates: int
    """Rows whose key another row has that comes before."""
    duplicate_keys: tuple[bytes, ...]
    """The first of them, at most `EXAMPLES`."""
    problems: dict[str, int]
    """Rows that cannot be loaded, by the problem."""
    places: tuple[str, ...]
    """Some of them, with file and line if these are known."""
    sample: tuple[bytes, ...]
    """The first keys, at most `EXAMPLES`."""


def write_partition(job: PartitionJob, batches: Iterator[pa.RecordBatch], context: TaskContext) -> PartitionResult:
    """Write the rows of one partition; of each key the first. Raises `StorageError`, `UsageError` for a row that is too large."""
    attempt = secrets.token_hex(8)
    converter = job.conversion.of(job.span)
    files: DataFiles | None = None
    if not job.dry_run:
        files = DataFiles(open_store(job.output.storage), job.span, attempt, converter, job.output)
    partition = RowCleaner(job.now)
    sums = Checksum()
    try:
        for batch in batches:
            rows = partition.clean(batch)
            if not rows.num_rows:
                continue
            if files is None:
                added = checksum(rows["key"], rows["value"], converter.source.prefix)
            else:
                converted = converter.convert(rows)
                files.add(converted)
                added = converted.source
            sums += added
            context.report(data_bytes=added.total_bytes, keys=added.total_kvs)
        written = files.finish() if files is not None else ()
    except BaseException as error:
        if files is not None:
            files.abandon()
        if isinstance(error, UnsupportedFormat):  # of a row that is larger than any store takes
            raise UsageError(f"a row of the input cannot be stored: {error}") from error
        raise
    return PartitionResult(
        attempt,
        written,
        sums,
        partition.sample[0] if partition.sample else b"",
        partition.last_key or b"",
        partition.duplicates,
        tuple(partition.duplicate_keys),
        dict(partition.problems),
        tuple(partition.places),
        tuple(partition.sample),
    )


class RowCleaner:
    """Removes bad rows and repeated keys from the batches of one partition, and counts them."""

    def __init__(self, now: int) -> None:
        self._now = now
        self.last_key: bytes | None = None
        self.duplicates = 0
        self.duplicate_keys: list[bytes] = []
        self.problems: Counter[str] = Counter()
        self.places: list[str] = []
        self.sample: list[bytes] = []

    def clean(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows to load as `tikv_br.formats.columns.SCHEMA`. Raises `UnsortedKeys`."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        from tikv_br.formats import columns
        from tikv_br.formats.kernels.order import compare_neighbours

        bad = pc.drop_null(batch["problem"])
        if len(bad):
            for found in pc.value_counts(bad).to_pylist():
                self.problems[found["values"]] += found["counts"]
            if "place" in batch.schema.names and len(self.places) < EXAMPLES:
                self.places += pc.drop_null(batch["place"])[: EXAMPLES - len(self.places)].to_pylist()
            batch = batch.filter(pc.is_null(batch["problem"]))
        keys = batch["key"].cast(pa.large_binary())
        if not len(keys):
            return columns.records(keys, batch["value"].cast(pa.large_binary()))
        first = compare_neighbours(*columns.view(keys)) != 0
        first[0] = keys[0].as_py() != self.last_key
        self.last_key = keys[-1].as_py()
        values, ttl = batch["value"].cast(pa.large_binary()), batch["ttl"].to_numpy().astype(np.uint64)
        if not first.all():
            mask = pa.array(first)
            self._count_duplicates(keys.filter(pa.array(~first)))
            keys, values, ttl = keys.filter(mask), values.filter(mask), ttl[first]
        if len(self.sample) < EXAMPLES:
            self.sample += keys[: EXAMPLES - len(self.sample)].to_pylist()
        return columns.records(keys, values, expire_ts=np.where(ttl == 0, 0, ttl + np.uint64(self._now)))

    def _count_duplicates(self, keys: pa.LargeBinaryArray) -> None:
        self.duplicates += len(keys)
        for key in keys[:EXAMPLES].to_pylist():
            if len(self.duplicate_keys) < EXAMPLES and key not in self.duplicate_keys:
                self.duplicate_keys.append(key)


@dataclass
class PartitionContext(BackupContext):
    """State of a backup that is made of partitions of sorted rows."""

    codec: KeyCodec = field(init=False)  # check the cluster
    results: list[PartitionResult] = field(default_factory=list)  # sort and write

    @property
    def duplicates(self) -> int:
        """Rows whose key another row has."""
        return sum(each.duplicates for each in self.results)

    @property
    def duplicate_keys(self) -> list[bytes]:
        """Some keys of duplicates."""
        return sorted(chain.from_iterable(each.duplicate_keys for each in self.results))[:EXAMPLES]

    @property
    def problems(self) -> Counter[str]:
        """Rows that cannot be loaded, by the problem."""
        return sum((Counter(each.problems) for each in self.results), Counter[str]())


def choose_encoding(context: PartitionContext, codec: KeyCodec) -> None:
    """Write rows as the target holds them. Raises `ClusterUnfit` if its stores give no checksums to compare with."""
    context.cluster.require(versions.CHECKSUMS)
    api_version = codec.api_version
    context.codec = codec
    context.source_ranges = (context.codec.rpc_range(),)
    is_v2 = api_version is ApiVersion.V2
    context.conversion = Conversion(api_version, api_version, CONVERTED_TS if is_v2 else 0)
    if is_v2:
        context.set_backup_ts(context.cluster.pd.tso())
        context.scanned_ts = context.backup_ts


def commit(context: PartitionContext) -> None:
    """Commit the backup: its range begins with the first key, and ends with the last one."""
    entries = ledger_entries(context.codec, context.results, context.first_run)
    context.source_ranges = (KeyRange(entries[0].start, entries[-1].end),)
    steps.commit(context, entries)


def ledger_entries(codec: KeyCodec, results: Sequence[PartitionResult], run: str) -> list[LedgerEntry]:
    """An entry for each partition with rows, in the order of keys; each ends where the next begins."""
    ordered = sorted((each for each in results if each.files), key=lambda each: each.first_key)
    starts = [codec.rpc_key(each.first_key) for each in ordered]
    ends = [*starts[1:], codec.rpc_key(ordered[-1].last_key + b"\0")]
    return [
        LedgerEntry(start, end, each.attempt, _within(each.files, start, end), source=each.rows, run=run)
        for each, start, end in zip(ordered, starts, ends, strict=True)
    ]


def _within(files: Sequence[FileEntry], start: bytes, end: bytes) -> tuple[FileEntry, ...]:
    """The files of a partition; the first one begins with it, the last one ends with it."""
    first = structs.replace(files[0], start_key=start)
    cut = [first, *files[1:]]
    cut[-1] = structs.replace(cut[-1], end_key=end)
    return tuple(cut)
