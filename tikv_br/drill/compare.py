"""Compares a drill's target with the backup, range by range without a gap, under the names that rows have there."""

from __future__ import annotations

from dataclasses import replace

from formats.checksum import Checksum
from tikv_br.backupset.coverage import subtract
from tikv_br.backupset.files import totals
from tikv_br.cluster.shared import shared_cluster
from tikv_br.drill.context import DrillContext
from tikv_br.drill.proven import all_sums
from tikv_br.errors import ChecksumMismatch
from tikv_br.proof.prover import Prover
from tikv_br.report.facts import Compared
from tikv_br.report.figures import counted
from tikv_br.restore.plan import choose_parts
from tikv_br.verify.options import Executor, Level, VerifyOptions
from tikv_br.verify.run import verify

THREADS = 8
WHAT = "the target with the backup"


def as_is(context: DrillContext) -> tuple[Compared, Checksum]:
    """By `verify`, where rows are called as in the backup; and their sums. Raises `ChecksumMismatch`, `BackupDamaged`."""
    cluster = context.target.cluster
    asked = VerifyOptions(context.place, Level.RESTORE, cluster, executor=Executor.DRIVER)
    proven = verify(asked, context.recorder.inside)
    recorded = totals(context.backup_set.files)
    compared = Compared(
        WHAT,
        f"{counted(proven.ranges_compared, 'range')} without a gap: keys, bytes and crc64 of all rows, as the target's stores "
        "count them, beside what the backup recorded when it was made",
        proven.rows_checked,
        0,
    )
    return compared, Checksum(recorded.crc64xor, recorded.total_kvs, recorded.total_bytes)


def renamed(context: DrillContext) -> tuple[Compared, Checksum]:
    """By the rows of the files, as they are called in the target, and no other there. Raises as `as_is`."""
    landing, backup = context.target, context.backup_set
    parts = choose_parts(backup.files, landing.wanted(backup))
    prover = Prover(shared_cluster(landing.cluster), backup.store, backup.api_version)
    found = prover.prove_all(parts, THREADS)
    holes = subtract(landing.claims, [part.target for part in parts])
    for hole in holes:
        if differences := prover.compare_empty(hole):
            raise ChecksumMismatch(differences[0])
    compared = Compared(
        WHAT,
        f"{counted(len(parts) + len(holes), 'range')} without a gap: keys, bytes and crc64 of all rows, as the target's stores "
        "count them, beside those of the backup's files, read and renamed as the target has them",
        found.total_kvs,
        sum(part.file.size for part in parts),
    )
    return compared, found


def seal(context: DrillContext, proven: Checksum) -> None:
    """Write down the sums of the target, if they are those that were proven: while they are so, nothing was added."""
    creation, landing = context.target_creation, context.target
    if creation is None or creation.scratch is None:
        return
    if all_sums(landing) == proven:
        now = replace(creation, scratch=replace(creation.scratch, proven=proven))
        context.ledger.change(creation, now)
        context.target_creation = now
