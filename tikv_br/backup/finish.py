"""From finished tasks to a backup: proof of coverage, comparison, commit, hand-over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from formats.checksum import Checksum
from tikv_br.backup.context import BackupContext
from tikv_br.backup.convert import user_range
from tikv_br.backup.describe import describe
from tikv_br.backupset import coverage, index, layout
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.errors import ChecksumMismatch, ClusterError, CoverageError, SafePointError

CHECKSUM_THREADS = 16
"""Checksums under way at once: the stores' work, not ours."""


def prove_coverage(context: BackupContext) -> None:
    """Hold the ledger in the storage against the range. Raises `CoverageError` for a hole, an overlap, a lost entry."""
    recorded = {info.name for info in context.store.list(layout.LEDGER)}
    for entry in context.entries:
        name = layout.ledger_name(entry.interval, entry.attempt)
        if name not in recorded:
            raise CoverageError(f"{entry.interval} was backed up, but its record {name} is gone")
    coverage.prove(context.source_ranges, (entry.interval for entry in context.entries))


def compare_checksums(context: BackupContext) -> None:
    """Compare each interval with the cluster's own checksum. Raises `ChecksumMismatch` naming the first that differs."""

    def compare(entry: LedgerEntry) -> None:
        codec = context.conversion.of(entry.interval).source
        found = context.cluster.raw(codec.keyspace_id).checksum(*user_range(codec, entry.interval))
        if found != entry.source:
            context.spoiled = True
            raise _mismatch(entry, found)

    with ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum") as pool:
        try:
            for _ in pool.map(compare, context.entries):
                context.check_held()
        finally:
            pool.shutdown(cancel_futures=True)


def commit(context: BackupContext) -> None:
    """Make what the tasks wrote a backup, and enter it in the index of the folder that it lies in."""
    context.check_held()
    if context.manifest is None:
        context.manifest = context.writer.commit(describe(context), context.entries, context.confirm_held)
    else:
        context.confirm_held()
        context.writer.tidy(context.manifest)
    index.enter(context.options.storage, context.manifest)


def settle_safe_point(context: BackupContext) -> None:
    """Leave the safe point to whoever tails from backup-ts. The backup is complete, also if this fails."""
    if context.keeper is None:
        return
    try:
        context.keeper.leave_for(context.options.gc_ttl)
    except ClusterError as error:
        raise SafePointError(
            f"the backup is complete, but nothing holds GC back from its backup-ts: {error.message}",
            hint="The backup can be restored; a tail can follow it only if GC has not passed its backup-ts by then.",
        ) from None


def _mismatch(entry: LedgerEntry, found: Checksum) -> ChecksumMismatch:
    ours = entry.source
    return ChecksumMismatch(
        f"{entry.interval}: the cluster counts {found.total_kvs} rows, {found.total_bytes} bytes, "
        f"crc64xor {found.crc64xor:016x}; the backup has {ours.total_kvs} rows, {ours.total_bytes} bytes, "
        f"crc64xor {ours.crc64xor:016x}",
        hint="Were there writes, or keys that expired, while the backup ran? Stop the writers, or leave out --checksum.",
    )
