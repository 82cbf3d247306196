"""A backup that is made of partitions of sorted rows: its encoding, and its commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.bulk_load.partition import EXAMPLES, PartitionResult
from tikv_br.cluster import versions
from tikv_br.dataflow import steps
from tikv_br.dataflow.context import BackupContext
from tikv_br.dataflow.convert import CONVERTED_TS, Conversion
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange


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
    first = replace(files[0], start_key=start)
    cut = [first, *files[1:]]
    cut[-1] = replace(cut[-1], end_key=end)
    return tuple(cut)
